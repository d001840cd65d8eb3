"""What models of every kind share with lm-evaluation-harness: set-up, text, generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import maybe_truncate, normalize_gen_kwargs
except ImportError as error:
    raise ImportError(
        "the adapter needs lm-evaluation-harness: install the extra 'eval'"
    ) from error

from sparda_jax.cli import load_model
from sparda_jax.config import SamplingParams
from sparda_jax.evaluation.generation import Answerer
from sparda_jax.tokenization import Tokenizer

_SAMPLING = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"}


# Makes an engine of a model, its tokenizer and lengths of the engine's config.
Start = Callable[[Any, Tokenizer, dict[str, Any]], Any]


class HarnessLM(TemplateLM):  # type: ignore[misc]
    """A model that answers prompts; subclasses say what log-likelihoods it has.

    Attributes:
        engine: what runs.
        answer: generates for batches.
        tokenizer: of its model; also what the harness asks for chat templates.
        batch_size: requests that run together.
        limit: tokens of prompt and answer at most.
        allow_truncation: cut prompts that are too long at their start, as the harness does.
    """

    def __init__(
        self,
        start: Start,
        answerer: Callable[[Any, Tokenizer], Answerer],
        *,
        pretrained: str = "default",
        batch_size: int | str = 8,
        max_batch_size: int | None = None,
        device: str | None = None,
        engine: Any = None,
        tokenizer: Tokenizer | None = None,
        dtype: str | None = None,
        cache_dir: str | None = None,
        max_length: int | None = None,
        prefill_chunk: int = 512,
        allow_truncation: bool = False,
    ):
        """Loads a model, or takes an engine that is there.

        Args:
            start: see there; of the subclass, as `answerer`.
            answerer: generates, given an engine and its tokenizer.
            pretrained: "default", a directory, a GGUF file or a hub id.
            batch_size: requests that run together.
            max_batch_size: of the harness; not used, since no size is tried out.
            device: of the harness; only the one that jax uses.
            engine: in place of a model to load, with its `tokenizer`.
            tokenizer: see `engine`.
            dtype: of the weights; None: what suits the device.
            cache_dir: where the default model is kept.
            max_length: tokens of a sequence; None: the model's.
            prefill_chunk: tokens of a prefill call.
            allow_truncation: see the class.

        Raises:
            NotImplementedError: a batch size to be found out, another device.
            ValueError: settings that contradict each other.
        """
        super().__init__()
        # First: a mistake should not wait for the weights.
        _check_harness(batch_size, device)
        if (engine is None) != (tokenizer is None):
            raise ValueError("an engine comes with its tokenizer")
        if engine is None:
            lengths = {"max_length": max_length, "prefill_chunk": prefill_chunk}
            model, tokenizer = load_model(pretrained, dtype, cache_dir)
            engine = start(model, tokenizer, lengths)
        assert tokenizer is not None
        self.engine, self.tokenizer = engine, tokenizer
        self.answer = answerer(engine, tokenizer)
        self.limit = engine.config.max_length or engine.model.config.max_position_embeddings
        self.batch_size, self.allow_truncation = int(batch_size), allow_truncation

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text.

        Raises:
            ValueError: the tokenizer names none.
        """
        if not self.tokenizer.eos_token_ids:
            raise ValueError("the tokenizer names no end token")
        return self.tokenizer.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What an empty context is replaced by."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """For the harness's cache of chat requests."""
        return self.tokenizer.fingerprint()[:16]

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids; None: with what the model expects around a text, unless it stands there."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token_id
            opened = bos is not None and string.startswith(self.tokenizer.decode([bos]))
            add_special_tokens = not opened
        return self.tokenizer.encode(string, add_special=add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as text; without a generation prompt its last turn stays open."""
        if add_generation_prompt:
            return self.tokenizer.apply_chat_template(chat_history)
        *before, last = chat_history
        return self.tokenizer.apply_chat_template(before) + last["content"]

    def batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Indices of like length together; the last batch repeats a row, for the same program."""
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        size = self.batch_size
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        return [batch + [batch[-1]] * (size - len(batch)) for batch in batches]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers without the text that stopped them.

        Raises:
            NotImplementedError: settings that the engine does not know.
            ValueError: a prompt beyond the limit, unless it may be cut.
        """
        prepared = []
        for seed, request in enumerate(requests):
            context, settings = request.args
            prepared.append(self._prepare(context, settings, seed))
        texts = [""] * len(requests)
        for indices in self.batches([len(prompt) for prompt, _, _ in prepared]):
            prompts, sampling, stops = zip(*(prepared[i] for i in indices), strict=True)
            answers, counters = self.answer(prompts, sampling, stops)
            self.count(counters)
            for i, given in zip(indices, answers, strict=True):
                texts[i] = given.text
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def count(self, counters: dict[str, Any]) -> None:
        """Takes what a batch of answers counted."""

    def _prepare(
        self, context: str, settings: dict[str, Any], seed: int
    ) -> tuple[list[int], SamplingParams, list[str]]:
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(settings))
        unknown = sorted(kwargs.keys() - _SAMPLING)
        if unknown:
            raise NotImplementedError(
                f"generation setting {unknown[0]}={kwargs[unknown[0]]!r}, known are "
                f"{', '.join(sorted(_SAMPLING))}"
            )
        prompt = self.tok_encode(context)
        if self.allow_truncation:
            prompt, _ = maybe_truncate(prompt, kwargs["max_gen_toks"], self.limit, side="left")
        sampling = SamplingParams(
            max_new_tokens=kwargs["max_gen_toks"],
            temperature=kwargs.get("temperature", 0.0) if kwargs["do_sample"] else 0.0,
            top_p=kwargs.get("top_p", 1.0),
            top_k=kwargs.get("top_k", 0),
            seed=seed,
        )
        return prompt, sampling, kwargs["until"]


def _check_harness(batch_size: int | str, device: str | None) -> None:
    """Refuses what the harness may ask for and nobody here does."""
    if not str(batch_size).isdigit() or int(batch_size) < 1:
        raise NotImplementedError(f"batch_size {batch_size!r}: only a number of requests")
    if device not in (None, "", "cpu", "gpu", "cuda", "cuda:0", "auto"):
        raise NotImplementedError(f"device {device!r}: the one that jax uses is used")
