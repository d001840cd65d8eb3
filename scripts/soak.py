#!/usr/bin/env python3
"""Random requests on a tiny random model, as long as you like: leaks, equality, memory, programs.

Every result must equal that of the same request alone; resident memory and the number of compiled
programs must stay what they were after the first rounds. The exit code says whether they did.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import time
from collections.abc import Sequence

from sparda_jax.cli import HelpFormatter, Parser, guarded, note

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

ROUND = 100  # requests between two looks at memory
LENGTH = 96
NOTES = (
    "Random requests on a tiny random model, together and each alone: cancelled_share: of those "
    "that ran together; wrong: results otherwise than alone, leaks, counters that do not add up; "
    "growth: of resident memory and compiled programs, from the fifth round of 100 on."
)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="soak.py", description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="at least so many")
    parser.add_argument("--minutes", type=float, default=0.0, help="and at least so long")
    parser.add_argument("--mode", choices=("dense", "sparse", "sparda"))
    parser.add_argument("--offload", choices=("none", "host"))
    parser.add_argument("--rows", type=int, default=4, help="requests at the same time")
    parser.add_argument("--seed", type=int, default=0, help="of the requests")
    parser.add_argument("--json", type=pathlib.Path, help="results file, written after each round")
    parser.set_defaults(merge=False, commit=os.environ.get("SPARDA_JAX_COMMIT"))
    parser.add_argument("--traceback", action="store_true", help="show where an error arose")
    args = parser.parse_args(argv)
    args.mode = args.mode or "sparda"
    args.offload = args.offload or ("none" if args.mode == "dense" else "host")
    return args


def run(args: argparse.Namespace) -> int:
    import jax

    from sparda_jax.commands.benchmarks.publish import publish
    from sparda_jax.engine.scheduler import Scheduler
    from sparda_jax.engine.service import SchedulerConfig
    from sparda_jax.evaluation.serving_check import Soak, check_round, draw_requests, tiny_engine

    # What follows a known prefix is cut otherwise than from scratch: float32, not TF32, must agree.
    jax.config.update("jax_default_matmul_precision", "highest")
    engine = tiny_engine(args.mode, args.offload, LENGTH)
    limits = {"rows": args.rows, "queue": ROUND}
    together = Scheduler(engine, SchedulerConfig(prefill_seconds=2e-3, **limits))
    alone = Scheduler(engine, SchedulerConfig(prefix_reuse=False, **limits))
    begun, soak = time.monotonic(), Soak(f"soak/{args.mode}/{args.offload}", together)
    while soak.requests < args.requests or time.monotonic() - begun < 60 * args.minutes:
        seed = args.seed + soak.requests
        requests = draw_requests(ROUND, engine.model.config.vocab_size, LENGTH, seed)
        soak.add(check_round(together, alone, requests), time.monotonic() - begun)
        note(soak.line())
        publish(args, soak.rows(), NOTES, show=lambda row: False)
    publish(args, soak.rows(), NOTES)
    for line in soak.wrong[:20]:
        note(line)
    return 1 if soak.wrong or any(row.as_json().get("meets") is False for row in soak.rows()) else 0


if __name__ == "__main__":
    arguments = parse_arguments()
    sys.exit(guarded("soak.py", run, arguments))
