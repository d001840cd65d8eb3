"""What ran when, from a trace of `jax.profiler`: compute and copies on their streams.

    with jax.profiler.trace(folder):
        engine.generate(...)
    python -m sparda_jax.evaluation.timeline FOLDER --json results/h200/timeline.json

`scripts/report.py` draws it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from sparda_jax.evaluation.plots import Event

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


def main(argv: Sequence[str] | None = None) -> None:
    """Turns a trace into a results file."""
    from sparda_jax.evaluation.kernel_benchmarks.harness import results_document
    from sparda_jax.evaluation.run import write_whole
    from sparda_jax.evaluation.statistics import Estimate
    from sparda_jax.evaluation.tables import make_row

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--start", type=float, default=0.0, help="microseconds left out at first")
    parser.add_argument("--length", type=float, default=2000.0, help="microseconds shown")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args(argv)
    events = window(read_trace(args.folder), args.start, args.length)
    rows = []
    for lane, name in dict.fromkeys((event.lane, event.name) for event in events):
        times = [e.duration for e in events if (e.lane, e.name) == (lane, name)]
        estimate = Estimate(sum(times), min(times), max(times), len(times))
        rows.append(make_row(f"timeline/{lane}/{name}", estimate, "us", "lower"))
    command = f"python -m sparda_jax.evaluation.timeline TRACE --start {args.start:g} "
    command += f"--length {args.length:g} --json {args.json}"
    notes = "Time in the window by lane and kind: sum; spread: shortest and longest event."
    shown = [[e.lane, e.name, round(e.start - events[0].start, 2), round(e.duration, 2)]
             for e in events]  # fmt: skip
    document = results_document(command, rows, notes) | {"events": shown}
    write_whole(args.json, json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
