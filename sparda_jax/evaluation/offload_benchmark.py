"""Decode of a large model through the engine, KV in host memory, at a stated hit rate.

Random weights and caches, made on the device, in a model's real shape. Random hidden states choose
blocks at random, which no text does, so the selection kernels run and what they chose is replaced
by a trace with the hit rate asked for. The caches of prefill are not computed but drawn. One
layer's pool stands for those of all layers: to pin all would take longer than the benchmark.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from host_offload import memory
from pallas_kernels.block_selection import Selection
from sparda_jax.config import EngineConfig, ModelConfig, SamplingParams, SparseConfig
from sparda_jax.engine.choosers import Chooser
from sparda_jax.engine.generate import Engine
from sparda_jax.engine.plan import BatchPlan
from sparda_jax.engine.state import (
    DecodeState,
    SamplingState,
    SparseCache,
    Step,
    sampling_fields,
)
from sparda_jax.evaluation.kernel_benchmarks.harness import Row, Timing
from sparda_jax.forecast.projection import Forecast
from sparda_jax.models.decoder import Decoder

STEPS_PER_CALL = 32
# (name, engine settings)
MODES: dict[str, dict[str, Any]] = {
    "sparse_resident": {"mode": "sparse", "offload": "none"},
    "sparse_offload": {"mode": "sparse", "offload": "host"},
    "sparda_no_prefetch": {"mode": "sparda", "offload": "host", "prefetch": False},
    "sparda": {"mode": "sparda", "offload": "host"},
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is decoded.

    Attributes:
      context: tokens of every sequence at the first step.
      batch: sequences.
      hit_rate: share of the free blocks that the step before has selected too.
      calls: timed programs of `STEPS_PER_CALL` steps.
    """

    context: int
    batch: int
    hit_rate: float
    calls: int = 4

    @property
    def steps(self) -> int:
        """All steps, those of the first, untimed call included."""
        return (self.calls + 1) * STEPS_PER_CALL


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Traced:
    """Lets a chooser choose and answers with the trace.

    Attributes:
      chooser: the one whose work is timed.
      ids: blocks of every step.
      start: position of the first step.
    """

    chooser: Any
    ids: Int[Array, "U B K R"]
    start: Int[Array, ""]

    @property
    def ahead(self) -> bool:
        """As the chooser."""
        return self.chooser.ahead

    def append(
        self, cache: SparseCache, k: Float[Array, "B K H"], position: Int[Array, " B"]
    ) -> SparseCache:
        """As the chooser."""
        return self.chooser.append(cache, k, position)

    def choose(
        self,
        layer: Any,
        source: Array,
        cache: SparseCache,
        step: Step,
        sparse: SparseConfig,
        num_blocks: int,
    ) -> Selection:
        """The trace's blocks, once the chooser has chosen."""
        chosen = self.chooser.choose(layer, source, cache, step, sparse, num_blocks)
        ids = jax.lax.dynamic_index_in_dim(self.ids, step.position[0] - self.start, 0, False)
        # Zero, which the compiler cannot know: the trace has to wait for the selection.
        return Selection(ids[:, :, None] + jnp.minimum(chosen.count, 0)[..., None], chosen.count)


def make_trace(
    workload: Workload, sparse: SparseConfig, heads: int, rng: np.random.Generator
) -> Int[np.ndarray, "U B K R"]:
    """Selections, step by step, that keep `hit_rate` of the free blocks of the step before.

    Args:
      workload: context, batch, hit rate, steps.
      sparse: selection rules.
      heads: K.
      rng: for the choice of blocks.
    """
    size, free = sparse.geometry.block_size, sparse.budget_blocks - sparse.forced_blocks
    pairs = workload.batch * heads
    own = workload.context // size
    candidates = np.arange(sparse.init_blocks, own - sparse.local_blocks)
    order = np.stack([rng.permutation(candidates) for _ in range(pairs)])
    trace = np.empty((workload.steps, pairs, sparse.budget_blocks), np.int32)
    # A window moves over a permutation: what leaves it is replaced by blocks not seen for longest.
    moved = np.zeros(pairs)
    for step in range(workload.steps):
        first = moved.astype(np.int64)[:, None] + np.arange(free)
        current = (workload.context + step) // size
        forced = [
            *range(sparse.init_blocks),
            *range(current - sparse.local_blocks, current + 1),
        ]
        trace[step, :, : len(forced)] = forced
        trace[step, :, len(forced) :] = np.take_along_axis(order, first % len(candidates), axis=1)
        moved += free * (1 - workload.hit_rate)
    trace.sort(axis=2)
    return trace.reshape(workload.steps, workload.batch, heads, -1)


