"""How loading goes: a line on a terminal, and a report afterwards."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass

from host_offload.memory import format_bytes

_LOG = logging.getLogger("sparda_jax")
_SECONDS = 0.2  # between two updates of the line


@dataclass(frozen=True)
class LoadReport:
    """What loading took.

    Attributes:
        bytes_read: of the checkpoint, as stored.
        seconds: until the last byte was on its device.
    """

    bytes_read: int
    seconds: float

    def __str__(self) -> str:
        rate = self.bytes_read / self.seconds / 1e9 if self.seconds else 0.0
        return f"{format_bytes(self.bytes_read)} in {self.seconds:.1f} s, {rate:.2f} GB/s"


class Progress:
    """Counts bytes; shows them on a terminal.

    Args:
        total: bytes there are to read.
        show: write the line; None: where standard error is a terminal.
    """

    def __init__(self, total: int, show: bool | None = None):
        self.total, self.count = total, 0
        self.show = sys.stderr.isatty() if show is None else show
        self._start = time.perf_counter()
        self._shown = 0.0

    def __call__(self, count: int) -> None:
        """`count` more bytes were read."""
        self.count += count
        now = time.perf_counter()
        if self.show and (now - self._shown > _SECONDS or self.count >= self.total):
            self._shown = now
            share = self.count / max(self.total, 1)
            bar = "#" * int(30 * share)
            text = f"{format_bytes(self.count)} of {format_bytes(self.total)}"
            print(f"\rloading [{bar:<30}] {text}", end="", file=sys.stderr, flush=True)

    def finish(self) -> LoadReport:
        """Ends the line; logs and returns the report."""
        if self.show:
            print(file=sys.stderr)
        report = LoadReport(self.count, time.perf_counter() - self._start)
        _LOG.info("weights loaded: %s", report)
        return report
