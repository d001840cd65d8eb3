"""Ctrl-C that takes effect between two steps and never in the middle of one."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Self


class DeferredInterrupt:
    """Remembers Ctrl-C until the caller checks for it; a second one acts at once.

    Python's own handler raises wherever the program happens to be. Inside JAX's garbage-collection
    callback the exception is swallowed (seen with jax 0.10.2: the run goes on), between a call and
    its bookkeeping tokens and counters part, and to leave while a program still runs can crash.

    Example:
      >>> with DeferredInterrupt() as interrupt:
      ...     for row, token in generation:
      ...         interrupt.check()

    Only for the main thread. An interrupt that the parent process had switched off stays so.
    """

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Self:
        self._previous = signal.getsignal(signal.SIGINT)
        if self._previous is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def check(self) -> None:
        """Raises KeyboardInterrupt if Ctrl-C was pressed."""
        if self.asked:
            raise KeyboardInterrupt
