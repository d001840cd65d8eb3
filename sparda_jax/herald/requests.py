"""The host's record of a request: where it stands, what it has said, how it ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparda_jax.config import ModelConfig, SamplingParams
from sparda_jax.diffusion.config import DenoiseParams, RuleState, diffusion_of, rule_fields
from sparda_jax.diffusion.generate import gained
from sparda_jax.diffusion.state import BlockState
from sparda_jax.engine.report import FinishReason, RequestResult
from sparda_jax.engine.state import SamplingState, sampling_fields

# Stop tokens a request can have, so that one shape serves all.
STOP_TOKENS = 8


@dataclasses.dataclass
class Request:
    """One request, from its prompt to its end.

    Attributes:
        number: as the caller knows it.
        prompt: token ids.
        sampling: settings.
        rule: denoising settings.
        model: the model's shape.
        start: position of its block at work.
        tokens: what it has said.
        reason: how it ended; None while it runs.
        error: what went wrong, where something did.
    """

    number: int
    prompt: Sequence[int]
    sampling: SamplingParams
    rule: DenoiseParams
    model: ModelConfig
    start: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    reason: FinishReason | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        self.start = self.aligned
        stops = len(self.sampling.stop_token_ids)
        if stops > STOP_TOKENS:
            raise ValueError(f"{stops} stop tokens exceed the limit of {STOP_TOKENS}")

    @property
    def width(self) -> int:
        """W."""
        return diffusion_of(self.model)[0].block_size

    @property
    def aligned(self) -> int:
        """Prompt tokens in whole blocks."""
        return len(self.prompt) // self.width * self.width

    @property
    def limit(self) -> int:
        """Prompt length plus tokens asked for."""
        return len(self.prompt) + self.sampling.max_new_tokens

    @property
    def has_next(self) -> bool:
        """Whether a block may follow the one at work."""
        known = self.start + self.width + diffusion_of(self.model)[0].logit_shift
        return self.reason is None and known < self.limit

    def gain_block(self, block: np.ndarray, handover: int) -> list[int]:
        """Takes a finished block; what of it is new, cut at the stop token and the limit.

        Args:
            block: its W tokens.
            handover: the token after them, or -1.
        """
        new = block[len(self.prompt) + len(self.tokens) - self.start :].tolist()
        return self.gain(new if handover < 0 else [*new, handover])

    def gain(self, new: list[int]) -> list[int]:
        """Takes new tokens, cut at the stop token and the limit."""
        new, reason = gained(new, len(self.tokens), self.sampling)
        self.tokens += new
        if reason is not None:
            self.reason = reason
        return new

    def fail(self, error: str) -> None:
        """Ends the request, unless it has ended."""
        if self.reason is None:
            self.reason, self.error = "failed", error

    def result(self) -> RequestResult:
        """As it stands; unfinished ones count as interrupted."""
        return RequestResult(len(self.prompt), self.tokens, self.reason or "interrupted")


def block_fields(request: Request) -> BlockState:
    """A request's first block as a batch of one, on the host: what is known of it, then masks."""
    width = request.width
    tail = np.asarray([*request.prompt, *request.tokens][request.aligned :], np.int32)
    tokens: Any
    masked: Any
    tokens, masked = np.zeros((1, width), np.int32), np.ones((1, width), bool)
    tokens[0, : len(tail)], masked[0, : len(tail)] = tail, False
    fields: Any = sampling_fields([request.sampling], width=STOP_TOKENS)
    rule: Any = rule_fields([request.rule], width)
    one: Any = lambda value: np.array([value])
    return BlockState(
        start=one(np.int32(request.aligned)),
        tokens=tokens,
        masked=masked,
        step=one(np.int32(0)),
        last_sub=one(np.int32(-1)),
        active=one(True),
        failed=one(False),
        prompt_length=one(np.int32(len(request.prompt))),
        limit=one(np.int32(request.limit)),
        sampling=SamplingState(**fields),
        rule=RuleState(**rule),
        layers=(),
    )
