#!/usr/bin/env python3
"""Convert Forecast weights of the original project (a torch file) to safetensors.

The file is read without torch, and nothing in it is executed. Names, shapes and values are checked
against the base model, whose fingerprint is written along.
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
    parser = Parser(prog="convert.py", description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("weights", type=Path, help="file written by torch.save")
    parser.add_argument("--model", type=Path, required=True, help="folder of the base model")
    parser.add_argument("--out", type=Path, required=True, help="safetensors file to write")
    group = parser.add_argument_group("policy the weights were trained for")
    add_policy_options(group, "the base model's, else ")
    parser.add_argument("--traceback", action="store_true", help="show where an error arose")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    from sparda_jax.checkpoints.convert import convert_forecast
    from sparda_jax.checkpoints.safetensors import read_json
    from sparda_jax.config import SparseConfig
    from sparda_jax.huggingface_policy import parse_sparse_config

    own = parse_sparse_config(read_json(args.model / "config.json"))
    sparse = policy(args, own or SparseConfig())
    converted = convert_forecast(args.weights, args.model, args.out, sparse)
    note(f"{len(converted)} projections for {args.model}")
    print(args.out)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return guarded("convert.py", run, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
