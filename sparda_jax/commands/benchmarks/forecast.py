"""The Forecast: how fast it is trained, how well it selects."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sparda_jax.commands.benchmarks.publish import publish, stopwatch

if TYPE_CHECKING:
    from sparda_jax.commands.benchmarks.publish import Commands
    from sparda_jax.evaluation.kernel_benchmarks import Row


TRAINING_NOTES = (
    "Random weights and tokens made on the device, bfloat16 backbone, float32 projections.  Peak "
    "memory: bytes in use at most, weights included.  part/...: of a whole step, each timed in a "
    "program of its own; loss_... contains teacher and two choices."
)


def _training(arguments: argparse.Namespace) -> None:
    from sparda_jax.evaluation import training_benchmark

    def rows() -> Iterator[Row]:
        for name, workload in training_benchmark.workloads().items():
            if not arguments.only or any(part in name for part in arguments.only):
                steps = arguments.steps
                yield from training_benchmark.rows(name, workload, steps=steps, folder="unused")

    publish(arguments, rows(), TRAINING_NOTES)


QUALITY_NOTES = (
    "Whole sequences, teacher-forced, every policy in every layer and for every token.  spread: "
    "95 % bootstrap interval over documents (samples, for needles).  own: the model's policy; "
    "PX%: budget in percent of the context, forced blocks included, 1 leading block, 3 local ones "
    "(needles: 1), windows of half a block.  ..._over_sparse: paired difference to the multi-head "
    "selector.  Names: section/setting/budget/meter/policy."
)


def _quality(arguments: argparse.Namespace) -> None:
    import jax.numpy as jnp

    from sparda_jax.checkpoints.load import load_pretrained
    from sparda_jax.evaluation import quality_benchmark

    model, tokenizer = load_pretrained(arguments.model, dtype=jnp.dtype(arguments.dtype))
    if tokenizer is None:
        sys.exit(f"benchmark.py: {arguments.model} has no tokenizer, which needles need")
    report = stopwatch()
    plan = quality_benchmark.Plan(
        length=arguments.length,
        fine_length=arguments.fine_length,
        percents=tuple(arguments.percents),
        blocks=arguments.blocks,
        needle_lengths=tuple(arguments.needle_lengths),
        needle_blocks=arguments.needle_blocks,
        samples=arguments.samples,
        dense_finds=arguments.dense_finds,
        every=arguments.every,
        sections=tuple(arguments.sections or quality_benchmark.SECTIONS),
        seconds=arguments.seconds,
        workers=arguments.workers,
    )
    inputs = quality_benchmark.read_inputs(
        model,
        tokenizer,
        text=arguments.text,
        haystacks=arguments.haystacks or arguments.text,
        calibration=arguments.calibration,
        forecasts=arguments.forecast,
        variants=arguments.variant,
        documents=arguments.documents,
        plan=plan,
    )
    rows = quality_benchmark.rows(inputs, plan, report)
    # By layer and by position there are hundreds: those are for the file.
    publish(arguments, rows, QUALITY_NOTES, show=lambda row: row.name.count("/") == 4)


def _quality_report(arguments: argparse.Namespace) -> None:
    from sparda_jax.evaluation import quality_report as page

    rows = page.read_rows(arguments.results)
    arguments.page.write_text(page.fill(arguments.page.read_text(), rows))
    page.plot(rows, arguments.page.with_suffix(".svg"))


def add(commands: Commands, results: argparse.ArgumentParser) -> None:
    """Adds `training`, `quality` and `quality-report`."""
    command = commands.add_parser(
        "training", parents=[results], help="training of the Forecast, on a GPU"
    )
    command.add_argument("--only", nargs="*", help="shapes whose name contains one of these")
    command.add_argument("--steps", type=int, default=3, help="timed steps")
    command.set_defaults(run=_training)
    command = commands.add_parser(
        "quality", parents=[results], help="selection policies on text and needles"
    )
    command.add_argument("--model", default="default", help="as in decode.py")
    command.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    command.add_argument("--forecast", nargs="+", required=True, help="NAME=PATH, run everywhere")
    command.add_argument(
        "--variant", nargs="*", default=[], help="NAME=PATH[@LOOKAHEAD], on its own policy alone"
    )
    command.add_argument("--text", type=pathlib.Path, nargs="+", required=True, help="held out")
    command.add_argument("--haystacks", type=pathlib.Path, nargs="*", help="default: the text")
    command.add_argument("--calibration", type=pathlib.Path, nargs="+", required=True)
    command.add_argument("--documents", type=int, default=1000, help="at most")
    command.add_argument("--length", type=int, default=8192, help="tokens of a long document")
    command.add_argument("--fine-length", type=int, default=2048, help="of a short one")
    command.add_argument("--percents", type=float, nargs="+", default=[50, 25, 12.5, 6.25])
    command.add_argument("--blocks", type=int, default=128, help="of a text, for %% budgets")
    command.add_argument("--needle-lengths", type=int, nargs="*", default=[1024, 2048, 4096])
    command.add_argument("--needle-blocks", type=int, default=64, help="of a short needle prompt")
    command.add_argument("--samples", type=int, default=16, help="needles of each of three seeds")
    command.add_argument("--dense-finds", type=float, default=0.8, help="compare needles from here")
    command.add_argument(
        "--every", type=int, default=1, help="count selections at 2 tokens in so many"
    )
    command.add_argument("--sections", nargs="*", metavar="SECTION", help="default: all")
    command.add_argument("--seconds", type=float, help="no further document of a section after")
    command.add_argument("--workers", type=int, default=1, help="sections side by side")
    command.set_defaults(run=_quality)
    command = commands.add_parser("quality-report", help="fill a page's tables, draw its picture")
    command.add_argument("results", type=pathlib.Path, help="a results file of `quality`")
    command.add_argument("page", type=pathlib.Path, help="Markdown; the picture goes beside it")
    command.set_defaults(run=_quality_report)
