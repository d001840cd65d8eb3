"""The evaluation: how much of the engine's speed it keeps."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sparda_jax.commands.benchmarks.publish import publish
from sparda_jax.commands.evaluation import for_mode

if TYPE_CHECKING:
    from sparda_jax.commands.benchmarks.publish import Commands
    from sparda_jax.evaluation.kernel_benchmarks import Row

NOTES = (
    "Tokens drawn over wall time, prefill included, compile time not: the same batches of prompts "
    "by scripts/evaluate.py's loop (texts, stop texts, a file on disk) and by Engine.generate "
    "alone, in turn. Names: evaluation/mode/length/B batch; budget in tokens behind the mode."
)


def _run(arguments: argparse.Namespace) -> None:
    publish(arguments, _rows(arguments), NOTES)


def _rows(arguments: argparse.Namespace) -> Iterator[Row]:
    import dataclasses

    from sparda_jax import cli
    from sparda_jax.assets import load_excerpt
    from sparda_jax.engine.generate import Engine
    from sparda_jax.evaluation import speed_benchmark
    from sparda_jax.evaluation.tables import label
    from sparda_jax.evaluation.tasks import registry

    if arguments.forecast is None and arguments.model == "default":
        arguments.forecast = "default"
    forecast, verify = arguments.forecast, arguments.verify_forecast
    model, tokenizer = cli.load_model(arguments.model, arguments.dtype, arguments.cache_dir)
    (task,) = registry.find([arguments.task])
    for mode in arguments.modes:
        own = for_mode(arguments, mode)
        selector = cli.load_selector(mode, model, tokenizer, forecast, verify=verify)
        for budget in arguments.budget_blocks if mode != "dense" else [None]:
            own.budget_blocks = budget
            sparse, config = cli.engine_settings(own)
            config = dataclasses.replace(config, length_step=arguments.length_step)
            engine = Engine(model, sparse=sparse, config=config, **selector)
            tokens = "" if budget is None else str(sparse.budget_tokens)
            for length in arguments.lengths:
                cli.note(f"{mode}{tokens}, {length} tokens")
                name = f"evaluation/{mode}{tokens}/{label(length)}/B{arguments.batch}"
                work = speed_benchmark.Work(
                    task, length, arguments.batch, repetitions=arguments.repetitions
                )
                yield from speed_benchmark.rows(name, engine, tokenizer, work, [load_excerpt()])


def add(commands: Commands, results: argparse.ArgumentParser) -> None:
    """Adds `evaluation`."""
    from sparda_jax.cli import add_engine_options, add_model_options

    command = commands.add_parser(
        "evaluation",
        parents=[results],
        help="what an evaluation keeps of the engine's speed",
        conflict_handler="resolve",  # here modes and budgets are several
    )
    add_model_options(command, None)
    add_engine_options(command)
    add = command.add_argument
    add("--modes", nargs="+", default=["dense", "sparse", "sparda"], help="attention modes")
    add("--budget-blocks", type=int, nargs="+", default=[16], help="blocks attended")
    add("--lengths", type=int, nargs="+", default=[1024], help="tokens of prompt and answer")
    add("--task", default="niah_single_2", help="whose prompts")
    add("--batch", type=int, default=50, help="prompts that run together")
    add("--repetitions", type=int, default=3, help="timed runs of each arm")
    add("--length-step", type=int, default=1024, help="lengths are rounded up")
    command.set_defaults(run=_run)
