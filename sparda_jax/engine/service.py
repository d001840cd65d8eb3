"""What a scheduler is told, and what it counts."""

from __future__ import annotations

import collections
import dataclasses
from dataclasses import dataclass

from sparda_jax.engine.report import FinishReason
from sparda_jax.validation import require, require_at_least


class QueueFullError(RuntimeError):
    """A request that could run later, but too many are waiting already."""


@dataclass(frozen=True)
class SchedulerConfig:
    """How requests share an engine.

    Attributes:
        rows: B, requests that decode at the same time.
        max_length: tokens of a prompt and its answer together; None: the engine's limit. A row has
            blocks for so many.
        queue: requests that may wait for a row.
        prefill_seconds: time for prefill between two decode calls. A token of a running request
            waits at most for this (or one unit of prefill, if that takes longer) and its own call.
        stop_tokens: stop tokens that a request can have.
        prefix_reuse: look for the KV of a prompt's beginning in rows of earlier requests.
    """

    rows: int = 8
    max_length: int | None = None
    queue: int = 256
    prefill_seconds: float = 0.05
    stop_tokens: int = 8
    prefix_reuse: bool = True

    def __post_init__(self) -> None:
        require_at_least("rows", self.rows, 1)
        require_at_least("queue", self.queue, 0)
        require_at_least("stop_tokens", self.stop_tokens, 1)
        require(
            self.prefill_seconds > 0,
            f"prefill_seconds must be positive, got {self.prefill_seconds}",
        )
        if self.max_length is not None:
            require_at_least("max_length", self.max_length, 2)

    def length(self, limit: int) -> int:
        """Tokens of a prompt and its answer, of an engine that allows so many.

        Raises:
            ValueError: more than the limit.
        """
        length = self.max_length or limit
        require(
            length <= limit, f"max_length {length} exceeds the engine's limit of {limit} tokens"
        )
        return length


@dataclass
class Counters:
    """What happened since the start; requests = waiting + running + finished, by any reason.

    Attributes:
        requests: accepted.
        refused: not accepted: too long, or the queue was full.
        finished: ended, by finish reason.
        prompt_tokens: of prompts whose prefill ended.
        cached_tokens: how many of those were known already.
        tokens: given to requests.
        prefill_seconds: spent in prefill.
        stalls: seconds in which running requests waited for prefill.
    """

    requests: int = 0
    refused: int = 0
    finished: collections.Counter[FinishReason] = dataclasses.field(
        default_factory=collections.Counter
    )
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    prefill_seconds: float = 0.0
    stalls: float = 0.0
