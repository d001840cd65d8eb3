"""One request: what was asked, what came of it, and how to wait for it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from sparda_jax.config import SamplingParams
from sparda_jax.engine.batch import Gain, Likelihood
from sparda_jax.engine.report import FinishReason
from sparda_jax.tokenization import StreamDecoder

if TYPE_CHECKING:
    from sparda_jax.engine.scheduler import Scheduler

Phase = Literal["queued", "prefill", "decode", "done"]


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a request gained at once.

    Attributes:
      tokens: drawn; the stop token included.
      text: what became certain with them; "" without a tokenizer.
      likelihoods: of the tokens; None where they were not asked for.
      steps: denoising steps of the block that they are; None where there are no blocks.
    """

    tokens: list[int]
    text: str
    likelihoods: list[Likelihood] | None
    steps: int | None = None


OnPiece = Callable[[Piece], None]
OnEnd = Callable[["Handle"], None]


@dataclasses.dataclass
class Timing:
    """When things happened, seconds of `time.perf_counter`; 0: not yet.

    Attributes:
      submitted: the request came.
      started: its prefill began.
      first_token: its first token was there.
      finished: it ended.
    """

    submitted: float = 0.0
    started: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0

    @property
    def first_token_seconds(self) -> float | None:
        """From its arrival to its first token; None if there was none."""
        return self.first_token - self.submitted if self.first_token else None

    @property
    def decode_seconds(self) -> float:
        """From the first token to the end."""
        return self.finished - self.first_token if self.first_token else 0.0


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a request.

    Attributes:
      prompt_tokens: tokens of the prompt.
      cached_tokens: how many of them were not prefilled, since their KV was known.
      tokens: every token drawn, the stop token included.
      text: of the tokens, without stop token and stop string; "" without a tokenizer.
      finish_reason: "stop" a stop token or string; "length" max_new_tokens reached; "failed" see
        `error`; "cancelled" by `Handle.cancel`; "interrupted" by the end of the scheduler.
      error: why it failed; None otherwise.
      likelihoods: of each token; None where they were not asked for.
      steps: denoising steps of each block, where tokens come in blocks.
      timing: when things happened.
    """

    prompt_tokens: int
    cached_tokens: int
    tokens: list[int]
    text: str
    finish_reason: FinishReason
    error: str | None
    likelihoods: list[Likelihood] | None
    steps: list[int]
    timing: Timing


class StopStrings:
    """Text of a request as it streams out, up to the first stop string.

    What might be the beginning of a stop string is held back until that is decided.

    Attributes:
      found: whether a stop string came; nothing is released after it.

    Raises:
      ValueError: an empty stop string.
    """

    def __init__(self, decoder: StreamDecoder, stops: Sequence[str]):
        if any(not stop for stop in stops):
            raise ValueError("a stop string is empty: every text contains it")
        self.found = False
        self._decoder, self._stops, self._held = decoder, tuple(stops), ""

    def push(self, token: int) -> str:
        """The text that became certain with this token."""
        return self._release(self._decoder.push(token))

    def flush(self) -> str:
        """The rest, when no token follows."""
        text = self._release(self._decoder.flush())
        rest, self._held = self._held, ""
        return text + rest

    def _release(self, text: str) -> str:
        if self.found:
            return ""
        held = self._held + text
        places = [at for at in map(held.find, self._stops) if at >= 0]
        if places:
            self.found, self._held = True, ""
            return held[: min(places)]
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)


class Handle:
    """A submitted request.

    Iterating gives its pieces as they come; `result` waits for the end. Both drive the scheduler
    themselves unless a thread of its own does (`Scheduler.start`).

    Attributes:
      id: counts up from 0.
      prompt: token ids.
      params: how to sample.
      denoise: how blocks are denoised, for a model of block diffusion.
      phase: how far it is.
      timing: when it got there.
      cached_tokens: prompt tokens whose KV was known.
      reason: why it ended; None before that.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        number: int,
        prompt: Sequence[int],
        params: SamplingParams,
        denoise: object,
        text: StopStrings | None,
        on_piece: OnPiece | None,
        on_end: OnEnd | None,
    ):
        self.id, self.prompt, self.params = number, tuple(prompt), params
        self.denoise = denoise
        self.phase: Phase = "queued"
        self.timing = Timing(submitted=time.perf_counter())
        self.cached_tokens = 0
        self.cancelled = False
        self._scheduler, self._text = scheduler, text
        self._on_piece, self._on_end = on_piece, on_end
        self._tokens: list[int] = []
        self._likelihoods: list[Likelihood] | None = None if params.logprobs is None else []
        self._pieces: list[Piece] = []
        self.reason: FinishReason | None = None
        self._error: str | None = None

    @property
    def tokens(self) -> list[int]:
        """Drawn so far."""
        return list(self._tokens)

    @property
    def most_tokens(self) -> int:
        """Of prompt and answer together."""
        return len(self.prompt) + self.params.max_new_tokens

    def cancel(self) -> None:
        """Ends the request before its next token; from any thread, any number of times."""
        self._scheduler.cancel(self)

    def __iter__(self) -> Iterator[Piece]:
        at = 0
        while True:
            pieces = self._pieces[at:]
            yield from pieces
            at += len(pieces)
            if self.phase == "done" and at == len(self._pieces):
                return
            if not pieces:
                self._scheduler.advance(self, at)

    def result(self) -> Result:
        """Waits for the end."""
        for _ in self:
            pass
        assert self.reason is not None
        return Result(
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached_tokens,
            tokens=self._tokens,
            text="".join(piece.text for piece in self._pieces),
            finish_reason=self.reason,
            error=self._error,
            likelihoods=self._likelihoods,
            steps=[piece.steps for piece in self._pieces if piece.steps],
            timing=self.timing,
        )

    def moved_past(self, pieces: int) -> bool:
        """Whether there is more to see than so many pieces."""
        return len(self._pieces) > pieces or self.phase == "done"

    # What follows is for the scheduler.

    def add(self, gain: Gain) -> FinishReason | None:
        """Takes what was drawn; says "stop" where the request asks for no more.

        Raises:
          Exception: whatever its callback raises.
        """
        if not self.timing.first_token:
            self.timing.first_token = time.perf_counter()
        text, used, reason = "", 0, None
        tokens, likelihoods = gain.tokens, gain.likelihoods
        for token in tokens:
            used += 1
            if token in self.params.stop_token_ids:
                reason = "stop"
            elif self._text is not None:
                text += self._text.push(token)
                reason = "stop" if self._text.found else None
            if reason is not None:
                break
        kept = None if likelihoods is None else likelihoods[:used]
        self._tokens += tokens[:used]
        if self._likelihoods is not None and kept is not None:
            self._likelihoods += kept
        if reason is None and len(self._tokens) >= self.params.max_new_tokens:
            reason = "length"
        if reason is not None and self._text is not None:
            text += self._text.flush()
            if self._text.found:
                reason = "stop"
        self._emit(Piece(tokens[:used], text, kept, gain.steps))
        return reason  # type: ignore[return-value]

    def _emit(self, piece: Piece) -> None:
        self._pieces.append(piece)
        if self._on_piece is not None:
            self._on_piece(piece)

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        """The request is over; what text was held back is in the result, unless it failed."""
        self.reason, self._error = reason, error
        if self._text is not None and reason in ("cancelled", "interrupted"):
            text = self._text.flush()
            if text:
                self._pieces.append(Piece([], text, None))
        self.timing.finished = time.perf_counter()
        self.phase = "done"
        if self._on_end is not None:
            self._on_end(self)
