"""Rows of a benchmark, printed as they come and kept in a results file."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from sparda_jax.cli import note
from sparda_jax.evaluation.files import write_text
from sparda_jax.evaluation.kernel_benchmarks import Row, results_document

if TYPE_CHECKING:
    # What `add_subparsers` returns has no public name.
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def stopwatch() -> Callable[[str], None]:
    """Notes progress, each line with the seconds since now."""
    start = time.monotonic()
    return lambda line: note(f"{time.monotonic() - start:7.1f} s  {line}")


def publish(
    arguments: argparse.Namespace,
    rows: Iterable[Row],
    notes: str,
    *,
    show: Callable[[Row], bool] = lambda row: True,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Prints rows as they come and keeps them in the results file.

    The file is written at the first row, then every second, and at the end, failed or not: a run
    that is cut short keeps what it has measured.

    Args:
        arguments: `json`, the results file or None; `merge`, whether its other rows stay;
            `commit`, of the code that runs, or None: git is asked.
        rows: of the benchmark.
        notes: for the file.
        show: whether to print a row.
        more: that pictures are drawn from, for the file, which is one line then: it is long.
    """
    path, command = arguments.json, shlex.join(["python", *sys.argv])
    before: list[dict[str, Any]] = []
    if path and arguments.merge and path.exists():
        before = json.loads(path.read_text())["rows"]
    done: list[Row] = []

    def write() -> None:
        if not path or not done:
            return
        document = results_document(command, done, notes, commit=arguments.commit)
        measured = {new["name"] for new in document["rows"]}
        document["rows"][:0] = [old for old in before if old["name"] not in measured]
        text = json.dumps(document | dict(more or {}), indent=None if more else 1)
        write_text(path, text + "\n")

    written = -math.inf
    try:
        for row in rows:
            if show(row):
                print(json.dumps(row.as_json()), flush=True)
            done.append(row)
            if time.monotonic() > written + 1:
                write()
                written = time.monotonic()
    finally:
        write()
