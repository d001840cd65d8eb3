"""What every engine does for requests that come and go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparda_jax.config import SamplingParams
from sparda_jax.engine.places import Places
from sparda_jax.engine.requests import Handle
from sparda_jax.engine.scheduler import Scheduler
from sparda_jax.engine.service import SchedulerConfig
from sparda_jax.tokenization import Tokenizer


class Serving:
    """Base of the engines: requests join and leave while others decode.

    Example:
        >>> engine.serve(SchedulerConfig(rows=4, max_length=4096), tokenizer)
        >>> handle = engine.submit([1, 2, 3], SamplingParams(max_new_tokens=8))
        >>> for piece in handle: print(piece.text)  # or handle.result(), handle.cancel()
        >>> engine.drain()
    """

    _scheduler: Scheduler | None = None

    def places(self, config: SchedulerConfig) -> Places:
        """Rows for requests that come and go; for `Scheduler`."""
        raise NotImplementedError

    def serve(
        self, config: SchedulerConfig | None = None, tokenizer: Tokenizer | None = None
    ) -> Scheduler:
        """Allocates rows and pool for the requests that `submit` takes from now on.

        Args:
            config: how requests share the engine.
            tokenizer: for text and stop strings; None: tokens only.

        Returns:
            The scheduler, which also tells what is running and counts.

        Raises:
            ValueError: rows that do not fit in memory, or more tokens than the engine's limit.
        """
        self._scheduler = Scheduler(self, config, tokenizer)
        return self._scheduler

    def submit(self, prompt: Sequence[int], params: SamplingParams, **options: Any) -> Handle:
        """Accepts a request, or says why not; without `serve` before it, by the default settings.

        Args:
            prompt: token ids.
            params: how to sample.
            **options: `stop`, `denoise`, `on_piece`, `on_end`; see `Scheduler.submit`.
        """
        scheduler = self._scheduler or self.serve()
        return scheduler.submit(prompt, params, **options)

    def step(self) -> bool:
        """Some prefill, then one decode call for all running requests; whether any is left."""
        return self._scheduler is not None and self._scheduler.step()

    def drain(self) -> None:
        """Takes no more requests and returns when all accepted ones have ended."""
        if self._scheduler is not None:
            self._scheduler.drain()
            self._scheduler = None
