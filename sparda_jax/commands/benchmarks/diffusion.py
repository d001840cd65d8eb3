"""Block diffusion: quality of samples, and speed."""

from __future__ import annotations

import argparse
import pathlib
from typing import TYPE_CHECKING

from sparda_jax.commands.benchmarks.publish import publish

if TYPE_CHECKING:
    from sparda_jax.commands.benchmarks.publish import Commands


DIFFUSION_NOTES = (
    "samples/...: continuations of held-out text; perplexity under the causal model, given the "
    "prompt; target: 1.5 times that of the causal model's own samples at the same temperature; "
    "distinct_n: distinct n-grams of a continuation by all of them, mean; n: continuations; "
    "steps_pX: percentiles of denoising forwards a block, the commit aside; .../speed: decode of "
    "all of them at once, the second time.  block_diffusion/MODEL/CONTEXT/BATCH/U: random weights "
    "and caches, one block per request, U steps and a commit, wall clock of the call; "
    "step_over_floor: of a forward, floor: the sum over operations of the larger of bytes at the "
    "rate of a copy and FLOPs at that of a large product, both measured in the same run, experts "
    "counted; busy: time in which a kernel or copy runs, of a traced call, over the wall "
    "clock of the calls without the profiler; with_profiler: over that of the traced call."
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
    from sparda_jax.evaluation.block_diffusion_speed import Rates, SpeedPlan, speed_rows

    plan = SpeedPlan(
        arguments.model,
        arguments.contexts,
        arguments.batches,
        arguments.steps,
        arguments.repetitions,
    )
    rows = speed_rows(ModelConfig.preset(arguments.model), plan, Rates.measured())
    publish(arguments, rows, DIFFUSION_NOTES)


def add(commands: Commands, results: argparse.ArgumentParser) -> None:
    """Adds `diffusion-samples` and `diffusion-speed`."""
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
    command.add_argument("--repetitions", type=int, default=5, help="timed blocks of a request")
