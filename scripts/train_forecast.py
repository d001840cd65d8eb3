#!/usr/bin/env python3
"""Train the Forecast projections of a model on text; the model itself stays as it is.

The same command goes on with a run that was stopped.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparda_jax.cli import HelpFormatter, Parser, add_policy_options, guarded, note, policy

# Before jax starts: XLA writes INFO lines about the CPU to stderr otherwise.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="train_forecast.py", description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument(
        "text", type=Path, nargs="+", help="documents: UTF-8 text, .jsonl with 'text', or .npy ids"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the run: checkpoints, metrics, weights"
    )
    group = parser.add_argument_group("model and policy")
    add = group.add_argument
    add("--model", default="default", help="'default', a directory, a GGUF file or a hub id")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the frozen model")
    add_policy_options(group)
    add("--teacher-kernel", type=int, default=2, help="keys averaged into one of the teacher's")
    add("--teacher-stride", type=int, default=1, help="keys between two of the teacher's")
    add("--lookahead", type=int, default=1, help="layers ahead; other than 1 to compare only")
    add = parser.add_argument_group("training").add_argument
    add("--window", type=int, help="tokens per window (default: the model's maximum length)")
    add("--steps", type=int, default=2000, help="optimizer steps")
    add("--batch", type=int, default=32, help="windows per optimizer step")
    add("--micro-batch", type=int, default=1, help="windows per forward pass and device")
    add("--learning-rate", type=float, default=5e-4, help="constant after the warm-up")
    add("--warmup-steps", type=int, default=0, help="steps of a linear rise")
    add("--decay-steps", type=int, default=0, help="steps of a linear fall to 0 at the end")
    add("--clip", type=float, default=0.5, help="limit of the gradient's norm")
    add("--weight-decay", type=float, default=0.01, help="of AdamW")
    add("--held-out", type=float, default=0.05, help="share of the documents to evaluate on")
    add("--held-out-text", type=Path, nargs="+", help="evaluate on these documents instead")
    add("--eval-every", type=int, default=100, help="steps between evaluations; 0: at the end")
    add("--eval-windows", type=int, default=16, help="windows of each, at most")
    add("--save-every", type=int, default=50, help="steps between checkpoints")
    add("--keep", type=int, default=5, help="checkpoints kept")
    add("--seed", type=int, default=42, help="of initial weights, split and order")
    add = parser.add_argument_group("devices").add_argument
    add("--devices", type=int, default=1, help="devices of this host to spread a batch over")
    add("--coordinator", help="host:port of process 0; a batch is spread over all their devices")
    add("--processes", type=int, help="how many processes, with --coordinator")
    add("--process-id", type=int, help="which of them this is, from 0 on")
    add = parser.add_argument_group("output and set-up").add_argument
    add("--dry-run", action="store_true", help="print memory need and time estimate, train nothing")
    add("--traceback", action="store_true", help="show where in the code an error arose")
    return parser.parse_args(argv)


def settings(args: argparse.Namespace) -> Any:
    from sparda_jax.config import SparseConfig
    from sparda_jax.forecast.loss import LossConfig
    from sparda_jax.forecast.step import TrainConfig
    from sparda_jax.sparse.forecast import check_lookahead

    sparse = policy(args, SparseConfig())
    check_lookahead(sparse)
    same = (
        "steps",
        "batch",
        "micro_batch",
        "learning_rate",
        "warmup_steps",
        "decay_steps",
        "weight_decay",
        "clip",
        "seed",
        "save_every",
        "keep",
        "eval_every",
        "eval_windows",
    )
    return TrainConfig(
        loss=LossConfig(sparse, args.teacher_kernel, args.teacher_stride, lookahead=args.lookahead),
        **{name: getattr(args, name) for name in same},
    )


def duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    whole = math.ceil(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def show(progress: Any, steps: int) -> None:
    record = progress.record
    text = f"step {record['step']}/{steps}"
    if "loss" in record:
        text += (
            f"  loss {record['loss']:.4f}  recall {100 * record['recall']:.1f} %  "
            f"{record['tokens_per_second']:.0f} tok/s  {duration(progress.seconds_left)} left"
        )
    if "held_out_loss" in record:
        text += (
            f"  held out: loss {record['held_out_loss']:.4f}, "
            f"recall {100 * record['held_out_recall']:.1f} %"
        )
    note(text)


def show_plan(plan: dict[str, float], memory_format: Any) -> None:
    print(f"memory   {memory_format(int(plan['argument_bytes'] + plan['temporary_bytes']))}")
    print(f"step     {plan['seconds_per_step']:.2f} s, {plan['tokens_per_second']:.0f} tok/s")
    print(f"training {duration(plan['seconds'])}, without evaluation and checkpoints")


def join_processes(args: argparse.Namespace) -> Any:
    """The devices to train on; with a coordinator, those of all its processes."""
    import jax

    together = (args.coordinator, args.processes, args.process_id)
    if together != (None, None, None):
        if None in together:
            raise ValueError("--coordinator, --processes and --process-id belong together")
        if args.devices != 1:
            raise ValueError("--devices: with --coordinator all devices take part")
        jax.distributed.initialize(*together)
        return jax.devices()
    devices = jax.devices()
    if not 1 <= args.devices <= len(devices):
        raise ValueError(f"--devices {args.devices}: there are {len(devices)}")
    return devices[: args.devices]


def read_windows(args: argparse.Namespace, model: Any, tokenizer: Any) -> Any:
    """Windows to train on and held-out ones."""
    from sparda_jax.forecast.data import pack, read_documents, split_documents

    documents = read_documents(args.text, tokenizer.encode)
    if args.held_out_text:
        parts = documents, read_documents(args.held_out_text, tokenizer.encode)
    else:
        parts = split_documents(documents, args.held_out, args.seed)
    window = args.window or model.config.max_position_embeddings
    separator = min(tokenizer.eos_token_ids, default=None)
    train, held_out = (pack(part, window, separator) for part in parts)
    count = sum(map(len, parts))
    return train, held_out, f"{count} documents: {len(train)} + {len(held_out)} windows of {window}"


def run(args: argparse.Namespace) -> int:
    # Settings first: a mistake in them should not wait for the weights.
    config = settings(args)
    import jax
    import jax.numpy as jnp

    from host_offload.memory import format_bytes
    from sparda_jax.checkpoints.load import load_pretrained
    from sparda_jax.forecast.files import save_forecast
    from sparda_jax.forecast.step import forecast_of
    from sparda_jax.forecast.training import Trainer

    devices = join_processes(args)
    chief = jax.process_index() == 0
    model, tokenizer = load_pretrained(args.model, dtype=jnp.dtype(args.dtype))
    if tokenizer is None:
        raise ValueError(f"no tokenizer.json in {args.model}")
    train, held_out, what = read_windows(args, model, tokenizer)
    if chief:
        note(f"{what} tokens")
    trainer = Trainer(model, config, train, held_out, args.out, devices)
    if args.dry_run:
        show_plan(trainer.plan(), format_bytes)
        return 0
    state = trainer.run(lambda progress: show(progress, config.steps) if chief else None)
    if not chief:
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