def rows(
    model_config: ModelConfig,
    sparse: SparseConfig,
    workload: Workload,
    modes: list[str],
    *,
    prefix: str,
    report: Callable[[str], None] = lambda _: None,
) -> Iterator[Row]:
    """One row a mode: milliseconds a step, after a call that fills the slots.

    Args:
      model_config: shape of the model.
      sparse: selection rules.
      workload: what is decoded.
      modes: names in `MODES`.
      prefix: of the rows' names.
      report: told what is being done.

    Raises:
      ValueError: a context without room for the free blocks.
    """
    room = workload.context // sparse.geometry.block_size - sparse.local_blocks
    if room - sparse.init_blocks < 2 * (sparse.budget_blocks - sparse.forced_blocks):
        raise ValueError(f"a context of {workload.context} tokens is too short for this policy")
    model = Decoder.random(model_config, dtype=jnp.bfloat16)
    forecast = Forecast.random(model_config, dtype=jnp.bfloat16)
    trace = make_trace(workload, sparse, model_config.num_kv_heads, np.random.default_rng(0))
    name = f"{prefix}/{workload.context // 1024}K/B{workload.batch}/hit{workload.hit_rate}"
    for mode in modes:
        config = EngineConfig(
            steps_per_call=STEPS_PER_CALL,
            max_length=workload.context + workload.steps,
            **MODES[mode],
        )
        weights = forecast if config.mode == "sparda" else None
        engine = Engine(model, sparse=sparse, config=config, forecast=weights)
        times, hit_rate, moved = _decode(engine, workload, trace, report)
        low, high = min(times), max(times)
        timing = Timing(statistics.median(times), (low, high), len(times))
        report(
            f"{name}/{mode}: {timing.median:.2f} ms a step, "
            f"{1e3 * workload.batch / timing.median:.0f} tok/s, hit rate {hit_rate:.3f}, "
            f"{moved / timing.median * 1e-6:.1f} GB/s"
        )
        yield Row(f"{name}/{mode}", timing, "ms", "lower")
        del engine


def _decode(
    engine: Engine, workload: Workload, trace: np.ndarray, report: Callable[[str], None]
) -> tuple[list[float], float, float]:
    """Milliseconds a step of every timed call, hit rate, bytes fetched a step."""
    prompt = [0] * workload.context
    request = SamplingParams(max_new_tokens=workload.steps)
    plan = engine.prepare([prompt] * workload.batch, request).plan
    pool = None
    if plan.slots:
        layer = _random_blocks(engine, plan, plan.num_blocks, seed=1)
        pool = (jax.device_put(layer, memory.host_sharding(engine.device)),) * len(engine.layers)
        layer.delete()
    state = _state(engine, plan, workload)
    shared = engine.put((trace, np.int32(workload.context)))
    choosers: tuple[Chooser, ...] = tuple(Traced(each, *shared) for each in engine.choosers)
    program = engine.decode_program(plan.num_blocks)
    arguments = engine.parameters.arrays, engine.rope, pool
    start = time.perf_counter()
    program.compile(*arguments, state, choosers)
    report(f"compiled in {time.perf_counter() - start:.1f} s")
    times, free, hits, fetched = [], 0, 0, 0
    for call in range(workload.calls + 1):
        start = time.perf_counter()
        state, outputs = program(*arguments, state, choosers)
        outputs = jax.device_get(outputs)
        seconds = time.perf_counter() - start
        assert outputs.emitted.all(), "a row stopped or met logits that are not finite"
        if call:
            times.append(1e3 * seconds / STEPS_PER_CALL)
            free, hits = free + outputs.free.sum(), hits + outputs.hits.sum()
            fetched += outputs.fetched.sum()
    config = engine.model.config
    run = 2 * engine.sparse.geometry.block_size * config.head_dim * engine.model.dtype.itemsize
    return times, hits / free, fetched * run / (workload.calls * STEPS_PER_CALL)


def _random_blocks(engine: Engine, plan: BatchPlan, count: int, *, seed: int) -> jax.Array:
    config, size = engine.model.config, engine.sparse.geometry.block_size
    shape = (plan.batch, config.num_kv_heads, count, 2, size, config.head_dim)
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    return draw(jax.random.key(seed), shape, engine.model.dtype)


def _state(engine: Engine, plan: BatchPlan, workload: Workload) -> DecodeState:
    """As prefill would leave it, but with random keys and values, and slots that are empty."""
    config, geometry = engine.model.config, engine.sparse.geometry
    batch, heads, dtype = plan.batch, config.num_kv_heads, engine.model.dtype
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))

    def layer(seed: int) -> SparseCache:
        blocks = _random_blocks(engine, plan, plan.slots or plan.num_blocks, seed=seed)
        empty = jnp.full(blocks.shape[:3], -1, jnp.int32) if plan.slots else None
        count = int(geometry.num_compressed(plan.num_blocks * geometry.block_size))
        key = jax.random.key(1000 + seed)
        return SparseCache(
            blocks,
            empty,
            None if empty is None else jnp.array(empty),  # donated apart
            _random_blocks(engine, plan, 2, seed=2000 + seed),
            draw(key, (batch, heads, geometry.kernel_size, config.head_dim), dtype),
            draw(key, (batch, heads, count, config.head_dim), dtype),
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
