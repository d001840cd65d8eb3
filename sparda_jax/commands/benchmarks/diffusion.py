"""Block diffusion: quality of samples, speed, and HERALD."""

from __future__ import annotations

import argparse
import pathlib
from typing import TYPE_CHECKING

from sparda_jax.commands.benchmarks.publish import progress, publish

if TYPE_CHECKING:
    from sparda_jax.commands.benchmarks.publish import Commands


DIFFUSION_NOTES = (
    "samples/...: continuations of held-out text; perplexity under the causal model, given the "
    "prompt; target: 1.5 times that of the causal model's own samples at the same temperature; "
    "distinct_n: distinct n-grams of a continuation by all of them, mean; n: continuations; "
    "steps_pX: percentiles of denoising forwards a block, the commit aside.  block_diffusion/...: "
    "random weights and caches, one block per request, U steps and a commit, wall clock of the "
    "call; of_roofline: the sum over operations of the larger of bytes and FLOPs, over the step."
)


def _diffusion_samples(arguments: argparse.Namespace) -> None:
    import jax.numpy as jnp
    import numpy as np

    from sparda_jax.checkpoints.load import load_pretrained
    from sparda_jax.diffusion.files import load_adapter
    from sparda_jax.evaluation import block_diffusion_benchmark as benchmark

    model, _ = load_pretrained(arguments.model, dtype=jnp.dtype(arguments.dtype))
    text = np.load(arguments.text)
    stride = len(text) // arguments.samples
    starts = range(0, stride * arguments.samples, stride)
    plan = benchmark.Sampling(
        [text[at : at + arguments.prompt].tolist() for at in starts],
        arguments.new_tokens,
        arguments.temperatures,
        arguments.thresholds,
        arguments.strategy,
        arguments.sub_block,
    )
    rows = benchmark.sample_rows(model, load_adapter(arguments.adapter, model), plan)
    publish(arguments, rows, DIFFUSION_NOTES)


def _diffusion_speed(arguments: argparse.Namespace) -> None:
    from sparda_jax.config import ModelConfig
    from sparda_jax.evaluation import block_diffusion_benchmark as benchmark
    from sparda_jax.presets import PRESETS

    config = ModelConfig.from_huggingface(PRESETS[arguments.model])
    rows = benchmark.speed_rows(
        arguments.model,
        config,
        arguments.contexts,
        arguments.batches,
        steps=arguments.steps,
    )
    publish(arguments, rows, DIFFUSION_NOTES)


HERALD_NOTES = (
    "Random weights and one random prompt for all requests, bfloat16; turns in which every request "
    "gets one block in U denoising forwards and a commit, after a turn that compiles. limit_tok_s: "
    "the cost model's, of which the target is 85 %."
)


def _herald(arguments: argparse.Namespace) -> None:
    import dataclasses

    import jax.numpy as jnp

    from host_offload.cpu_selection import SelectionRule
    from sparda_jax.config import ModelConfig
    from sparda_jax.evaluation import herald_benchmark
    from sparda_jax.herald.config import Budget, HeraldConfig
    from sparda_jax.herald.cost import H200
    from sparda_jax.models.decoder import Decoder

    machine = dataclasses.replace(
        H200, device_bytes=arguments.device_gb * 1e9, host_bytes=arguments.host_gb * 2**30
    )
    plan = herald_benchmark.Plan(
        context=arguments.context,
        steps=arguments.steps,
        turns=arguments.turns,
        modes=tuple(arguments.modes),
        batches=tuple(arguments.batches),
        machine=machine,
    )
    config = HeraldConfig(
        budget=Budget(arguments.budget_share),
        rule=SelectionRule(run=arguments.run_length),
        quantised_keys=arguments.int8_keys,
        prefill_chunk=arguments.chunk,
        workers=arguments.workers,
    )
    preset = ModelConfig.preset(arguments.model)
    if arguments.estimate:
        herald_benchmark.estimates(preset, config, plan, progress)
        return
    model = Decoder.random(preset, dtype=jnp.bfloat16)
    kind = "int8" if arguments.int8_keys else "bf16"
    prefix = f"herald/{arguments.model}/{arguments.context // 1024}K/{kind}"
    rows = herald_benchmark.rows(model, config, plan, prefix=prefix, report=progress)
    publish(arguments, rows, HERALD_NOTES)


def add(commands: Commands, results: argparse.ArgumentParser) -> None:
    """Adds `diffusion-samples`, `diffusion-speed` and `herald`."""
    command = commands.add_parser(
        "diffusion-samples", parents=[results], help="quality of a block-diffusion model's samples"
    )
    command.set_defaults(run=_diffusion_samples)
    command.add_argument("text", type=pathlib.Path, help=".npy of token ids, held-out text")
    command.add_argument("--model", default="default")
    command.add_argument("--adapter", default="default")
    command.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    command.add_argument("--samples", type=int, default=64)
    command.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    command.add_argument("--new-tokens", type=int, default=128)
    command.add_argument("--temperatures", type=float, nargs="+", default=[0.8])
    command.add_argument("--thresholds", type=float, nargs="+", default=[0.7, 0.8, 0.9, 0.95])
    command.add_argument("--strategy", default="threshold_or_first")
    command.add_argument("--sub-block", type=int)
    command = commands.add_parser(
        "diffusion-speed", parents=[results], help="block decoding of a large shape, resident KV"
    )
    command.set_defaults(run=_diffusion_speed)
    command.add_argument("model", help="a preset: sdar-8b-chat-b32 or llada2.0-mini")
    command.add_argument("--contexts", type=int, nargs="+", default=[1024, 16384, 32000])
    command.add_argument("--batches", type=int, nargs="+", default=[1])
    command.add_argument("--steps", type=int, default=20, help="U")
    command = commands.add_parser(
        "herald", parents=[results], help="block diffusion, all modes, KV in host memory, on a GPU"
    )
    command.add_argument("--model", default="sdar-8b-chat-b32", help="a preset's name")
    command.add_argument("--context", type=int, default=32768, help="tokens at the end")
    command.add_argument("--steps", type=int, default=20, help="U, denoising forwards a block")
    command.add_argument("--turns", type=int, default=4, help="timed, a block of each request each")
    command.add_argument(
        "--modes",
        nargs="+",
        default=["dense", "mage", "mage_offload", "herald_serial", "herald"],
        choices=["dense", "mage", "mage_offload", "infinigen", "herald_serial", "herald"],
        help="what to run",
    )
    command.add_argument(
        "--batches", type=int, nargs="*", default=[], help="requests (default: the model's best)"
    )
    command.add_argument("--budget-share", type=float, default=0.05, help="of the prefix")
    command.add_argument("--run-length", type=int, default=1, help="rows chosen together")
    command.add_argument("--int8-keys", action="store_true", help="scan int8 keys")
    command.add_argument("--chunk", type=int, default=4096, help="prompt tokens of a prefill call")
    command.add_argument("--workers", type=int, default=16, help="threads that scan and gather")
    command.add_argument("--device-gb", type=float, default=80.0, help="10^9 bytes of HBM to use")
    command.add_argument("--host-gb", type=float, default=200.0, help="GiB of host KV at most")
    command.add_argument("--estimate", action="store_true", help="print the cost model and end")
    command.set_defaults(run=_herald)
