"""The host's side of HERALD alone: how fast keys are read, scanned, and chosen rows gathered.

Everything runs through the classes that a generation uses, on a store of a few layers, large enough
that nothing stays in a cache. No model and no denoising: what is measured is the machine.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from host_offload import memory
from host_offload.cpu_selection import CpuSelector, SelectionRule
from host_offload.native_rows import Implementation, NativeRows
from host_offload.retrieval import Retrieval, Span
from host_offload.row_store import RowShape, RowStore, pinned_zeros
from sparda_jax.config import ModelConfig
from sparda_jax.evaluation.kernel_benchmarks.harness import Row, Timing
from sparda_jax.herald.config import Budget
from sparda_jax.herald.cost import Machine

# Of what the machine reads, the bytes that a scan must reach (issue: HERALD, selection).
SHARE_OF_READ = 0.85
_INIT, _BLOCK, _GRANULE = 16, 32, 64


@dataclasses.dataclass(frozen=True)
class HostPlan:
    """What is measured.

    Attributes:
        context: S, rows of each request.
        batch: B requests.
        layers: of the store.
        workers: numbers of threads; the best scan is kept for what comes after.
        runs: rows chosen together.
        share: of the rows that are chosen.
        implementations: of the choice and the gather; see `host_offload.native_rows`.
        repetitions: of every figure; more than one, the first warms up.
    """

    context: int = 32768
    batch: int = 6
    layers: int = 4
    workers: tuple[int, ...] = (8, 16, 32)
    runs: tuple[int, ...] = (1, 4, 8, 16)
    share: float = 0.05
    implementations: tuple[Implementation, ...] = ("portable", "native")
    repetitions: int = 4


class _Host:
    """A filled store and what is done to it."""

    def __init__(self, model: ModelConfig, plan: HostPlan):
        self.plan, self.device = plan, jax.devices()[0]
        self.queries = model.num_heads // model.num_kv_heads
        heads, width = model.num_kv_heads, model.head_dim
        self.shape = RowShape(
            plan.layers, plan.batch, heads, plan.context, width, jnp.dtype("bfloat16"), True
        )
        self.store = RowStore(self.shape, self.device)
        self._fill()

    def _fill(self) -> None:
        shape = self.shape
        size = (1, shape.heads, 2, shape.capacity, shape.width)
        draw = jax.jit(lambda key: jax.random.normal(key, size, shape.dtype))
        with self.retrieval(1, 4, quantised=False) as retrieval:
            for row in range(shape.batch):
                keys = jax.random.split(jax.random.key(row), shape.layers)
                retrieval.commit([draw(key) for key in keys], [(0, row, 0)])
                retrieval.settle()

    def retrieval(
        self, run: int, workers: int, *, quantised: bool, implementation: Implementation = "auto"
    ) -> Retrieval:
        selector = CpuSelector(SelectionRule(run=run), self.shape.width**-0.5)
        rows = -(-self.count(run) // _GRANULE) * _GRANULE
        return Retrieval(
            self.store,
            selector,
            rows,
            _GRANULE,
            self.device,
            workers=workers,
            quantised=quantised,
            implementation=implementation,
        )

    def native(self, run: int, *, quantised: bool) -> NativeRows:
        return NativeRows(self.store, SelectionRule(run=run), self.shape.width**-0.5, quantised)

    def count(self, run: int) -> int:
        return Budget(self.plan.share).count(self._end() - _INIT, run)

    def _end(self) -> int:
        return self.plan.context - _BLOCK

    def spans(self, run: int) -> list[Span]:
        count = self.count(run)
        return [Span(row, _INIT, self._end(), count) for row in range(self.shape.batch)]

    def draw_queries(self) -> jax.Array:
        size = (self.shape.batch, self.shape.heads, self.queries, self.shape.width)
        return jax.random.normal(jax.random.key(1), size, jnp.bfloat16)

    def key_bytes(self, quantised: bool) -> int:
        """Of the whole store."""
        shape = self.shape
        rows = shape.layers * shape.batch * shape.heads * shape.capacity
        return rows * shape.width * (1 if quantised else 2)

    def timed(self, work: Callable[[int, int], object], workers: int) -> list[float]:
        """Seconds in which some threads do a thing for every (layer, request)."""
        every = [(n, row) for n in range(self.shape.layers) for row in range(self.shape.batch)]
        times = []
        with ThreadPoolExecutor(workers) as pool:
            for _ in range(self.plan.repetitions):
                begun = time.perf_counter()
                list(pool.map(lambda place: work(*place), every))
                times.append(time.perf_counter() - begun)
        return times[1:]


def rows(model: ModelConfig, plan: HostPlan, prefix: str) -> Iterator[Row]:
    """Reads, scans, gathers and whole retrievals.

    Args:
        model: its KV heads, their width and group.
        plan: sizes.
        prefix: of the rows' names.
    """
    host = _Host(model, plan)

    def rate(name: str, size: float, times: list[float], read: float | None = None) -> Row:
        speeds = Timing.of([size / seconds / 1e9 for seconds in times])
        target, share = (SHARE_OF_READ * read, speeds.median / read) if read else (None, None)
        return Row(f"{prefix}/{name}", speeds, "GB/s", "higher", target=target, of_roofline=share)

    read = 0.0
    for workers in plan.workers:
        view = lambda n, row: host.store.key_view(n, row).view(np.uint64).reshape(-1).sum()
        row = rate(f"read/threads{workers}", host.key_bytes(False), host.timed(view, workers))
        read = max(read, row.timing.median)
        yield row
    for made in plan.implementations:
        best: dict[bool, tuple[float, int]] = {}
        for quantised in (False, True):
            kind, size = "int8" if quantised else "bf16", host.key_bytes(quantised)
            for workers in plan.workers:
                times = _scan(host, workers, quantised, made)
                row = rate(f"scan/{kind}/{made}/threads{workers}", size, times, read)
                best[quantised] = max(best.get(quantised, (0.0, 0)), (row.timing.median, workers))
                yield row
            workers = best[quantised][1]
            with _Copies(host) as copied:
                times = _scan(host, workers, quantised, made)
                beside = copied()
            row = rate(f"scan_beside_copies/{kind}/{made}/threads{workers}", size, times, read)
            yield dataclasses.replace(row, details={"copies_gb_s": beside / 1e9})
        for run in plan.runs:
            workers = best[False][1]
            yield rate(
                f"gather/run{run}/{made}/threads{workers}", *_gather(host, run, workers, made)
            )
        for quantised in (False, True):
            for run in plan.runs:
                yield from _whole(host, run, best[quantised][1], quantised, made, prefix)


def _scan(
    host: _Host, workers: int, quantised: bool, implementation: Implementation
) -> list[float]:
    """Scores of all rows; the compiled code chooses, too."""
    selector = CpuSelector(SelectionRule(), host.shape.width**-0.5)
    queries = np.asarray(host.draw_queries())
    span = host.spans(1)[0]
    native = host.native(1, quantised=quantised) if implementation == "native" else None

    def scan(layer: int, row: int) -> None:
        if native is not None:
            native.choose((layer, row), queries[row], (span.first, span.end, span.count))
        elif quantised:
            small = host.store.quantised_keys(layer, row)
            selector.scores_quantised(*small, queries[row], span.first, span.end)
        else:
            whole = host.store.keys(layer, row)
            selector.scores(whole, queries[row], span.first, span.end)

    return host.timed(scan, workers)


def _gather(
    host: _Host, run: int, workers: int, implementation: Implementation
) -> tuple[float, list[float]]:
    """Bytes of the chosen keys and values, and the times."""
    rng, count, shape = np.random.default_rng(run), host.count(run), host.shape
    starts = [
        np.sort(rng.choice(shape.capacity // run, count // run, replace=False))
        for _ in range(shape.heads)
    ]
    ids = (np.stack(starts)[..., None] * run + np.arange(run)).reshape(shape.heads, -1)
    ids = np.ascontiguousarray(ids, np.int32)
    native = host.native(run, quantised=False) if implementation == "native" else None
    size = (shape.heads, 2, -(-count // _GRANULE) * _GRANULE, shape.width)
    places = threading.local()

    def gather(layer: int, row: int) -> None:
        if not hasattr(places, "out"):
            places.array = pinned_zeros(size, shape.dtype, host.device)  # the view does not keep it
            places.out = memory.host_view(places.array)
        if native is not None:
            native.gather((layer, row), ids, places.out, _GRANULE)
        else:
            host.store.gather(layer, row, ids, places.out, _GRANULE, run)

    moved = shape.layers * shape.batch * shape.heads * count * 2 * shape.width * 2
    return moved, host.timed(gather, workers)


def _whole(
    host: _Host, run: int, workers: int, quantised: bool, made: Implementation, prefix: str
) -> Iterator[Row]:
    """All layers through a `Retrieval`, as in a turn."""
    times, parts = [], {"scan": 0.0, "gather": 0.0, "copy": 0.0}
    with host.retrieval(run, workers, quantised=quantised, implementation=made) as retrieval:
        for turn in range(host.plan.repetitions):
            queries = jax.block_until_ready(host.draw_queries())
            begun = time.perf_counter()
            asked = [
                retrieval.request(layer, queries, host.spans(run))
                for layer in range(host.plan.layers)
            ]
            found = [future.result() for future in asked]
            if turn:
                times.append(time.perf_counter() - begun)
                for part in parts:
                    parts[part] += sum(layer.seconds[part] for layer in found)
    kind = "int8" if quantised else "bf16"
    each = host.plan.layers * host.plan.batch
    yield Row(
        f"{prefix}/retrieval/{kind}/{made}/run{run}/threads{workers}",
        Timing.of([1e3 * seconds / each for seconds in times]),
        "ms",
        "lower",
        details={
            "scanned_gb_s": host.key_bytes(quantised) / float(np.median(times)) / 1e9,
            "moved_gb_s": sum(layer.copied_bytes for layer in found)
            / float(np.median(times)) / 1e9,
            **{f"{part}_thread_ms": 1e3 * spent / each / len(times)
               for part, spent in parts.items()},
        },
    )  # fmt: skip


def measured(rows: Sequence[Mapping[str, Any]], machine: Machine) -> Machine:
    """A machine with the rates that the rows of a results file say, where they do.

    Args:
        rows: of a file of this benchmark.
        machine: for all other rates.
    """
    names = {"scan/bf16": "scan_rate", "scan/int8": "quantised_rate", "gather/run1": "gather_rate"}
    best: dict[str, float] = {}
    for row in rows:
        for part, name in names.items():
            if f"/{part}/" in row["name"]:
                best[name] = max(best.get(name, 0.0), 1e9 * row["median"])
    return dataclasses.replace(machine, **best)


class _Copies:
    """Copies from pinned memory to the device, one after the other, while the context lasts."""

    def __init__(self, host: _Host):
        self._source = pinned_zeros((64 << 20,), jnp.dtype("uint8"), host.device)
        self._place = memory.device_sharding(host.device)
        self._stop = threading.Event()
        self._count, self._begun = 0, 0.0
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            jax.device_put(self._source, self._place).block_until_ready()
            self._count += 1

    def __enter__(self) -> Callable[[], float]:
        self._begun = time.perf_counter()
        self._thread.start()
        return lambda: self._count * self._source.nbytes / (time.perf_counter() - self._begun)

    def __exit__(self, *args: object) -> None:
        self._stop.set()
        self._thread.join()
