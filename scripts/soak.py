#!/usr/bin/env python3
"""Random requests on a tiny random model, as long as you like: leaks, equality, memory, programs.

Every result must equal that of the same request alone; resident memory and the number of compiled
programs must stay what they were after the first round. The exit code says whether they did.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence

from sparda_jax.cli import HelpFormatter, Parser, guarded, note

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

ROUND = 100  # requests between two looks at memory
LENGTH = 96
# Allocators keep some of what they were given; more than this in half an hour would be a leak.
SLACK_MIB = 64


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="soak.py", description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="at least so many")
    parser.add_argument("--minutes", type=float, default=0.0, help="and at least so long")
    parser.add_argument("--mode", choices=("dense", "sparse", "sparda"))
    parser.add_argument("--offload", choices=("none", "host"))
    parser.add_argument("--rows", type=int, default=4, help="requests at the same time")
    parser.add_argument("--seed", type=int, default=0, help="of the requests")
    parser.add_argument("--traceback", action="store_true", help="show where an error arose")
    args = parser.parse_args(argv)
    args.mode = args.mode or "sparda"
    args.offload = args.offload or ("none" if args.mode == "dense" else "host")
    return args


def resident_mib() -> float:
    """Memory of this process that is in RAM, MiB."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def run(args: argparse.Namespace) -> int:
    from sparda_jax.engine.scheduler import Scheduler
    from sparda_jax.engine.service import SchedulerConfig
    from sparda_jax.evaluation.serving_check import check_round, draw_requests, tiny_engine

    engine = tiny_engine(args.mode, args.offload, LENGTH)
    limits = {"rows": args.rows, "queue": ROUND}
    together = Scheduler(engine, SchedulerConfig(prefill_seconds=2e-3, **limits))
    alone = Scheduler(engine, SchedulerConfig(prefix_reuse=False, **limits))
    begun, done, wrong, reasons = time.monotonic(), 0, [], Counter[str]()
    memory, programs = [], []
    while done < args.requests or time.monotonic() - begun < 60 * args.minutes:
        requests = draw_requests(ROUND, engine.model.config.vocab_size, LENGTH, args.seed + done)
        outcome = check_round(together, alone, requests)
        done += ROUND
        wrong += outcome.wrong
        reasons.update(result.finish_reason for result in outcome.results)
        memory.append(resident_mib())
        programs.append(engine.programs.compilations)
        note(f"{done} requests, {memory[-1]:.0f} MiB, {programs[-1]} programs, {len(wrong)} wrong")
    # The first round compiles and fills the allocators.
    grown = memory[-1] - memory[min(1, len(memory) - 1)]
    if grown > SLACK_MIB:
        wrong.append(f"resident memory grew by {grown:.0f} MiB")
    if programs[-1] != programs[min(1, len(programs) - 1)]:
        wrong.append(f"programs grew from {programs[1]} to {programs[-1]}")
    counters = together.counters
    print(
        json.dumps(
            {
                "requests": done,
                "seconds": round(time.monotonic() - begun, 1),
                "finished": dict(reasons),
                "tokens": counters.tokens,
                "cached_tokens": counters.cached_tokens,
                "resident_mib": [round(value) for value in memory],
                "programs": programs[-1],
                "wrong": wrong[:20],
            }
        )
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    arguments = parse_arguments()
    sys.exit(guarded("soak.py", run, arguments))
