"""Caches of a decode state, drawn in place of computed ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from sparda_jax.config import SamplingParams
from sparda_jax.engine.generate import Engine
from sparda_jax.engine.plan import BatchPlan
from sparda_jax.engine.state import (
    DecodeState,
    Misses,
    SamplingState,
    SparseCache,
    sampling_fields,
)
from sparda_jax.evaluation.decode_traces import Workload


def random_blocks(engine: Engine, plan: BatchPlan, count: int, *, seed: int) -> jax.Array:
    """Blocks `[B, K, count, 2, P, H]` of KV, drawn on the device.

    Args:
      engine: whose shapes.
      plan: of the batch.
      count: blocks a sequence.
      seed: of the draw.
    """
    config, size = engine.model.config, engine.sparse.geometry.block_size
    shape = (plan.batch, config.num_kv_heads, count, 2, size, config.head_dim)
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    return draw(jax.random.key(seed), shape, engine.model.dtype)


def random_state(engine: Engine, plan: BatchPlan, workload: Workload) -> DecodeState:
    """As prefill would leave it, but with random keys and values, and slots that are empty.

    Args:
      engine: whose shapes.
      plan: of the batch.
      workload: what is decoded.
    """
    config, geometry = engine.model.config, engine.sparse.geometry
    batch, heads, dtype = plan.batch, config.num_kv_heads, engine.model.dtype
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))

    def layer(seed: int) -> SparseCache:
        offloaded = seed >= plan.resident_layers
        held = plan.slots if offloaded else plan.num_blocks
        blocks = random_blocks(engine, plan, held, seed=seed)
        empty = jnp.full(blocks.shape[:3], -1, jnp.int32) if offloaded else None
        partial = None
        if engine.partial_channels and seed:
            few = (batch, heads, plan.num_blocks * geometry.block_size, engine.partial_channels)
            partial = draw(jax.random.key(3000 + seed), few, dtype)
        bias = None
        if config.kv_importance:
            tokens = (batch, heads, plan.num_blocks, geometry.block_size)
            bias = draw(jax.random.key(4000 + seed), tokens, jnp.dtype(jnp.float32))
        count = int(geometry.num_compressed(plan.num_blocks * geometry.block_size))
        key = jax.random.key(1000 + seed)
        runs = jnp.zeros(batch * heads * plan.selected, jnp.int32)
        misses = None if empty is None else Misses(runs, jnp.array(runs), jnp.zeros((), jnp.int32))
        return SparseCache(
            blocks,
            empty,
            None if empty is None else jnp.array(empty),  # donated apart
            misses,
            random_blocks(engine, plan, 2, seed=2000 + seed),
            draw(key, (batch, heads, geometry.kernel_size, config.head_dim), dtype),
            draw(key, (batch, heads, count, config.head_dim), dtype),
            partial,
            bias,
        )

    requests = [SamplingParams(max_new_tokens=workload.steps)] * batch
    fields = {
        "lengths": np.full(batch, workload.context, np.int32),
        "last_token": np.arange(batch, dtype=np.int32),
        "active": np.ones(batch, bool),
        "failed": np.zeros(batch, bool),
        "remaining": np.full(batch, workload.steps, np.int32),
    }
    return DecodeState(
        sampling=SamplingState(**engine.put(sampling_fields(requests))),
        layers=tuple(layer(index) for index in range(config.num_layers)),
        **engine.put(fields),
    )
