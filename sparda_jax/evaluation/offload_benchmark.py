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
import itertools
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from host_offload import memory
from host_offload.fetch import ProgramFetcher
from host_offload.host_pool import HostPool, PoolLayer
from sparda_jax.config import ModelConfig, SparseConfig
from sparda_jax.engine.choosers import Chooser
from sparda_jax.engine.generate import Engine
from sparda_jax.engine.plan import BatchPlan
from sparda_jax.engine.programs import Program
from sparda_jax.evaluation.decode_caches import random_blocks, random_state
from sparda_jax.evaluation.decode_modes import (
    MODES,
    engine_config,
    largest_batch,
    plan_of,
    sparse_config,
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


@dataclasses.dataclass(frozen=True)
class Memory:
    """What KV may take; where a batch is given, the host's is not checked: one layer is pinned.

    Attributes:
      device_kv_bytes: on the device, for "sparda_placed".
      hbm_caps: gigabytes of device memory, weights included; every mode is run with the largest
        batch under each, in place of the workloads' batches.
      host_kv_bytes: on the host, under a cap.
      whole_pool: pin every layer's pool, not one that stands for all.
    """

    device_kv_bytes: int | None = None
    hbm_caps: Sequence[float] = ()
    host_kv_bytes: int = 110 * 2**30
    whole_pool: bool = False


# Of a device under a cap: temporary buffers of a step, Forecast weights, RoPE table, the trace.
RESERVED_BYTES = 3 * 2**27


def rows(
    model_config: ModelConfig,
    sparse: SparseConfig,
    workloads: Sequence[Workload],
    modes: Sequence[str],
    *,
    prefix: str,
    limits: Memory,
    trace: pathlib.Path | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Iterator[Row]:
    """One row for every workload and mode: tokens a second, after a call that fills the slots.

    Args:
      model_config: shape of the model.
      sparse: selection rules.
      workloads: what is decoded; neighbours that differ in the hit rate alone share their programs,
        and have one row together in a mode that keeps all KV on the device.
      modes: names in `MODES`.
      prefix: of the rows' names.
      limits: of memory.
      trace: folder for a timeline of one more call of the first row; `perfetto_trace.json` shows
        compute and fetch side by side.
      report: told what is being done.

    Raises:
      ValueError: a context without room for the free blocks; a cap that holds no sequence.
    """
    for workload in workloads:
        room = workload.context // sparse.geometry.block_size - sparse.local_blocks
        if room - sparse.init_blocks < 2 * (sparse.budget_blocks - sparse.forced_blocks):
            raise ValueError(f"a context of {workload.context} tokens is too short for this policy")
    bench = Bench(model_config, sparse, limits, report)
    for cap in limits.hbm_caps or (None,):
        for _, group in itertools.groupby(workloads, _any_hit_rate):
            rates = list(group)
            for mode, workload in itertools.product(modes, rates):
                if MODES[mode]["offload"] != "none" or workload is rates[0]:
                    yield bench.row(prefix, workload, mode, trace, cap)
                    trace = None


def _any_hit_rate(workload: Workload) -> Workload:
    return dataclasses.replace(workload, hit_rate=0.0)


class Bench:
    """One model's weights, and the engines that decode with them.

    Args:
      model_config: shape of the model.
      sparse: selection rules.
      limits: of memory.
      report: told what is being done.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        sparse: SparseConfig,
        limits: Memory,
        report: Callable[[str], None],
    ):
        self.sparse, self.report, self.limits = sparse, report, limits
        self.model = Decoder.random(model_config, dtype=jnp.bfloat16)
        self._bandwidth = Session().copy_bandwidth
        self._engines: dict[tuple, Engine] = {}
        self._runs: dict[tuple, Run] = {}

    def engine(self, workload: Workload, mode: str, device_kv_bytes: int | None) -> Engine:
        """The engine of a mode; workloads of one context share it and its programs."""
        key = (mode, workload.context, workload.steps, device_kv_bytes)
        if key not in self._engines:
            config, shape = engine_config(workload, mode, device_kv_bytes), self.model.config
            forecast = infinigen = None
            if config.mode == "sparda":
                forecast = Forecast.random(shape, dtype=jnp.bfloat16)
            if config.mode == "infinigen":
                eye = jnp.eye(shape.head_dim, shape.head_dim // 4)
                skew = jnp.broadcast_to(eye, (shape.num_kv_heads, *eye.shape))
                infinigen = InfiniGen((skew,) * shape.num_layers)
            sparse = sparse_config(self.sparse, workload, mode)
            # One mode at a time: their caches together exceed the device.
            self._engines, self._runs = {}, {}
            self._engines = {
                key: Engine(
                    self.model, sparse=sparse, config=config, forecast=forecast, infinigen=infinigen
                )
            }
        return self._engines[key]

    def _run_of(self, engine: Engine, workload: Workload, mode: str) -> Run:
        """The run of a mode; workloads that differ in the hit rate alone share it."""
        key = (mode, engine.config, _any_hit_rate(workload))
        if key not in self._runs:
            self._runs = {}  # frees the last one's pool
            whole = self.limits.whole_pool
            self._runs = {key: Run(engine, workload, mode, self.report, whole_pool=whole)}
        return self._runs[key]

    def row(
        self,
        prefix: str,
        workload: Workload,
        mode: str,
        trace: pathlib.Path | None = None,
        cap: float | None = None,
    ) -> Row:
        """Measures one mode; with the largest batch under a cap (GB of device memory), if given."""
        budget, name = self.limits.device_kv_bytes, f"{prefix}/{workload.context // 1024}K"
        weights = memory.tree_bytes(nnx.state(self.model))
        if cap is not None:
            budget = int(cap * 1e9) - weights - RESERVED_BYTES
            batch = largest_batch(
                self.model.config, self.sparse, workload, mode, budget, self.limits.host_kv_bytes
            )
            workload, name = dataclasses.replace(workload, batch=batch), f"{name}/{cap:g}GB"
        engine = self.engine(workload, mode, budget)
        name += f"/B{workload.batch}"
        if engine.config.offload != "none":
            name += f"/hit{workload.hit_rate}"
        name += f"/{mode}"
        if self.limits.whole_pool:
            name += "/whole_pool"
        run = self._run_of(engine, workload, mode)
        decode = run(workload.hit_rate, None if trace is None else trace / name)
        plan, batch = run.plan, workload.batch
        # What a step reads of the device's memory, at least.
        cached = plan.batch * engine.model.config.num_layers * run.step_bytes
        floor = (weights + cached) / self._bandwidth
        details = {
            "ms_per_step": decode.milliseconds,
            "hit_rate": decode.hit_rate,
            "moved_mb_per_step": decode.moved * 1e-6,
            "moved_gb_per_s": decode.moved / decode.milliseconds * 1e-6,
            "device_kv_gib": plan.device_kv_bytes / 2**30,
            "weights_gib": weights / 2**30,
            "in_use_gib": decode.in_use / 2**30,
            "temporary_gib": decode.temporary / 2**30,
            "host_kv_gib": plan.host_kv_bytes / 2**30,
        }
        if cap is not None:
            details["hbm_cap_gb"] = cap
        if plan.slots:
            details["resident_layers"] = float(plan.resident_layers)
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
      in_use: bytes of the device's memory between two calls.
      temporary: bytes that a call needs besides.
    """

    times: list[float]
    hit_rate: float
    moved: float
    in_use: float
    temporary: float

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
        self,
        engine: Engine,
        workload: Workload,
        mode: str,
        report: Callable[[str], None],
        *,
        whole_pool: bool = False,
    ):
        self._engine, self._workload, self._mode, self._report = engine, workload, mode, report
        self.plan: BatchPlan = plan_of(engine.model.config, engine.sparse, engine.config, workload)
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
            self._pool = self._host_pool(config.num_layers, whole_pool)

    def _host_pool(self, layers: int, whole: bool) -> tuple[PoolLayer | None, ...]:
        """Drawn once for all layers; `whole`: in memory of each layer's own."""
        engine, plan = self._engine, self.plan
        offloaded = layers - plan.resident_layers
        pinned = offloaded if whole else 1
        needed = plan.host_kv_bytes // offloaded * pinned
        memory.check_host_budget(f"the KV of {pinned} layers", needed, None, engine.device)
        pool = HostPool(pinned, engine.device, dtype=engine.host_dtype)
        blocks, start = random_blocks(engine, plan, plan.num_blocks, seed=1), time.perf_counter()
        for index in range(pinned):
            pool.store_layer(index, blocks)
        held = jax.block_until_ready(pool.layers)
        seconds = time.perf_counter() - start
        self._report(f"{memory.format_bytes(pool.nbytes)} pinned in {seconds:.1f} s")
        return (*(None,) * plan.resident_layers, *held * (offloaded // pinned))

    def __call__(self, hit_rate: float, trace: pathlib.Path | None = None) -> Decoded:
        """Decodes at a hit rate; the first call, which fills the slots, is not timed.

        With `trace` one more call is recorded.
        """
        engine, workload = self._engine, dataclasses.replace(self._workload, hit_rate=hit_rate)
        state = random_state(engine, self.plan, workload)
        program = engine.decode_program(self.plan.num_blocks)
        arguments = engine.parameters.arrays, engine.rope, self._pool
        choosers = self._choosers(workload)
        start = time.perf_counter()
        compiled = program.compile(*arguments, state, choosers)
        self._report(f"compiled in {time.perf_counter() - start:.1f} s")
        # XLA says nothing of its memory on some back ends.
        temporary = getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0)
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
        in_use = (engine.device.memory_stats() or {}).get("bytes_in_use", 0)
        return Decoded(times, hits / free, moved, in_use, temporary)

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

    @functools.cached_property
    def _fetch_program(self) -> Program:
        layers = self._engine.model.config.num_layers - self.plan.resident_layers
        times = layers * self._workload.steps_per_call
        return Program(functools.partial(_fetches, times), donate=(1,))

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
        source = rng.permutation(pairs * plan.num_blocks)[: pairs * plan.slots].astype(np.int32)
        target = rng.permutation(pairs * plan.slots).astype(np.int32)
        lists = engine.put((source, target, np.int32(count)))
        slots = random_blocks(engine, plan, plan.slots, seed=4)
        steps = self._workload.steps_per_call
        program = self._fetch_program
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
