"""The Pallas kernels."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from sparda_jax.commands.benchmarks.publish import publish
from sparda_jax.evaluation import kernel_benchmarks

if TYPE_CHECKING:
    from sparda_jax.commands.benchmarks.publish import Commands


NOTES = (
    "Times are wall clock of a loop inside one program, divided by the calls; device buffers are "
    "rotated so that they do not stay in L2.  of_roofline: share of the bandwidth of a large "
    "device copy (selection, pool attention) or of 53 GB/s (fetch).  error: relative L2 error, "
    "share of blocks chosen otherwise (selection) or of wrong elements (fetch)."
)


def _kernels(arguments: argparse.Namespace) -> None:
    names = [
        name
        for name in kernel_benchmarks.REGISTRY
        if not arguments.only or any(part in name for part in arguments.only)
    ]
    if not names:
        sys.exit(f"benchmark.py: no kernel benchmark has one of {arguments.only} in its name")
    session = kernel_benchmarks.Session(refcheck=arguments.refcheck)
    rows = kernel_benchmarks.run(names, session, seconds=arguments.seconds)
    try:
        publish(arguments, rows, NOTES)
    except kernel_benchmarks.Incomplete as error:
        sys.exit(f"benchmark.py: {error}")


def add(commands: Commands, results: argparse.ArgumentParser) -> None:
    """Adds `kernels`."""
    command = commands.add_parser("kernels", parents=[results], help="the Pallas kernels, on a GPU")
    command.add_argument("--refcheck", action="store_true", help="also compare with references")
    command.add_argument("--only", nargs="*", help="benchmarks whose name contains one of these")
    command.add_argument(
        "--seconds", type=float, default=float("inf"), help="no further row after so long"
    )
    command.set_defaults(run=_kernels)
