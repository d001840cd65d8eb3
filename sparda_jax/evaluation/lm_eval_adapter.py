r"""The model as lm-evaluation-harness sees it: `sparda_jax`, in any attention mode.

    python -m sparda_jax.evaluation.lm_eval_adapter --model sparda_jax \
        --model_args pretrained=default,mode=sparda --tasks <names> --batch_size 8

This is the harness's own command line with our model registered. From Python: import this module,
then `lm_eval.simple_evaluate(model="sparda_jax", ...)`, or pass a `SpardaLM` as `model`.
Log-likelihoods come from the engine's prefill in its mode, answers from the engine's decode.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import maybe_truncate, normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(
        "the adapter needs lm-evaluation-harness: install the extra 'eval'"
    ) from error

from sparda_jax.cli import load_model, load_selector
from sparda_jax.config import EngineConfig, SamplingParams, SparseConfig
from sparda_jax.engine.generate import Engine
from sparda_jax.evaluation.generation import EngineAnswerer
from sparda_jax.evaluation.likelihood import score_sequences
from sparda_jax.forecast.files import forecast_policy
from sparda_jax.tokenization import Tokenizer

_SAMPLING = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"}


@register_model("sparda_jax")
class SpardaLM(TemplateLM):  # type: ignore[misc]
    """An autoregressive model with exact log-likelihoods.

    Attributes:
        engine: what runs.
        tokenizer: of its model; also what the harness asks for chat templates.
        batch_size: requests that run together.
        max_length: tokens that a log-likelihood is conditioned on at most.
        allow_truncation: cut prompts that are too long at their start, as the harness does.
    """

    def __init__(
        self,
        pretrained: str = "default",
        *,
        batch_size: int | str = 8,
        max_batch_size: int | None = None,
        device: str | None = None,
        engine: Engine | None = None,
        tokenizer: Tokenizer | None = None,
        mode: str | None = None,
        offload: str = "none",
        forecast: str | None = None,
        dtype: str | None = None,
        cache_dir: str | None = None,
        max_length: int | None = None,
        length_step: int = 256,
        prefill_chunk: int = 512,
        allow_truncation: bool = False,
    ):
        """Loads a model, or takes an engine that is there.

        Args:
            pretrained: "default", a directory, a GGUF file or a hub id.
            batch_size: requests that run together.
            max_batch_size: of the harness; not used, since no size is tried out.
            device: of the harness; only the one that jax uses.
            engine: in place of a model to load, with its `tokenizer`.
            tokenizer: see `engine`.
            mode: attention mode; None: dense.
            offload: "none" or "host".
            forecast: weights for mode "sparda"; None: those that ship with the default model.
            dtype: of the weights; None: what suits the device.
            cache_dir: where the default model is kept.
            max_length: tokens of a sequence; None: the model's.
            length_step: lengths are rounded up to multiples, so that few programs are compiled.
            prefill_chunk: tokens of a prefill call.
            allow_truncation: see the class.

        Raises:
            NotImplementedError: a batch size to be found out, another device.
            ValueError: settings that contradict each other.
        """
        super().__init__()
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise NotImplementedError(f"batch_size {batch_size!r}: only a number of requests")
        if device not in (None, "", "cpu", "gpu", "cuda", "cuda:0", "auto"):
            raise NotImplementedError(f"device {device!r}: the one that jax uses is used")
        if (engine is None) != (tokenizer is None):
            raise ValueError("an engine comes with its tokenizer")
        if engine is None:
            if mode == "sparda" and forecast is None and pretrained == "default":
                forecast = "default"
            args = argparse.Namespace(
                model=pretrained, dtype=dtype, cache_dir=cache_dir, mode=mode or "dense",
                forecast=forecast, verify_forecast=True,
            )  # fmt: skip
            model, tokenizer = load_model(args)
            sparse = forecast_policy(forecast) if forecast else None
            config = EngineConfig(
                mode=args.mode,
                offload="none" if args.mode == "dense" else offload,  # type: ignore[arg-type]
                max_length=max_length,
                length_step=length_step,
                prefill_chunk=prefill_chunk,
            )
            selector = load_selector(args, model, tokenizer)
            engine = Engine(model, sparse=sparse or SparseConfig(), config=config, **selector)
        assert tokenizer is not None
        self.engine, self.tokenizer = engine, tokenizer
        self.batch_size, self.allow_truncation = int(batch_size), allow_truncation
        limit = engine.config.max_length or engine.model.config.max_position_embeddings
        # The last token of a sequence is only predicted.
        self.max_length = limit - 1

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

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Of each continuation given its context, and whether greedy decoding says it.

        Raises:
            ValueError: a continuation that is empty, or longer than the model's limit.
        """
        for number, (_, _, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                raise ValueError(
                    f"the continuation of request {number} has {len(continuation)} tokens, "
                    f"expected 1 to {self.max_length}"
                )
        rows = [(context + cont)[-self.max_length - 1 :] for _, context, cont in requests]
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for indices in self._batches([len(row) for row in rows]):
            scores = score_sequences(self.engine, [rows[i] for i in indices])
            for i, score in zip(indices, scores, strict=True):
                size = len(requests[i][2])
                log_p = score.log_p[len(score.log_p) - size :].astype("float64")
                found[i] = float(log_p.sum()), bool(score.likeliest[-size:].all())
        for (key, _, _), result in zip(requests, found, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, result)
        return found

    def _batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Indices of like length together; the last batch repeats a row, for the same program."""
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        size = self.batch_size
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        return [batch + [batch[-1]] * (size - len(batch)) for batch in batches]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, in windows of the maximum length that predict every token once."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners = []
        for number, request in enumerate(requests):
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for pair in pairs:
                context, continuation = make_disjoint_window(pair)
                windows.append((None, context, continuation))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (log_p, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += log_p
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

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
        answer = EngineAnswerer(self.engine, self.tokenizer)
        texts = [""] * len(requests)
        for indices in self._batches([len(prompt) for prompt, _, _ in prepared]):
            prompts, sampling, stops = zip(*(prepared[i] for i in indices), strict=True)
            answers, _ = answer(prompts, sampling, stops)
            for i, given in zip(indices, answers, strict=True):
                texts[i] = given.text
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

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
        prompt, limit = self.tok_encode(context), self.max_length + 1
        if self.allow_truncation:
            prompt, _ = maybe_truncate(prompt, kwargs["max_gen_toks"], limit, side="left")
        sampling = SamplingParams(
            max_new_tokens=kwargs["max_gen_toks"],
            temperature=kwargs.get("temperature", 0.0) if kwargs["do_sample"] else 0.0,
            top_p=kwargs.get("top_p", 1.0),
            top_k=kwargs.get("top_k", 0),
            seed=seed,
        )
        return prompt, sampling, kwargs["until"]


def main() -> None:
    """The harness's command line."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
