r"""A block-diffusion model as lm-evaluation-harness sees it: `sparda_jax_diffusion`.

    python -m sparda_jax.evaluation.lm_eval_adapter --model sparda_jax_diffusion \
        --model_args pretrained=default,draws=128 --tasks <names> --batch_size 8

Such a model has no log-likelihood that one could compute, but a lower bound on it
(`likelihood_bound`). A task that compares the choices of a document gets that; whatever needs the
exact value is refused. `results["config"]` says how the bounds were made and how sure they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from sparda_jax.evaluation.lm_eval_base import HarnessLM  # first: names the extra

# isort: split
from lm_eval.api.registry import register_model

from sparda_jax.cli import diffusion_model
from sparda_jax.diffusion.generate import BlockEngine
from sparda_jax.diffusion.plan import BlockEngineConfig
from sparda_jax.evaluation.generation import BlockAnswerer
from sparda_jax.evaluation.likelihood_bound import Bound, BoundScorer
from sparda_jax.tokenization import Tokenizer

# Two choices are told apart when they differ by so many standard errors of the difference.
CLEAR = 2.0


@register_model("sparda_jax_diffusion")
class BlockLM(HarnessLM):
    """A block-diffusion model: answers, and bounds where choices are compared.

    Attributes:
        scorer: of the bounds; its draws are doubled while the best two choices are not clear.
        most_draws: up to so many.
        bounds: of every request of the last `loglikelihood`, in its order.
        compared: documents whose choices were compared so far.
        undecided: of these, documents whose best two choices stayed unclear.
        denoising_steps: of all answers so far.
    """

    def __init__(
        self,
        pretrained: str = "default",
        *,
        adapter: str | None = None,
        draws: int = 128,
        most_draws: int = 512,
        seed: int = 0,
        **shared: Any,
    ):
        """Loads a model, or takes an engine that is there.

        Args:
            pretrained: "default", a directory, a GGUF file or a hub id.
            adapter: that makes a causal model one of block diffusion; None: that which ships with
                the default model.
            draws: masks of a block, see `BoundScorer`.
            most_draws: see the class.
            seed: of the masks.
            shared: what every model of the harness has, see `HarnessLM`.

        Raises:
            NotImplementedError: a batch size to be found out, another device.
            ValueError: settings that contradict each other.
        """

        def start(model: Any, _: Tokenizer, lengths: dict[str, Any]) -> BlockEngine:
            model = diffusion_model(pretrained, model, adapter)
            return BlockEngine(model, config=BlockEngineConfig(**lengths))

        super().__init__(start, BlockAnswerer, pretrained=pretrained, **shared)
        self.scorer = BoundScorer(self.engine, draws=draws, seed=seed)
        self.most_draws = most_draws
        self.bounds: list[Bound] = []
        self.compared = self.undecided = self.denoising_steps = 0

    def get_model_info(self) -> dict[str, Any]:
        """For the harness's results: what the log-likelihoods are."""
        return {
            "loglikelihood": f"mc_bound({self.scorer.draws} to {self.most_draws})",
            "bound_tail": "mask",
            "bound_standard_error": max((bound.error for bound in self.bounds), default=0.0),
            "documents_compared": self.compared,
            "documents_undecided": self.undecided,
            "denoising_steps": self.denoising_steps,
        }

    def count(self, counters: dict[str, Any]) -> None:
        """Adds up the denoising steps."""
        self.denoising_steps += counters["steps"]

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Bounds of each document's choices; whether greedy decoding says them is not known: False.

        Raises:
            NotImplementedError: a task that needs exact log-likelihoods.
        """
        documents: dict[tuple[Any, ...], list[int]] = {}
        for number, request in enumerate(requests):
            key = request.task_name, request.doc_id
            documents.setdefault(key, []).append(number)
        for (task, document), members in documents.items():
            contexts = [requests[i].args[0] for i in members]
            if len(members) < 2:
                raise NotImplementedError(
                    f"task {task}, document {document}: one log-likelihood with no other to "
                    "compare it with (output_type loglikelihood) has to be exact; block diffusion "
                    "has a lower bound"
                )
            if "" in contexts and any(contexts):
                raise NotImplementedError(
                    f"task {task}, document {document}: acc_mutual_info takes the difference of "
                    "two log-likelihoods, and that of two lower bounds is no bound"
                )
        pairs = [self._pair(*request.args) for request in requests]
        self.bounds = self._score(pairs, range(len(pairs)), self.scorer.draws)
        self.compared += len(documents)
        self.undecided += self._decide(pairs, list(documents.values()))
        for request, bound in zip(requests, self.bounds, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, (bound.value, False))
        return [(bound.value, False) for bound in self.bounds]

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if not context:
            return [self.prefix_token_id], self.tok_encode(continuation, add_special_tokens=False)
        context_ids, continuation_ids = self._encode_pair(context, continuation)
        return context_ids[-(self.limit - len(continuation_ids)) :], continuation_ids

    def _score(
        self, pairs: Sequence[tuple[list[int], list[int]]], chosen: Sequence[int], draws: int
    ) -> list[Bound]:
        """Bounds of the chosen pairs, those of like length together."""
        found: dict[int, Bound] = {}
        lengths = [len(pairs[i][0]) + len(pairs[i][1]) for i in chosen]
        for batch in self.batches(lengths):
            indices = [chosen[i] for i in batch]
            bounds = self.scorer([pairs[i] for i in indices], draws=draws)
            found |= dict(zip(indices, bounds, strict=True))
        return [found[i] for i in chosen]

    def _decide(
        self, pairs: Sequence[tuple[list[int], list[int]]], documents: Sequence[list[int]]
    ) -> int:
        """Doubles the draws of documents whose best two are not clear; how many stay so."""
        draws = self.scorer.draws
        while open_ := [members for members in documents if self._unclear(members)]:
            draws *= 2
            if draws > self.most_draws:
                return len(open_)
            again = list(itertools.chain(*open_))
            for i, bound in zip(again, self._score(pairs, again, draws), strict=True):
                self.bounds[i] = bound
        return 0

    def _unclear(self, members: Sequence[int]) -> bool:
        first, second, *_ = sorted((self.bounds[i] for i in members), key=lambda b: -b.value)
        error = (first.error**2 + second.error**2) ** 0.5
        return first.value - second.value < CLEAR * error

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Refused: token ids do not say what they are compared with."""
        raise NotImplementedError("log-likelihoods of tokens: block diffusion has a lower bound")

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Refused.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "loglikelihood_rolling: perplexities need exact log-likelihoods; block diffusion has a "
            "lower bound, from which a table would not tell them apart"
        )
