"""Some requests on their way: admitted as rows come free, one block a turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from sparda_jax.diffusion.generate import Block
from sparda_jax.diffusion.plan import BlockPlan
from sparda_jax.engine.report import FinishReason, RequestResult
from sparda_jax.herald.report import HeraldReport
from sparda_jax.herald.requests import Request
from sparda_jax.herald.session import HeraldSession

if TYPE_CHECKING:
    from sparda_jax.herald.engine import HeraldEngine


class HeraldGeneration:
    """Prefill once, then iterate over finished blocks, as with `BlockGeneration`.

    Attributes:
        plan: sizes of the batch.
        requests: as they stand.
        report: counters, current at any time.
    """

    def __init__(
        self, engine: HeraldEngine, plan: BlockPlan, requests: Sequence[Request], batch: int
    ):
        self.plan, self.requests = plan, list(requests)
        self._waiting = deque(self.requests)
        self._session = HeraldSession(engine, batch, plan)

    @property
    def report(self) -> HeraldReport:
        """Counters."""
        return self._session.report

    @property
    def errors(self) -> dict[int, str]:
        """By request, what went wrong."""
        return {r.number: r.error for r in self.requests if r.error is not None}

    def prefill(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Admits as many requests as there are rows.

        Args:
            progress: called with (done, total) requests.
        """
        total, done = min(len(self.requests), len(self._session.requests)), 0
        while self._waiting and self._session.free:
            self._session.admit(self._waiting.popleft())
            done += 1
            if progress is not None:
                progress(done, total)

    def __iter__(self) -> Iterator[Block]:
        """Yields what each request gains; those that wait join as others leave."""
        with self._session as session:
            while session.busy or self._waiting:
                self.prefill()
                yield from session.turn()

    def cancel(self, row: int, reason: FinishReason = "cancelled") -> None:
        """Ends one request between two blocks; the others go on.

        Args:
            row: the request's number.
            reason: what its result says.
        """
        request = self.requests[row]
        if request.reason is None:
            request.reason = reason
        if request in self._waiting:
            self._waiting.remove(request)

    def results(self) -> list[RequestResult]:
        """The requests as they stand; unfinished ones count as interrupted."""
        return [request.result() for request in self.requests]
