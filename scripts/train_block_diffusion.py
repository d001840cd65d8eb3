#!/usr/bin/env python3
"""Turn a causal model into a block-diffusion model: train an adapter, or all weights, on text.

The same command goes on with a run that was stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Any

from sparda_jax.cli import HelpFormatter, Parser, guarded
from sparda_jax.commands.training import add_run_options, prepared, run_settings, trained

# Before jax starts: XLA writes INFO lines about the CPU to stderr otherwise.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        prog="train_block_diffusion.py", description=__doc__, formatter_class=HelpFormatter
    )
    add = parser.add_argument_group("model that comes out").add_argument
    add("--block-size", type=int, default=32, help="tokens that are denoised together")
    add("--mask-token", type=int, help="id that stands for 'not decided' (default: the model's)")
    add(
        "--logit-shift",
        action=argparse.BooleanOptionalAction,
        help="row i-1 predicts token i, as in a causal model (default: the model's, else yes)",
    )
    add("--rank", type=int, default=16, help="of the adapter")
    add("--alpha", type=float, default=32.0, help="the adapter counts alpha / rank")
    add("--full", action="store_true", help="train all weights instead of an adapter")
    add("--start", help="adapter to go on from, 'default' or a file; it says all of the above")
    add = parser.add_argument_group("loss").add_argument
    add("--noise", choices=("block", "sequence"), default="block", help="what has one mask rate")
    add("--noise-low", type=float, default=0.0, help="least noise level")
    add("--noise-high", type=float, default=1.0, help="greatest noise level")
    add(
        "--complementary",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="see every window a second time with the other tokens masked",
    )
    add("--suffix", type=float, default=0.0, help="share of blocks masked from a place on")
    add(
        "--weighting",
        choices=("mean", "inverse_rate"),
        default="mean",
        help="how masked tokens count",
    )
    add("--nearness", type=float, default=1.0, help="weight of a mask for each one before it")
    add("--distil", type=float, default=0.0, help="share of the causal model's KL in the loss")
    add("--remat", action=argparse.BooleanOptionalAction, default=True, help="less memory, slower")
    add_run_options(parser, learning_rate=1e-3, clip=1.0, weight_decay=0.0, batch=16)
    return parser.parse_args(argv)


def settings(args: argparse.Namespace) -> Any:
    """Everything but the mask token, which may be the model's."""
    from sparda_jax.config import DiffusionConfig
    from sparda_jax.diffusion.adapter import LoraConfig
    from sparda_jax.diffusion.loss import BlockLossConfig
    from sparda_jax.diffusion.noise import NoiseConfig
    from sparda_jax.diffusion.training import BlockTrainConfig

    noise = NoiseConfig(
        args.noise,
        args.noise_low,
        args.noise_high,
        complementary=args.complementary,
        suffix=args.suffix,
    )
    return BlockTrainConfig(
        diffusion=DiffusionConfig(args.block_size, args.mask_token, args.logit_shift is not False),
        loss=BlockLossConfig(noise, args.weighting, args.distil, args.nearness, args.remat),
        lora=None if args.full else LoraConfig(args.rank, args.alpha),
        **run_settings(args),
    )


def with_model_facts(args: argparse.Namespace, config: Any, facts: Any) -> Any:
    """The mask token and the shift of a model that is one of block diffusion already."""
    if facts is None:
        return config
    diffusion = config.diffusion
    if args.mask_token is None:
        diffusion = dataclasses.replace(diffusion, mask_token_id=facts.mask_token_id)
    if args.logit_shift is None:
        diffusion = dataclasses.replace(diffusion, logit_shift=facts.logit_shift)
    diffusion = dataclasses.replace(diffusion, causal_clean=facts.causal_clean)
    return dataclasses.replace(config, diffusion=diffusion)


def run(args: argparse.Namespace) -> int:
    # Settings first: a mistake in them should not wait for the weights.
    config = settings(args)
    from sparda_jax.diffusion.files import read_adapter, save_adapter
    from sparda_jax.diffusion.training import BlockTrainer

    model, train, held_out, devices = prepared(args)
    config = with_model_facts(args, config, model.config.diffusion)
    start = None
    if args.start is not None:
        start, lora, diffusion = read_adapter(args.start, model)
        config = dataclasses.replace(config, lora=lora, diffusion=diffusion)
    trainer = BlockTrainer(model, config, train, held_out, args.out, devices, start=start)
    state = trained(args, trainer, "accuracy")
    if state is None:
        return 0
    path = args.out / "block_diffusion.safetensors"
    save_adapter(path, state.params, model, config.lora, config.diffusion)
    print(path)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    stopped = "interrupted; the same command goes on from the last checkpoint"
    return guarded("train_block_diffusion.py", run, args, interrupted=stopped)


if __name__ == "__main__":
    sys.exit(main())
