#!/usr/bin/env python3
"""Check a checkpoint: it loads whole, says what a record or transformers says; how sparse agrees.

Prints one verdict; the exit code is 0 only where nothing failed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from sparda_jax.cli import HelpFormatter, Parser, add_policy_options, guarded, note, policy

# Before jax starts: XLA writes INFO lines about the CPU to stderr otherwise.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="verify.py", description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("model", help="directory, GGUF file or hub id")
    add("--forecast", type=Path, help="file with Forecast weights")
    add("--record", type=Path, help="record to compare with; written where there is none")
    add("--transformers", action="store_true", help="compare with transformers, where installed")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights")
    add("--model-axis", type=int, default=1, help="devices that share heads and channels")
    add("--context", type=int, default=8192, help="prompt tokens of the sparse modes; 0: not run")
    add("--tokens", type=int, default=32, help="tokens of a continuation")
    add("--traceback", action="store_true", help="show where an error arose")
    add_policy_options(parser.add_argument_group("selection"), "the checkpoint's, else ")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    from sparda_jax.config import SparseConfig
    from sparda_jax.evaluation.verification import verify
    from sparda_jax.pretrained import from_pretrained
    from sparda_jax.sharding import make_mesh

    loaded = from_pretrained(
        args.model,
        forecast=args.forecast,
        dtype=args.dtype,
        mesh=make_mesh(model=args.model_axis) if args.model_axis > 1 else None,
    )
    verdict = verify(
        loaded,
        Path(args.model),
        record=args.record,
        transformers=args.transformers,
        sparse=policy(args, loaded.sparse or SparseConfig()) if args.context else None,
        context=args.context,
        new_tokens=args.tokens,
        say=note,
    )
    print("FAILED" if verdict.failures else "verified", args.model)
    return 1 if verdict.failures else 0


def main(argv: Sequence[str] | None = None) -> int:
    return guarded("verify.py", run, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
