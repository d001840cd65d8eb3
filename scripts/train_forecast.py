#!/usr/bin/env python3
"""Train the Forecast projections of a model on text; the model itself stays as it is.

The same command goes on with a run that was stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from sparda_jax.cli import HelpFormatter, Parser, add_policy_options, guarded, policy
from sparda_jax.commands.training import add_run_options, prepared, run_settings, trained

# Before jax starts: XLA writes INFO lines about the CPU to stderr otherwise.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="train_forecast.py", description=__doc__, formatter_class=HelpFormatter)
    group = parser.add_argument_group("policy")
    add = group.add_argument
    add_policy_options(group)
    add("--teacher-kernel", type=int, default=2, help="keys averaged into one of the teacher's")
    add("--teacher-stride", type=int, default=1, help="keys between two of the teacher's")
    add(
        "--target",
        choices=("windows", "blocks"),
        default="windows",
        help="windows: the published loss; blocks: true attention mass of the free blocks",
    )
    add("--query-every", type=int, default=1, help="train on one token of so many")
    add("--chunk-mib", type=int, default=64, help="MiB of scores formed at a time, at most")
    add("--lookahead", type=int, default=1, help="layers ahead; other than 1 to compare only")
    add_run_options(parser, learning_rate=5e-4, clip=0.5, weight_decay=0.01, batch=32)
    return parser.parse_args(argv)


def settings(args: argparse.Namespace) -> Any:
    from sparda_jax.config import SparseConfig
    from sparda_jax.forecast.loss import LossConfig
    from sparda_jax.forecast.step import TrainConfig
    from sparda_jax.sparse.forecast import check_lookahead

    sparse = policy(args, SparseConfig())
    check_lookahead(sparse)
    return TrainConfig(
        loss=LossConfig(
            sparse,
            args.teacher_kernel,
            args.teacher_stride,
            target=args.target,
            query_every=args.query_every,
            lookahead=args.lookahead,
            chunk_bytes=args.chunk_mib << 20,
        ),
        **run_settings(args),
    )


def run(args: argparse.Namespace) -> int:
    # Settings first: a mistake in them should not wait for the weights.
    config = settings(args)
    from sparda_jax.forecast.files import save_forecast
    from sparda_jax.forecast.step import forecast_of
    from sparda_jax.forecast.training import Trainer

    model, train, held_out, devices = prepared(args)
    trainer = Trainer(model, config, train, held_out, args.out, devices)
    state = trained(args, trainer, "recall")
    if state is None:
        return 0
    path = args.out / "forecast.safetensors"
    forecast, ahead = forecast_of(model, state), args.lookahead
    save_forecast(path, forecast, model, config.loss.sparse, lookahead=ahead)
    print(path)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    stopped = "interrupted; the same command goes on from the last checkpoint"
    return guarded("train_forecast.py", run, args, interrupted=stopped)


if __name__ == "__main__":
    sys.exit(main())
