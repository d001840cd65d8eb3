"""Answers to batches of prompts: the engine that decodes is the one whose answers are scored.

`Answerer` is all that the evaluation asks of a way to generate, so that others than the
autoregressive engine can be put in its place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sparda_jax.config import SamplingParams
from sparda_jax.engine.generate import Engine
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
        requests = [
            dataclasses.replace(request, stop_token_ids=(*request.stop_token_ids, *ends))
            for request in requests
        ]
        generation = self.engine.prepare(prompts, requests)
        generation.prefill(lambda done, total: self.check())
        rows = [_Row(self.tokenizer, stop) for stop in stops]
        for row, token in generation:
            self.check()
            if rows[row].add(token, ends):
                generation.cancel(row)
        for number, result in enumerate(generation.results()):
            if result.finish_reason == "failed":
                raise FloatingPointError(f"logits of prompt {number} of the batch are not finite")
        report = generation.report.as_dict()
        return [row.answer() for row in rows], {name: report[name] for name in COUNTERS}


class _Row:
    """One answer as its tokens arrive."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]):
        self._decoder = tokenizer.stream_decoder(skip_special=True)
        self._stops = [stop for stop in stops if stop]
        self._text, self._tokens, self._finish = "", 0, "length"

    def add(self, token: int, ends: Sequence[int]) -> bool:
        """Takes a token; True when a text has just ended the answer."""
        if self._finish != "length":
            return False  # drawn in the same call as the token that ended it
        self._tokens += 1
        if token in ends:
            self._finish = "eos"
            return False
        self._text += self._decoder.push(token)
        return self._cut()

    def _cut(self) -> bool:
        found = [at for stop in self._stops if (at := self._text.find(stop)) >= 0]
        if found:
            self._text, self._finish = self._text[: min(found)], "stop"
        return bool(found)

    def answer(self) -> Answer:
        """The answer so far."""
        if self._finish != "stop":
            self._text += self._decoder.flush()
            self._cut()
        return Answer(self._text, self._tokens, self._finish)
