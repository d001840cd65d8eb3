"""What ran when, from a trace of `jax.profiler`: compute and copies on their streams.

    with jax.profiler.trace(folder):
        engine.generate(...)

`scripts/benchmark.py timeline FOLDER` makes a results file of it, which `scripts/report.py` draws.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax

from sparda_jax.evaluation.plots import Event
from sparda_jax.evaluation.statistics import Estimate
from sparda_jax.evaluation.tables import ScoreRow, make_row

# The first that is found in an event's name says what it is.
KINDS = {
    "copy to device": r"MemcpyH2D|fetch",
    "copy to host": r"MemcpyD2H|write_back|write_blocks",
    "copy": r"[Mm]emcpy|[Cc]opy",
    "attention": r"attention|fmha|cudnn",
    "selection": r"select|choice|choose|scores|top_k",
    "matrix product": r"gemm|cutlass|dot|nvjet|matmul",
}
OTHER = "other compute"
# Of the profiler's own and of threads: not work.
_IGNORED = r"^\$|Threadpool|ThunkExecutor|^end: |Listener|wait|Execute|TfrtCpu|PjRt"


def read_trace(folder: Path, kinds: Mapping[str, str] = KINDS) -> list[Event]:
    """Events of the devices in a trace, or of the CPU's threads where it has none.

    Args:
        folder: what the profiler wrote; of several traces the newest is read.
        kinds: regular expressions by the name that events get; those of none are `OTHER`.

    Raises:
        FileNotFoundError: no trace there.
        ValueError: nothing ran in it.
    """
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise FileNotFoundError(f"no trace (*.xplane.pb) below {folder}")
    planes = list(jax.profiler.ProfileData.from_file(str(files[-1])).planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    chosen = devices or [plane for plane in planes if plane.name == "/host:CPU"]
    events = []
    for plane in chosen:
        for line in plane.lines:
            if devices and not line.name.startswith("Stream"):
                continue  # summaries of the same events
            lane = re.sub(r"\(.*|/\d+$", "", line.name).strip()
            for event in line.events:
                if event.duration_ns > 0 and not re.search(_IGNORED, event.name):
                    name = next((k for k, v in kinds.items() if re.search(v, event.name)), OTHER)
                    events.append(Event(lane, name, event.start_ns / 1e3, event.duration_ns / 1e3))
    if not events:
        raise ValueError(f"{files[-1]} holds no work")
    return sorted(events, key=lambda event: event.start)


def window(events: Sequence[Event], start: float, length: float) -> list[Event]:
    """The events that begin in a window, in microseconds from the first on."""
    first = events[0].start + start
    return [event for event in events if first <= event.start < first + length]


def rows(events: Sequence[Event]) -> Iterator[ScoreRow]:
    """Time by lane and kind: sum, shortest and longest event."""
    for lane, name in dict.fromkeys((event.lane, event.name) for event in events):
        times = [e.duration for e in events if (e.lane, e.name) == (lane, name)]
        estimate = Estimate(sum(times), min(times), max(times), len(times))
        yield make_row(f"timeline/{lane}/{name}", estimate, "us", "lower")


def as_document(events: Sequence[Event]) -> list[tuple[str, str, float, float]]:
    """Events as they stand in a results file: lane, name, start from the first on, duration."""
    first = events[0].start
    return [(e.lane, e.name, round(e.start - first, 2), round(e.duration, 2)) for e in events]
