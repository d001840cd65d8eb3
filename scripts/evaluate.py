#!/usr/bin/env python3
"""Evaluate a model in one or more attention modes: tasks, perplexity by position, selections.

The same command goes on with a run that was stopped, and gives the table it would have given.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from sparda_jax.cli import (
    HelpFormatter,
    Parser,
    add_engine_options,
    add_model_options,
    guarded,
    note,
)
from sparda_jax.commands.diffusion import add_diffusion_options
from sparda_jax.commands.evaluation import METERS, Session, digest
from sparda_jax.commands.herald import MODES as HERALD_MODES
from sparda_jax.commands.herald import add_herald_options

# Before jax starts: XLA writes INFO lines about the CPU to stderr otherwise.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# For machines where the code lies without its repository.
COMMIT = os.environ.get("SPARDA_JAX_COMMIT")
MODES = ("dense", "sparse", "sparda", "infinigen")
# Of block diffusion; "auto" would be another mode for every length.
BLOCK_MODES = ("dense", "infinigen", *(mode for mode in HERALD_MODES if mode != "auto"))
EXAMPLES = """examples:
  the shipped model, RULER's eleven synthetic tasks at 1K tokens, dense against sparda:
    evaluate.py --mode dense sparda --tasks ruler --lengths 1024 --samples 20 --json ruler.json
  perplexity by position, and what is selected, on your own text:
    evaluate.py --mode dense sparse sparda --tasks perplexity selection --lengths 8192 --text *.txt
  LongBench from its files (data/longbench/hotpotqa.jsonl, ...), too long prompts cut in the middle:
    evaluate.py --model path/to/model --mode sparse --tasks longbench14 --data data --truncate
  block diffusion with the adapter that ships, HERALD and its rivals:
    evaluate.py --diffusion --mode dense mage herald --tasks niah_single_1 --lengths 1024
  four samples of each AIME problem (data/math/aime24.jsonl):
    evaluate.py --model path/to/model --tasks aime24 --data data --temperature 0.6 --repeats 4
files, fields and scores: docs/evaluation.md
"""


class Help(HelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Leaves the lines of the examples as they are."""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        prog="evaluate.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=Help,
        conflict_handler="resolve",  # here --mode takes several
    )
    what, answers = (parser.add_argument_group(name) for name in ("what to evaluate", "answers"))
    add_model_options(parser, os.environ.get("SPARDA_JAX_CACHE"))
    add_engine_options(parser)
    add_diffusion_options(parser)
    add_herald_options(parser)
    add = what.add_argument
    add(
        "--mode",
        nargs="+",
        dest="modes",
        metavar="MODE",
        choices=dict.fromkeys((*MODES, *BLOCK_MODES)),
        default=["dense"],
        help=f"attention modes: {', '.join(MODES)}; with --diffusion {', '.join(BLOCK_MODES)}. The "
        "others are compared with dense, or else with the first",
    )
    add("--tasks", nargs="+", metavar="TASK", help="tasks, groups of them, perplexity or selection")
    add("--list", action="store_true", help="name all tasks and groups and end")
    add("--lengths", type=int, nargs="*", default=[], help="tokens, for tasks made to measure")
    add("--samples", type=int, default=20, help="examples a task, length and seed; documents")
    add("--seeds", type=int, nargs="+", default=[42], help="of the examples")
    add("--data", type=Path, help="folder with the files of tasks that are not made from text")
    add("--text", type=Path, nargs="+", help="haystacks and documents (default: Python's docs)")
    add("--chat", action=argparse.BooleanOptionalAction, help="use the model's chat template")
    add("--truncate", action="store_true", help="cut too long prompts in the middle")
    add = answers.add_argument
    add("--batch", type=int, default=8, help="prompts that run together")
    add("--max-new-tokens", type=int, help="limit besides the tasks' own")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--top-p", type=float, default=1.0, help="1 keeps all tokens")
    add("--repeats", type=int, default=1, help="answers to each question")
    add("--length-step", type=int, default=512, help="lengths are rounded up: fewer programs")
    add = parser.add_argument_group("output and set-up").add_argument
    add("--json", type=Path, help="write a results file")
    add("--run-dir", type=Path, help="folder of the work (default: runs/ and a hash of settings)")
    add("--traceback", action="store_true", help="show where in the code an error arose")
    args = parser.parse_args(argv)
    if not args.list and not args.tasks:
        parser.error("--tasks: say what to evaluate (--list names all)")
    if "sparda" in args.modes and args.forecast is None:
        args.forecast = "default" if args.model == "default" else None
        if args.forecast is None:
            parser.error("--mode sparda: name the Forecast weights of this model with --forecast")
    for mode in args.modes:
        if mode not in (BLOCK_MODES if args.diffusion else MODES):
            parser.error(f"--mode {mode} is {'not ' if args.diffusion else ''}of block diffusion")
    if args.samples < 1:
        parser.error(f"--samples must be at least 1, got {args.samples}")
    return args


def list_tasks() -> None:
    from sparda_jax.evaluation.tasks.registry import GROUPS

    for name, members in GROUPS.items():
        print(f"{name}: {', '.join(members)}")
    print(f"meters: {', '.join(METERS)}")


def run(args: argparse.Namespace) -> int:
    if args.list:
        list_tasks()
        return 0
    from sparda_jax.engine.interrupt import DeferredInterrupt
    from sparda_jax.evaluation.files import write_text
    from sparda_jax.evaluation.kernel_benchmarks.harness import results_document
    from sparda_jax.evaluation.run import Run

    with DeferredInterrupt() as interrupt:
        session = Session(args, interrupt.check)
        settings = session.settings()
        modes = {mode: session.settings_of(mode) for mode in args.modes}
        name = digest(json.dumps([settings, modes], sort_keys=True, default=str).encode())
        folder = args.run_dir or Path("runs") / f"evaluate-{name[:12]}"
        work = Run(folder, session.answering, session.tokenizer, session.limit)
        work.claim(settings)
        for mode, own in modes.items():
            work.claim(own, mode)
        note(f"work in {folder}")
        rows = list(session.rows(work))
    for row in rows:
        low, high = row.timing.spread
        figure = f"{row.timing.median:.4g} [{low:.4g}, {high:.4g}] {row.unit}"
        print(f"{row.name:60s} {figure}, n {row.timing.n}")
    if args.json:
        command = shlex.join(["python", *sys.argv])
        document = results_document(command, rows, NOTES, commit=COMMIT)
        document["settings"] = settings | {"seeds": args.seeds, "modes": modes}
        write_text(args.json, json.dumps(document, indent=1, default=str) + "\n")
    return 0


NOTES = (
    "Scores 0 to 100; median: the mean over examples. spread: 95 % interval (Wilson's for 0/1 "
    "scores, else a bootstrap over examples, by cluster; means: inside each task). mode-baseline: "
    "paired difference with p of the bootstrap, at_least the lower end of the one-sided 95 % "
    "interval. Prompts are our own wording of the published formats: scores compare modes, not "
    "with published tables. meters: compile time excluded."
)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    return guarded(
        "evaluate.py", run, args, interrupted="interrupted; the same command goes on from here"
    )


if __name__ == "__main__":
    sys.exit(main())
