"""Prefill of a large model through the engine, KV streaming to the host, random weights."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from host_offload import memory
from sparda_jax.config import EngineConfig, ModelConfig, SamplingParams, SparseConfig
from sparda_jax.engine.generate import Engine
from sparda_jax.evaluation.kernel_benchmarks.harness import Row, Timing
from sparda_jax.forecast.projection import Forecast
from sparda_jax.models.decoder import Decoder

# (name, engine settings); dense attends a whole layer at once, which is what cuDNN serves.
MODES: dict[str, dict[str, Any]] = {
    "sparda": {"mode": "sparda", "offload": "host"},
    "sparse": {"mode": "sparse", "offload": "host"},
    "dense": {"mode": "dense", "offload": "none"},
}


@dataclasses.dataclass(frozen=True)
class Prompts:
    """What is prefilled.

    Attributes:
      context: tokens of every prompt.
      batch: prompts.
      chunk: tokens of a chunk in the modes other than dense.
      repetitions: timed runs, after one that compiles and pins host memory.
    """

    context: int
    batch: int = 1
    chunk: int = 4096
    repetitions: int = 3


def rows(
    model_config: ModelConfig,
    sparse: SparseConfig,
    prompts: Prompts,
    modes: Sequence[str],
    *,
    prefix: str,
    report: Callable[[str], None] = lambda _: None,
) -> Iterator[Row]:
    """One row a mode, tokens a second.

    Args:
      model_config: shape of the model.
      sparse: selection rules.
      prompts: what is prefilled.
      modes: names in `MODES`.
      prefix: of the rows' names.
      report: told what is being done.
    """
    model = Decoder.random(model_config, dtype=jnp.bfloat16)
    tokens = np.random.default_rng(0).integers(
        0, model_config.vocab_size, (prompts.batch, prompts.context)
    )
    for mode in modes:
        whole = prompts.context if mode == "dense" else prompts.chunk
        config = EngineConfig(
            prefill_chunk=whole, max_length=prompts.context + prompts.chunk, **MODES[mode]
        )
        forecast = None
        if config.mode == "sparda":
            forecast = Forecast.random(model_config, dtype=jnp.bfloat16)
        engine = Engine(model, sparse=sparse, config=config, forecast=forecast)
        times, transient = [], 0
        for repetition in range(prompts.repetitions + 1):
            generation = engine.prepare(tokens.tolist(), SamplingParams(max_new_tokens=1))
            before = memory.tree_bytes(engine.parameters.arrays)
            start = time.perf_counter()
            generation.prefill()
            if generation.pool is not None:
                jax.block_until_ready(generation.pool.layers)
            done = generation.report
            seconds = time.perf_counter() - start - done.prefill_compile_seconds
            if repetition:
                times.append(done.prefill_tokens / seconds)
            stats = engine.device.memory_stats() or {}
            kept = before + done.device_kv_bytes
            transient = stats.get("peak_bytes_in_use", kept) - kept
            report(
                f"{mode}: {seconds:.2f} s, compiled in "
                f"{done.prefill_compile_seconds:.1f} s, peak over weights and KV "
                f"{memory.format_bytes(transient)}"
            )
            del generation
        timing = Timing.of(times)
        name = f"{prefix}/{prompts.context // 1024}K/B{prompts.batch}/{mode}"
        details = {"peak_over_weights_and_kv_gib": transient / 2**30, "chunk": float(whole)}
        yield Row(name, timing, "tok/s", "higher", details=details)
        del engine
