"""Answers to batches of prompts: the engine that decodes is the one whose answers are scored.

`Answerer` is all that the evaluation asks of a way to generate, so that others than the
autoregressive engine can be put in its place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from sparda_jax.config import SamplingParams
from sparda_jax.diffusion.config import DenoiseParams
from sparda_jax.diffusion.generate import BlockEngine
from sparda_jax.engine.generate import Engine
from sparda_jax.engine.report import RequestResult
from sparda_jax.engine.requests import StopStrings
from sparda_jax.herald.engine import HeraldEngine
from sparda_jax.tokenization import Tokenizer

# Of an engine report: what is added up over batches.
COUNTERS = (
    "prefill_tokens",
    "prefill_seconds",
    "decode_tokens",
    "decode_seconds",
    "steps",
    "free_blocks",
    "hit_blocks",
    "fetched_runs",
    "cold_runs",
    "written_back_runs",
)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What was generated for one prompt.

    Attributes:
        text: without the token or text that ended it, and without special tokens.
        tokens: how many were drawn.
        finish: "eos", "stop" (a text) or "length".
    """

    text: str
    tokens: int
    finish: str


class Answerer(Protocol):
    """Generates for batches."""

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        requests: Sequence[SamplingParams],
        stops: Sequence[Sequence[str]],
    ) -> tuple[list[Answer], dict[str, Any]]:
        """Answers in the order of the prompts, and counters; see `COUNTERS`.

        Args:
            prompts: token ids.
            requests: settings of each; tokens that end it are added.
            stops: texts that end each answer and are no part of it.
        """
        ...


@dataclasses.dataclass(frozen=True)
class EngineAnswerer:
    """Answers by the autoregressive engine.

    Attributes:
        engine: in any mode, offloaded or not.
        tokenizer: of its model.
        check: called after every token; raises to interrupt.
    """

    engine: Engine
    tokenizer: Tokenizer
    check: Callable[[], None] = lambda: None

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        requests: Sequence[SamplingParams],
        stops: Sequence[Sequence[str]],
    ) -> tuple[list[Answer], dict[str, Any]]:
        """See `Answerer`.

        Raises:
            ValueError: a prompt beyond the limits.
            FloatingPointError: logits that are not finite.
        """
        ends = tuple(self.tokenizer.eos_token_ids)
        generation = self.engine.prepare(prompts, _with_ends(requests, ends))
        generation.prefill(lambda done, total: self.check())
        rows = [_Row(self.tokenizer, stop) for stop in stops]
        for row, token in generation:
            self.check()
            if rows[row].add(token, ends):
                generation.cancel(row)
        _check_finished(generation.results(), {})
        report = generation.report.as_dict()
        return [row.answer() for row in rows], {name: report[name] for name in COUNTERS}


@dataclasses.dataclass(frozen=True)
class BlockAnswerer:
    """Answers by a block-diffusion engine, a block at a time.

    Attributes:
        engine: in any of its modes.
        tokenizer: of its model.
        denoise: how blocks are denoised; None: as the family's authors publish.
        check: called after every block, and while prompts run; raises to interrupt.
    """

    engine: HeraldEngine | BlockEngine
    tokenizer: Tokenizer
    denoise: DenoiseParams | None = None
    check: Callable[[], None] = lambda: None

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        requests: Sequence[SamplingParams],
        stops: Sequence[Sequence[str]],
    ) -> tuple[list[Answer], dict[str, Any]]:
        """See `Answerer`; stop texts are looked for when a block is finished.

        Raises:
            ValueError: a prompt beyond the limits.
            FloatingPointError: logits that are not finite, or a request that was given up.
        """
        ends = tuple(self.tokenizer.eos_token_ids)
        generation = self.engine.prepare(prompts, _with_ends(requests, ends), self.denoise)
        generation.prefill(lambda done, total: self.check())
        rows = [_Row(self.tokenizer, stop) for stop in stops]
        for block in generation:
            self.check()
            if any(rows[block.row].add(token, ends) for token in block.tokens):
                generation.cancel(block.row, "stop")
        _check_finished(generation.results(), generation.errors)
        report = generation.report.as_dict()
        counted = {name: report[name] for name in COUNTERS if name in report}
        # Denoising steps come as blocks by their steps.
        steps = sum(int(taken) * count for taken, count in report["steps"].items())
        return [row.answer() for row in rows], counted | {"steps": steps}


def _with_ends(requests: Sequence[SamplingParams], ends: tuple[int, ...]) -> list[SamplingParams]:
    return [
        dataclasses.replace(request, stop_token_ids=(*request.stop_token_ids, *ends))
        for request in requests
    ]


def _check_finished(results: Sequence[RequestResult], errors: Mapping[int, str]) -> None:
    """Raises for a failed request; `errors` say of some what it was."""
    for number, result in enumerate(results):
        if result.finish_reason == "failed":
            error = errors.get(number, "logits are not finite")
            raise FloatingPointError(f"prompt {number} of the batch failed: {error}")


class _Row:
    """One answer as its tokens arrive."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]):
        decoder = tokenizer.stream_decoder(skip_special=True)
        # An empty one among a task's stops ends nothing.
        self._stream = StopStrings(decoder, [stop for stop in stops if stop])
        self._text, self._tokens, self._finish = "", 0, "length"

    def add(self, token: int, ends: Sequence[int]) -> bool:
        """Takes a token; True when a text has just ended the answer."""
        if self._finish != "length":
            return False  # drawn in the same call as the token that ended it
        self._tokens += 1
        if token in ends:
            self._finish = "eos"
            return False
        self._text += self._stream.push(token)
        if self._stream.found:
            self._finish = "stop"
        return self._stream.found

    def answer(self) -> Answer:
        """The answer so far."""
        self._text += self._stream.flush()
        return Answer(self._text, self._tokens, "stop" if self._stream.found else self._finish)
