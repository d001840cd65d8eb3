"""Decode of a large model through the engine, KV in host memory, at a stated hit rate.

Random weights and caches, made on the device, in a model's real shape. Random hidden states choose
blocks at random, which no text does, so the selection kernels run and what they chose is replaced
by a trace with the hit rate asked for. The caches of prefill are not computed but drawn. One
layer's pool stands for those of all layers: to pin all would take longer than the benchmark.

Beside every offloaded mode stand its parts, measured in the same run: the same program with a trace
that never misses, and a program of the same copies alone.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from host_offload import memory
from host_offload.fetch import ProgramFetcher
from host_offload.host_pool import HostPool, PoolLayer
from sparda_jax.config import EngineConfig, ModelConfig, SamplingParams, SparseConfig
from sparda_jax.engine.choosers import Chooser
from sparda_jax.engine.generate import Engine
from sparda_jax.engine.plan import BatchPlan
from sparda_jax.engine.programs import Program
from sparda_jax.engine.state import (
    DecodeState,
    Misses,
    SamplingState,
    SparseCache,
    sampling_fields,
)
from sparda_jax.evaluation.decode_traces import (
    EveryBlock,
    Traced,
    Workload,
    make_trace,
)
from sparda_jax.evaluation.kernel_benchmarks.harness import Row, Session, Timing
from sparda_jax.forecast.projection import Forecast
from sparda_jax.models.decoder import Decoder
from sparda_jax.sparse.infinigen import InfiniGen

# Bytes a second that the host link gives to large copies (an H200 on PCIe 5 x16); taken, not
# measured here.
HOST_LINK = 53e9
# (name, engine settings)
MODES: dict[str, dict[str, Any]] = {
    "dense_resident": {"mode": "sparse", "offload": "none"},
    "sparse_resident": {"mode": "sparse", "offload": "none"},
    "sparse_offload": {"mode": "sparse", "offload": "host"},
    "infinigen": {"mode": "infinigen", "offload": "host"},
    "sparda_no_prefetch": {"mode": "sparda", "offload": "host", "prefetch": False},
    "sparda": {"mode": "sparda", "offload": "host"},
    "sparda_placed": {"mode": "sparda", "offload": "auto"},
    "sparda_int8": {"mode": "sparda", "offload": "host", "host_kv_dtype": "int8"},
    "sparda_fp8": {"mode": "sparda", "offload": "host", "host_kv_dtype": "float8_e4m3fn"},
}


def rows(
    model_config: ModelConfig,
    sparse: SparseConfig,
    workloads: Sequence[Workload],
    modes: Sequence[str],
    *,
    prefix: str,
    device_kv_bytes: int | None = None,
    trace: pathlib.Path | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Iterator[Row]:
    """One row for every workload and mode: tokens a second, after a call that fills the slots.

    Args:
      model_config: shape of the model.
      sparse: selection rules.
      workloads: what is decoded; those that differ in the hit rate alone share their programs.
      modes: names in `MODES`.
      prefix: of the rows' names.
      device_kv_bytes: what KV may take on the device, for "sparda_placed".
      trace: folder for a timeline of one more call, a folder for every row; `perfetto_trace.json`
        shows compute and fetch side by side.
      report: told what is being done.

    Raises:
      ValueError: a context without room for the free blocks.
    """
    for workload in workloads:
        room = workload.context // sparse.geometry.block_size - sparse.local_blocks
        if room - sparse.init_blocks < 2 * (sparse.budget_blocks - sparse.forced_blocks):
            raise ValueError(f"a context of {workload.context} tokens is too short for this policy")
    bench = Bench(model_config, sparse, device_kv_bytes, report)
    for workload in workloads:
        for mode in modes:
            yield bench.row(prefix, workload, mode, trace)


class Bench:
    """One model's weights, and the engines that decode with them.

    Args:
      model_config: shape of the model.
      sparse: selection rules.
      device_kv_bytes: what KV may take on the device, for "sparda_placed".
      report: told what is being done.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        sparse: SparseConfig,
        device_kv_bytes: int | None,
        report: Callable[[str], None],
    ):
        self.sparse, self.report, self._budget = sparse, report, device_kv_bytes
        self.model = Decoder.random(model_config, dtype=jnp.bfloat16)
        self._bandwidth = Session().copy_bandwidth
        self._engines: dict[tuple, Engine] = {}
        self._runs: dict[tuple, Run] = {}

    def engine(self, workload: Workload, mode: str) -> Engine:
        """The engine of a mode; workloads of one context share it and its programs."""
        key = (mode, workload.context, workload.steps)
        if key not in self._engines:
            settings, shape = MODES[mode], self.model.config
            config = EngineConfig(
                steps_per_call=workload.steps_per_call,
                max_length=workload.context + workload.steps,
                device_kv_bytes=self._budget if settings["offload"] == "auto" else None,
                **settings,
            )
            forecast = infinigen = None
            if config.mode == "sparda":
                forecast = Forecast.random(shape, dtype=jnp.bfloat16)
            if config.mode == "infinigen":
                eye = jnp.eye(shape.head_dim, shape.head_dim // 4)
                skew = jnp.broadcast_to(eye, (shape.num_kv_heads, *eye.shape))
                infinigen = InfiniGen((skew,) * shape.num_layers)
            sparse = self.sparse
            if mode == "dense_resident":
                sparse = sparse.with_all_blocks(workload.context + workload.steps)
            # One mode at a time: their caches together exceed the device.
            self._engines = {
                key: Engine(
                    self.model, sparse=sparse, config=config, forecast=forecast, infinigen=infinigen
                )
            }
        return self._engines[key]

    def _run_of(self, engine: Engine, workload: Workload, mode: str) -> Run:
        """The run of a mode; workloads that differ in the hit rate alone share it."""
        key = (mode, dataclasses.replace(workload, hit_rate=0.0))
        if key not in self._runs:
            self._runs = {}  # frees the last one's pool
            self._runs = {key: Run(engine, workload, mode, self.report)}
        return self._runs[key]

    def row(
        self, prefix: str, workload: Workload, mode: str, trace: pathlib.Path | None = None
    ) -> Row:
        """Measures one mode."""
        engine = self.engine(workload, mode)
        name = (
            f"{prefix}/{workload.context // 1024}K/B{workload.batch}/hit{workload.hit_rate}/{mode}"
        )
        run = self._run_of(engine, workload, mode)
        decode = run(workload.hit_rate, None if trace is None else trace / name)
        plan, batch = run.plan, workload.batch
        weights = memory.tree_bytes(engine.parameters.arrays)
        # What a step reads of the device's memory, at least.
        cached = plan.batch * engine.model.config.num_layers * run.step_bytes
        floor = (weights + cached) / self._bandwidth
        details = {
            "ms_per_step": decode.milliseconds,
            "hit_rate": decode.hit_rate,
            "moved_mb_per_step": decode.moved * 1e-6,
            "moved_gb_per_s": decode.moved / decode.milliseconds * 1e-6,
            "device_kv_gib": plan.device_kv_bytes / 2**30,
            "device_gib": (plan.device_kv_bytes + weights) / 2**30,
            "host_kv_gib": plan.host_kv_bytes / 2**30,
        }
        if plan.slots:
            alone = run.compute_alone, run.fetch_alone(decode.moved)
            details["compute_alone_ms"], details["fetch_alone_ms"] = alone
            details["over_the_larger"] = decode.milliseconds / max(alone)
        roofline = 1e3 * max(floor, decode.moved / HOST_LINK)
        timing = Timing.of([1e3 * batch / each for each in decode.times])
        told = ", ".join(f"{key} {value:.4g}" for key, value in details.items())
        self.report(f"{name}: {timing.median:.0f} tok/s, {told}")
        share = roofline / decode.milliseconds
        return Row(name, timing, "tok/s", "higher", of_roofline=share, details=details)


@dataclasses.dataclass(frozen=True)
class Decoded:
    """What the timed calls did.

    Attributes:
      times: milliseconds a step of every call.
      hit_rate: of the free blocks.
      moved: bytes fetched a step.
    """

    times: list[float]
    hit_rate: float
    moved: float

    @property
    def milliseconds(self) -> float:
        """Median of a step."""
        return statistics.median(self.times)


class Run:
    """One mode of one workload: its pool, and calls from a state of its own each time.

    Attributes:
      plan: sizes of the batch.
      step_bytes: of one sequence and layer that a step reads: what it attends, and the keys scored.
    """

    def __init__(
        self, engine: Engine, workload: Workload, mode: str, report: Callable[[str], None]
    ):
        self._engine, self._workload, self._mode, self._report = engine, workload, mode, report
        prompt = [0] * workload.context
        request = SamplingParams(max_new_tokens=workload.steps)
        self.plan: BatchPlan = engine.prepare([prompt] * workload.batch, request).plan
        config, size = engine.model.config, engine.sparse.geometry.block_size
        row = config.num_kv_heads * config.head_dim * engine.model.dtype.itemsize
        scored = (
            0
            if mode == "dense_resident"
            else engine.sparse.geometry.num_compressed(workload.context)
        )
        self.step_bytes = (2 * (self.plan.selected + 1) * size + scored) * row
        self._pool: tuple[PoolLayer | None, ...] | None = None
        if self.plan.slots:
            resident, stored = self.plan.resident_layers, engine.config.host_kv_dtype
            one = HostPool(1, engine.device, dtype=None if stored == "model" else stored)
            one.store_layer(0, _random_blocks(engine, self.plan, self.plan.num_blocks, seed=1))
            layers = jax.block_until_ready(one.layers) * (config.num_layers - resident)
            self._pool = (*(None,) * resident, *layers)

    def __call__(self, hit_rate: float, trace: pathlib.Path | None = None) -> Decoded:
        """Decodes at a hit rate; the first call, which fills the slots, is not timed.

        With `trace` one more call is recorded.
        """
        engine, workload = self._engine, dataclasses.replace(self._workload, hit_rate=hit_rate)
        state = _state(engine, self.plan, workload)
        program = engine.decode_program(self.plan.num_blocks)
        arguments = engine.parameters.arrays, engine.rope, self._pool
        choosers = self._choosers(workload)
        start = time.perf_counter()
        program.compile(*arguments, state, choosers)
        self._report(f"compiled in {time.perf_counter() - start:.1f} s")
        times, free, hits, fetched = [], 0, 0, 0
        for call in range(workload.calls + 1):
            start = time.perf_counter()
            state, outputs = program(*arguments, state, choosers)
            outputs = jax.device_get(outputs)
            seconds = time.perf_counter() - start
            assert outputs.emitted.all(), "a row stopped or met logits that are not finite"
            if call:
                times.append(1e3 * seconds / workload.steps_per_call)
                free, hits = free + outputs.free.sum(), hits + outputs.hits.sum()
                fetched += outputs.fetched.sum()
        if trace is not None:
            with jax.profiler.trace(str(trace), create_perfetto_trace=True):
                jax.block_until_ready(program(*arguments, state, choosers))
        moved = fetched * engine.run_bytes / (workload.calls * workload.steps_per_call)
        return Decoded(times, hits / free, moved)

    @functools.cached_property
    def compute_alone(self) -> float:
        """Milliseconds of a step that misses nothing."""
        return self(1.0).milliseconds

    def _choosers(self, workload: Workload) -> tuple[Chooser, ...]:
        engine = self._engine
        if self._mode == "dense_resident":
            return (EveryBlock(),) * len(engine.layers)
        heads = engine.model.config.num_kv_heads
        trace = make_trace(workload, engine.sparse, heads, np.random.default_rng(0))
        shared = engine.put((trace, np.int32(workload.context)))
        return tuple(Traced(each, *shared) for each in engine.choosers)

    def fetch_alone(self, moved: float) -> float:
        """Milliseconds of a step's copies: `moved` bytes in all, one layer after the other."""
        engine, plan, pool = self._engine, self.plan, self._pool
        assert pool is not None
        layers = len(pool) - plan.resident_layers
        count = round(moved / engine.run_bytes / layers)
        if count == 0:
            return 0.0
        rng = np.random.default_rng(3)
        pairs = plan.batch * engine.model.config.num_kv_heads
        source = rng.permutation(pairs * plan.num_blocks)[:count].astype(np.int32)
        target = rng.permutation(pairs * plan.slots)[:count].astype(np.int32)
        lists = engine.put((source, target, np.int32(count)))
        slots = _random_blocks(engine, plan, plan.slots, seed=4)
        steps = self._workload.steps_per_call
        program = Program(functools.partial(_fetches, layers * steps), donate=(1,))
        slots = program(pool[-1], slots, *lists)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            slots = program(pool[-1], slots, *lists).block_until_ready()
            times.append(1e3 * (time.perf_counter() - start) / steps)
        return statistics.median(times)


def _fetches(
    times: int, pool: PoolLayer, slots: Array, source: Array, target: Array, count: Array
) -> Array:
    fetcher = ProgramFetcher((pool,))

    def one(_: Array, slots: Array) -> Array:
        return fetcher.fetch(0, slots, source, target, count)

    return jax.lax.fori_loop(0, times, one, slots)


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
        offloaded = seed >= plan.resident_layers
        held = plan.slots if offloaded else plan.num_blocks
        blocks = _random_blocks(engine, plan, held, seed=seed)
        empty = jnp.full(blocks.shape[:3], -1, jnp.int32) if offloaded else None
        partial = None
        if engine.config.mode == "infinigen" and seed:
            few = (batch, heads, plan.num_blocks * geometry.block_size, config.head_dim // 4)
            partial = draw(jax.random.key(3000 + seed), few, dtype)
        count = int(geometry.num_compressed(plan.num_blocks * geometry.block_size))
        key = jax.random.key(1000 + seed)
        runs = jnp.zeros(batch * heads * plan.selected, jnp.int32)
        misses = None if empty is None else Misses(runs, jnp.array(runs), jnp.zeros((), jnp.int32))
        return SparseCache(
            blocks,
            empty,
            None if empty is None else jnp.array(empty),  # donated apart
            misses,
            _random_blocks(engine, plan, 2, seed=2000 + seed),
            draw(key, (batch, heads, geometry.kernel_size, config.head_dim), dtype),
            draw(key, (batch, heads, count, config.head_dim), dtype),
            partial,
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
