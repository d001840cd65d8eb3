"""What the training command lines share: options of a run, its data, devices and progress."""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path
from typing import Any

from sparda_jax.cli import load_model, note
from sparda_jax.forecast.data import Windows, pack, read_documents, split_documents

# Options that are fields of `RunConfig` under the same name.
_SAME = (
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


def add_run_options(
    parser: argparse.ArgumentParser,
    *,
    learning_rate: float,
    clip: float,
    weight_decay: float,
    batch: int,
) -> None:
    """Text, model, training, devices and set-up; the arguments are defaults."""
    parser.add_argument(
        "text", type=Path, nargs="+", help="documents: UTF-8 text, .jsonl with 'text', or .npy ids"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the run: checkpoints, metrics, weights"
    )
    add = parser.add_argument_group("model and training").add_argument
    add("--model", default="default", help="'default', a directory, a GGUF file or a hub id")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the frozen model")
    add("--window", type=int, help="tokens per window (default: the model's maximum length)")
    add("--steps", type=int, default=2000, help="optimizer steps")
    add("--batch", type=int, default=batch, help="windows per optimizer step")
    add("--micro-batch", type=int, default=1, help="windows per forward pass and device")
    add("--learning-rate", type=float, default=learning_rate, help="constant after the warm-up")
    add("--warmup-steps", type=int, default=0, help="steps of a linear rise")
    add("--decay-steps", type=int, default=0, help="steps of a linear fall to 0 at the end")
    add("--clip", type=float, default=clip, help="limit of the gradient's norm")
    add("--weight-decay", type=float, default=weight_decay, help="of AdamW")
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


def run_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of `RunConfig` from the command line."""
    return {name: getattr(args, name) for name in _SAME}


def join_processes(args: argparse.Namespace) -> Any:
    """The devices to train on; with a coordinator, those of all its processes.

    Raises:
        ValueError: options that belong together are not, or more devices than there are.
    """
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


def read_windows(
    args: argparse.Namespace, model: Any, tokenizer: Any
) -> tuple[Windows, Windows, str]:
    """Windows to train on, held-out ones, and both in words."""
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


def prepared(args: argparse.Namespace) -> tuple[Any, Windows, Windows, Any]:
    """Model, windows to train on, held-out ones, and devices; says how much text there is.

    Raises:
        ValueError: options that contradict each other; a model without a tokenizer.
    """
    import jax

    devices = join_processes(args)
    model, tokenizer = load_model(args.model, args.dtype)
    train, held_out, what = read_windows(args, model, tokenizer)
    if jax.process_index() == 0:
        note(f"{what} tokens")
    return model, train, held_out, devices


def trained(args: argparse.Namespace, trainer: Any, share: str) -> Any:
    """Shows a trainer's plan, or runs it.

    Args:
        args: of the command line.
        trainer: a `Run`.
        share: see `show_progress`.

    Returns:
        The last state, on the process that writes the weights; else, and after a plan, None.
    """
    import jax

    if args.dry_run:
        show_plan(trainer.plan())
        return None
    chief = jax.process_index() == 0
    tell = partial(show_progress, steps=trainer.config.steps, share=share)
    state = trainer.run(tell if chief else lambda progress: None)
    return state if chief else None


def duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    whole = math.ceil(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def show_plan(plan: dict[str, float]) -> None:
    """Memory and time of a run, from `Run.plan`."""
    from host_offload.memory import format_bytes  # imports jax

    print(f"memory   {format_bytes(int(plan['argument_bytes'] + plan['temporary_bytes']))}")
    print(f"step     {plan['seconds_per_step']:.2f} s, {plan['tokens_per_second']:.0f} tok/s")
    print(f"training {duration(plan['seconds'])}, without evaluation and checkpoints")


def show_progress(progress: Any, *, steps: int, share: str) -> None:
    """One line a step.

    Args:
        progress: of `Run.run`.
        steps: of the whole run.
        share: the figure beside the loss: "recall" or "accuracy".
    """
    record = progress.record
    text = f"step {record['step']}/{steps}"
    if "loss" in record:
        text += (
            f"  loss {record['loss']:.4f}  {share} {100 * record[share]:.1f} %  "
            f"{record['tokens_per_second']:.0f} tok/s  {duration(progress.seconds_left)} left"
        )
    if f"held_out_{share}" in record:
        text += (
            f"  held out: loss {record['held_out_loss']:.4f}, "
            f"{share} {100 * record[f'held_out_{share}']:.1f} %"
        )
    note(text)
