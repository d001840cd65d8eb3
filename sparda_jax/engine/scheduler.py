"""Continuous batching: requests come and go while others decode.

One prompt at a time is prefilled, in work units; between the units all other requests decode in
one fixed-shape program. Whoever calls `step` drives it: a waiting `Handle`, or a thread of its own.
"""

from __future__ import annotations

import collections
import itertools
import logging
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax

from sparda_jax.config import SamplingParams
from sparda_jax.engine.batch import Gain
from sparda_jax.engine.places import Places
from sparda_jax.engine.report import FinishReason
from sparda_jax.engine.requests import Handle, OnEnd, OnPiece, StopStrings
from sparda_jax.engine.service import Counters, QueueFullError, SchedulerConfig
from sparda_jax.tokenization import Tokenizer
from sparda_jax.validation import require

if TYPE_CHECKING:
    from sparda_jax.engine.serving import Serving

logger = logging.getLogger("sparda_jax")


@dataclass
class _Prefill:
    """The prompt at work."""

    handle: Handle
    row: int
    work: Generator[jax.Array, None, Gain]


class Scheduler:
    """Runs requests on the rows of one engine.

    `submit`, `cancel`, `start`, `drain` and `close` may be called from any thread.

    Example:
        >>> scheduler = Scheduler(engine, SchedulerConfig(rows=4, max_length=4096))
        >>> handle = scheduler.submit([1, 2, 3], SamplingParams(max_new_tokens=8))
        >>> print(handle.result().tokens)

    Args:
        engine: its settings hold for all requests.
        config: how requests share it.
        tokenizer: for text and stop strings; None: tokens only.

    Attributes:
        rows: where requests run.
        counters: current at any time.
        broken: what ended the scheduler for all requests; None: it works.

    Raises:
        ValueError: rows that do not fit in memory, or more tokens than the engine's limit.
        NotImplementedError: several devices; a model with importance biases (NOSA).
    """

    def __init__(
        self,
        engine: Serving,
        config: SchedulerConfig | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        self.engine, self.config = engine, config or SchedulerConfig()
        self.tokenizer = tokenizer
        self.rows: Places = engine.places(self.config)
        self.counters = Counters()
        self.broken: str | None = None
        self._owners: list[Handle | None] = [None] * self.rows.batch
        self._queue: collections.deque[Handle] = collections.deque()
        self._prefill: _Prefill | None = None
        self._at_work: jax.Array | None = None  # there when the last unit dispatched is done
        self._since, self._unit_seconds = 0.0, 0.0  # when it began; what the one before took
        self._numbers = itertools.count()
        self._accepting, self._ending = True, False
        self._cancelled: list[Handle] = []
        # Guards what other threads touch: queue, cancellations, flags. `_driving` is held by
        # whoever runs a step. `_moved` wakes up those who wait for either.
        self._moved = threading.Condition()
        self._driving = threading.Lock()
        self._thread: threading.Thread | None = None

    # ---------------------------------------------------------------- from any thread

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Requests that have a row."""
        return sum(owner is not None for owner in self._owners)

    @property
    def free_rows(self) -> int:
        """Rows that no request has."""
        return self.rows.free

    @property
    def max_length(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self.rows.max_length

    @property
    def blocks_used(self) -> int:
        """KV blocks of all running requests, in each layer; shared ones count once."""
        owners = enumerate(self._owners)
        return self.rows.blocks_used({row: each.most_tokens for row, each in owners if each})

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        denoise: object = None,
        stop: Sequence[str] = (),
        on_piece: OnPiece | None = None,
        on_end: OnEnd | None = None,
    ) -> Handle:
        """Accepts a request, or says why not.

        Args:
            prompt: token ids.
            params: how to sample.
            denoise: `DenoiseParams` for a model of block diffusion: the order in which the masks of
                a block are decided and its steps; None: what the model's authors publish.
            stop: strings that end the answer before them.
            on_piece: called with each piece, by the thread that drives; may raise, which ends this
                request as "failed".
            on_end: called once, when the request has ended; must not raise.

        Raises:
            ValueError: it can never run: names what it needs and what there is.
            QueueFullError: it could run later, but too many wait already.
            RuntimeError: the scheduler is draining, closed or broken.
        """
        try:
            text = self._check(prompt, params, denoise, stop)
        except ValueError:
            with self._moved:
                self.counters.refused += 1
            raise
        with self._moved:
            if self.broken is not None:
                raise RuntimeError(f"the engine is broken: {self.broken}")
            if not self._accepting:
                raise RuntimeError("the engine is shutting down and takes no more requests")
            if len(self._queue) >= self.config.queue + self.rows.free:
                self.counters.refused += 1
                raise QueueFullError(
                    f"{len(self._queue)} requests wait and {self.running} of {self.rows.batch} "
                    f"rows are in use: the queue holds {self.config.queue}"
                )
            handle = Handle(
                self, next(self._numbers), prompt, params, denoise, text, on_piece, on_end
            )
            self.counters.requests += 1
            self._queue.append(handle)
            self._moved.notify_all()
        return handle

    def _check(
        self, prompt: Sequence[int], params: SamplingParams, denoise: object, stop: Sequence[str]
    ) -> StopStrings | None:
        self.rows.check(prompt, params, denoise)
        if self.tokenizer is None:
            require(not stop, f"stop strings {list(stop)} need a tokenizer")
            return None
        return StopStrings(self.tokenizer.stream_decoder(), stop)

    def cancel(self, handle: Handle) -> None:
        """Ends a request before its next token; nothing if it has ended."""
        with self._moved:
            if handle.phase != "done" and not handle.cancelled:
                handle.cancelled = True
                self._cancelled.append(handle)
                self._moved.notify_all()

    def start(self) -> None:
        """Drives all requests in a thread of its own, until `drain` or `close`."""
        with self._moved:
            if self._thread is None:
                self._thread = threading.Thread(target=self._drive, daemon=True, name="scheduler")
                self._thread.start()

    def drain(self) -> None:
        """Takes no more requests and returns when all accepted ones have ended."""
        with self._moved:
            self._accepting = False
            self._moved.notify_all()
        if self._thread is not None:
            self._thread.join()
        while self.step():
            pass
        self.rows.close()

    def close(self) -> None:
        """Takes no more requests and ends all accepted ones as "interrupted"."""
        with self._moved:
            self._accepting, self._ending = False, True
            self._moved.notify_all()
        if self._thread is not None:
            self._thread.join()
        self.step()
        self.rows.close()

    def advance(self, handle: Handle, seen: int) -> None:
        """Waits until a request has more than `seen` pieces or has ended, or drives one step."""
        with self._moved:
            if self._thread is not None:
                self._moved.wait_for(lambda: handle.moved_past(seen))
                return
        self.step()

    def _drive(self) -> None:
        while True:
            if self.step():
                continue
            with self._moved:
                self._moved.wait_for(
                    lambda: self._queue or self._cancelled or not self._accepting or self._ending
                )
                if not self._queue and not self._cancelled and not self._accepting:
                    return

    # ---------------------------------------------------------------- by whoever drives

    def step(self) -> bool:
        """Some prefill within the budget, then one decode call.

        Returns:
            Whether any request is left.
        """
        with self._driving:
            try:
                self._end_cancelled()
                self._run_prefill()
                if self.rows.active.any():
                    for gain in self.rows.decode():
                        self._take(gain)
            except Exception as error:  # the state may be gone with the call that failed
                logger.exception("the engine failed")
                self.broken = f"{type(error).__name__}: {error}"
                self._end_all("failed", f"the engine failed: {self.broken}")
            with self._moved:
                self._moved.notify_all()
                return bool(self._queue or self.running)

    def _end_cancelled(self) -> None:
        with self._moved:
            cancelled, self._cancelled = self._cancelled, []
            ending = self._ending
        for handle in cancelled:
            self._end(handle, "cancelled")
        if ending:
            self._end_all("interrupted", None)

    def _end_all(self, reason: FinishReason, error: str | None) -> None:
        with self._moved:
            handles = [*self._queue, *(owner for owner in self._owners if owner is not None)]
        for handle in handles:
            self._end(handle, reason, error)

    def _end(self, handle: Handle, reason: FinishReason, error: str | None = None) -> None:
        """Ends a request wherever it is, and frees what it has."""
        if handle.phase == "done":
            return
        if handle.phase == "queued":
            with self._moved:
                self._queue.remove(handle)
        else:
            row = self._owners.index(handle)
            if self._prefill is not None and self._prefill.handle is handle:
                self._prefill.work.close()
                self._prefill = self._at_work = None
            else:
                self.rows.remember(row, handle.prompt, handle.tokens)
            self._owners[row] = None
            self.rows.leave(row)
        handle.finish(reason, error)
        self.counters.finished[reason] += 1

    def _run_prefill(self) -> None:
        """Units of prefill, as many as fit in the time; at least one, if there is any."""
        begun, units, busy = time.perf_counter(), 0, bool(self.rows.active.any())
        while self._prefill is not None or self._admit():
            # When the next unit is dispatched, the one before is at work.
            expected = time.perf_counter() - begun + min(units + 1, 2) * self._unit_seconds
            if units and self.rows.active.any() and expected > self.config.prefill_seconds:
                break
            self._unit()
            units += 1
            if self._cancelled or self._ending:
                break
        self._wait_for_unit()
        if units:
            seconds = time.perf_counter() - begun
            self.counters.prefill_seconds += seconds
            self.counters.stalls += seconds if busy else 0.0

    def _wait_for_unit(self) -> None:
        """Until the unit at work is done."""
        if self._at_work is not None:
            current, self._at_work = self._at_work, None
            current.block_until_ready()
            now = time.perf_counter()
            self._unit_seconds, self._since = now - self._since, now

    def _unit(self) -> None:
        """Dispatches a unit of the prompt at work and waits for the one before.

        So the device goes from one to the next. What goes wrong ends that request alone.
        """
        assert self._prefill is not None
        current, row = self._prefill, self._prefill.row
        if self._at_work is None:
            self._since = time.perf_counter()
        try:
            following = next(current.work)
            self._wait_for_unit()
            self._at_work = following
        except StopIteration as stop:
            self._prefill = self._at_work = None
            current.handle.phase = "decode"
            self.counters.prompt_tokens += len(current.handle.prompt)
            self.counters.cached_tokens += current.handle.cached_tokens
            self.rows.remember(row, current.handle.prompt, ())
            self._take(stop.value)
        except Exception as error:
            self._end(current.handle, "failed", f"prefill failed: {type(error).__name__}: {error}")

    def _admit(self) -> bool:
        """Begins the prefill of the request that waits longest, if it has a place."""
        with self._moved:
            if not self._queue:
                return False
            handle = self._queue[0]
            place = self.rows.admit(handle.prompt, handle.params, handle.denoise)
            if place is None:
                return False
            self._queue.popleft()
            self._owners[place.row] = handle
            handle.phase = "prefill"
        handle.cached_tokens, handle.timing.started = place.known, time.perf_counter()
        self._prefill = _Prefill(handle, place.row, place.work)
        return True

    def _take(self, gain: Gain) -> None:
        """Hands a row's tokens to its request, and ends it where it is over."""
        handle, rows = self._owners[gain.row], self.rows
        if handle is None:  # it ended with what came just before
            return
        reason: FinishReason | None = None
        error = None
        if gain.tokens:
            before = len(handle.tokens)
            try:
                reason = handle.add(gain)
            except Exception as raised:  # of its callback or its text
                reason, error = "failed", f"{type(raised).__name__}: {raised}"
            self.counters.tokens += len(handle.tokens) - before
        failure = rows.failure(gain.row)
        if reason is None and failure is not None:
            reason, error = "failed", failure
        if reason is not None:
            self._end(handle, reason, error)
