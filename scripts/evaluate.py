#!/usr/bin/env python3
"""Evaluate a model in one or more attention modes: tasks, perplexity by position, selections.

The same command goes on with a run that was stopped, and gives the table it would have given.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sparda_jax.cli import (
    HelpFormatter,
    Parser,
    add_engine_options,
    add_model_options,
    diffusion_model,
    engine_settings,
    guarded,
    load_model,
    load_selector,
    note,
    read_text,
)
from sparda_jax.commands.diffusion import add_diffusion_options
from sparda_jax.commands.herald import MODES as HERALD_MODES
from sparda_jax.commands.herald import add_herald_options

# Before jax starts: XLA writes INFO lines about the CPU to stderr otherwise.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# For machines where the code lies without its repository.
COMMIT = os.environ.get("SPARDA_JAX_COMMIT")
METERS = ("perplexity", "selection")
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


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


class Session:
    """What all modes share: the model, settings and texts."""

    def __init__(self, args: argparse.Namespace, check: Callable[[], None]):
        from sparda_jax.assets import load_excerpt
        from sparda_jax.evaluation.run import Answering
        from sparda_jax.evaluation.suite import Suite
        from sparda_jax.evaluation.tasks import registry

        self.args, self.check = args, check
        self.meters = [name for name in args.tasks if name in METERS]
        tasks = registry.find([name for name in args.tasks if name not in METERS])
        self.suite = Suite(tasks, args.lengths, args.seeds, args.modes)
        if self.meters and not args.lengths:
            raise ValueError(f"{self.meters[0]} is measured at a length: give --lengths")
        self.answering = Answering(
            batch=args.batch,
            temperature=args.temperature,
            top_p=args.top_p,
            repeats=args.repeats,
            max_new_tokens=args.max_new_tokens,
            chat=args.chat is not False,
            truncate=args.truncate,
        )
        self.texts = [read_text(path) for path in args.text] if args.text else [load_excerpt()]
        self.configs: dict[str, Any] = {}
        self.sparse: Any = None  # the same rules in all modes
        for mode in () if args.diffusion else args.modes:
            self.sparse, config = engine_settings(self.of(mode))
            self.configs[mode] = replace(config, length_step=args.length_step)
        self.model, self.tokenizer = load_model(args.model, args.dtype, args.cache_dir)
        self.denoise: Any = None
        if args.diffusion:
            self.use_diffusion()
        if self.answering.chat and self.tokenizer.chat_template is None:
            if args.chat:
                raise ValueError("--chat: this model has no chat template")
            self.answering = replace(self.answering, chat=False)
        self.limit = args.max_length or self.model.config.max_position_embeddings

    def of(self, mode: str) -> argparse.Namespace:
        """The command line for one mode."""
        offload = "none" if mode == "dense" else self.args.offload or "host"
        return argparse.Namespace(**vars(self.args) | {"mode": mode, "offload": offload})

    def use_diffusion(self) -> None:
        """The model with its block-diffusion adapter, and settings of its modes."""
        from sparda_jax.commands.diffusion import denoise_settings
        from sparda_jax.commands.herald import herald_settings
        from sparda_jax.herald.config import Budget

        if self.meters:
            raise NotImplementedError(
                f"{self.meters[0]} with --diffusion: it needs exact log-likelihoods, or selections "
                "of an autoregressive model"
            )
        self.model = diffusion_model(self.args.model, self.model, self.args.adapter)
        self.denoise = denoise_settings(self.args, self.model)
        self.configs = {m: herald_settings(self.args, self.model, m) for m in self.args.modes}
        if "dense" in self.configs:  # attends all, whatever the others' budget
            self.configs["dense"] = replace(self.configs["dense"], budget=Budget())

    def engine(self, mode: str) -> Any:
        from sparda_jax.engine import generate

        selector = self.selector(mode)
        return generate.Engine(
            self.model, sparse=self.sparse, config=self.configs[mode], **selector
        )

    def selector(self, mode: str) -> dict[str, Any]:
        """Forecast or skews, where a mode needs them."""
        args = self.args
        return load_selector(
            mode, self.model, self.tokenizer, args.forecast, verify=args.verify_forecast
        )

    def answerer(self, mode: str) -> Any:
        from sparda_jax.evaluation.generation import BlockAnswerer, EngineAnswerer

        if self.args.diffusion:
            from sparda_jax.herald.engine import HeraldEngine

            engine = HeraldEngine(self.model, config=self.configs[mode])
            return BlockAnswerer(engine, self.tokenizer, self.denoise, self.check)
        return EngineAnswerer(self.engine(mode), self.tokenizer, self.check)

    def documents(self, length: int) -> list[list[int]]:
        """Tokens of every text; of the one that ships, windows of a length."""
        if self.args.text:
            return self.tokens
        (whole,) = self.tokens
        return [whole[i : i + length] for i in range(0, len(whole) - length + 1, length)]

    @functools.cached_property
    def tokens(self) -> list[list[int]]:
        """Of every text."""
        return [self.tokenizer.encode(text, add_special=False) for text in self.texts]

    def settings(self) -> dict[str, Any]:
        """All that decides the results of every mode, task and length alike."""
        import jax

        from sparda_jax.checkpoints.forecast import model_fingerprint

        args = self.args
        files = sorted(p for p in args.data.rglob("*") if p.is_file()) if args.data else []
        return {
            "model": {"name": str(args.model), "sha256": model_fingerprint(self.model)[:16]},
            "dtype": str(self.model.dtype),
            "tokenizer": self.tokenizer.fingerprint()[:16],
            "samples": args.samples,
            "answers": asdict(self.answering),
            "texts": [_digest(text.encode()) for text in self.texts],
            "data": {str(p.relative_to(args.data)): _digest(p.read_bytes()) for p in files},
            "limit": self.limit,
            "versions": {"jax": jax.__version__, "python": sys.version.split()[0]},
        }

    def settings_of(self, mode: str) -> dict[str, Any]:
        """All that decides the results of one mode besides."""
        import jax
        import numpy as np

        found: dict[str, Any] = {"engine": asdict(self.configs[mode])}
        if self.denoise is not None:
            found["denoise"] = asdict(self.denoise)
        elif mode != "dense":
            found["sparse"] = asdict(self.sparse)
        if mode == "sparda":
            kernels = jax.tree.leaves(self.selector(mode)["forecast"])
            found["forecast"] = _digest(b"".join(np.asarray(k).tobytes() for k in kernels))
        return found

    def rows(self, run: Any) -> Iterator[Any]:
        """All rows, once their work is done."""
        from sparda_jax.evaluation import suite
        from sparda_jax.evaluation.tasks.base import Sources

        args = self.args
        sources = Sources(
            self.tokenizer,
            length=0,
            samples=args.samples,
            seed=0,
            texts=self.texts,
            data=args.data,
            chat=self.answering.chat,
        )
        yield from suite.run_tasks(self.suite, run, sources, self.answerer, note)
        if "perplexity" in self.meters:
            yield from suite.run_perplexity(
                self.suite, run, self.documents, args.samples, self.engine, note
            )
        if "selection" in self.meters:
            yield from self.selections()

    def selections(self) -> Iterator[Any]:
        """Recall, mass, coverage and hits of what the modes select, under the policy given."""
        import numpy as np

        from sparda_jax.evaluation import policies, position, quality

        count = len(self.model.layers)
        make = {
            "sparse": lambda: policies.sparse_policy(count),
            "sparda": lambda: policies.sparda_policy(self.selector("sparda")["forecast"]),
            "infinigen": lambda: policies.infinigen_policy(self.selector("infinigen")["infinigen"]),
        }
        asked = [make[mode]() for mode in self.args.modes if mode in make]
        if not asked:
            raise ValueError("selection: dense selects nothing, give another --mode")
        for length in self.args.lengths:
            found = position.documents_of(self.documents(length), length, self.args.samples)
            yield from quality.selection_rows(
                self.model,
                asked,
                policies.sparse_policy(count),
                [np.asarray(document, np.int32) for document in found],
                quality.Setting.of_policy(length, self.sparse),
                edges=(0, length),
                by_layer=False,
                every=max(1, length // 256),
                report=note,
            )


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
        name = _digest(json.dumps([settings, modes], sort_keys=True, default=str).encode())
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
