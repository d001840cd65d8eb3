"""The host's side of HERALD: commits, scans, gathers and copies beside the device's work.

One coordinator takes jobs in the order they were given: "write these committed rows", "choose and
fetch the rows of this layer". A layer's requests are scanned and gathered by several workers; then
one asynchronous copy takes the layer to the device. So rows that were committed before a scan was
asked for are there when it runs, and whoever asks waits for nothing until it needs the result.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from host_offload import memory
from host_offload.cpu_selection import CpuSelector, quantise_rows
from host_offload.row_store import RowStore, pinned_zeros

_quantise = jax.jit(quantise_rows)


@dataclasses.dataclass(frozen=True)
class Span:
    """What is scanned for one request.

    Attributes:
        row: which request.
        first: first scanned row.
        end: the row after the last.
        count: rows to choose, at most.
    """

    row: int
    first: int
    end: int
    count: int


@dataclasses.dataclass
class Retrieved:
    """Chosen rows of one layer, on their way to the device.

    Attributes:
        kv: keys and values one after the other; rows past `counts` are stale.
        counts: `int32[B]`, rows chosen for each request.
        ids: of each request that was asked for, `int32[K, n]`.
        errors: by request, what went wrong with its selection.
        scanned_bytes: of keys.
        copied_bytes: host to device.
        seconds: by part, added up over workers: "scan", "gather"; of the coordinator: "copy" and,
            for the query's arrival, "query".
        begun: on the clock of `time.perf_counter`, when the query had arrived.
        ended: when the copy had been started.
    """

    kv: Float[Array, "B K 2 R H"]
    counts: np.ndarray
    ids: dict[int, np.ndarray]
    errors: dict[int, Exception]
    scanned_bytes: int
    copied_bytes: int
    seconds: dict[str, float]
    begun: float
    ended: float


class Staging:
    """A ring of pinned buffers, each written again only when its last copy has arrived.

    Where the device's memory is the host's (the CPU back end) a copy may hand out the buffer
    itself; every copy has a fresh one there.
    """

    def __init__(self, shape: tuple[int, ...], dtype: jnp.dtype, device: jax.Device, depth: int):
        self._place = memory.device_sharding(device)
        self._shared = device.platform == "cpu"
        self._arrays = [pinned_zeros(shape, dtype, device) for _ in range(depth)]
        self._views = [memory.host_view(array) for array in self._arrays]
        self._sent: list[jax.Array | None] = [None] * depth
        self._turn = 0

    @property
    def nbytes(self) -> int:
        """Bytes of one buffer."""
        return self._arrays[0].nbytes

    def next(self) -> np.ndarray:
        """The buffer to fill, once its last copy has arrived."""
        sent = self._sent[self._turn]
        if sent is not None:
            sent.block_until_ready()
        return self._views[self._turn]

    def send(self) -> jax.Array:
        """Starts the copy of the buffer that `next` gave."""
        source: Any = self._arrays[self._turn]
        if self._shared:
            source = self._views[self._turn].copy()
        sent = jax.device_put(source, self._place)
        self._sent[self._turn] = sent
        self._turn = (self._turn + 1) % len(self._sent)
        return sent


class Retrieval:
    """Runs the host's work for one batch; use it as a context, so that its threads end.

    Attributes:
        store: all committed rows.
        workers: threads that scan and gather.
    """

    def __init__(
        self,
        store: RowStore,
        selector: CpuSelector,
        rows: int,
        granule: int,
        device: jax.Device,
        *,
        workers: int,
        depth: int = 2,
    ):
        self.store, self.workers = store, workers
        self._selector, self._device = selector, device
        self._granule = granule
        shape = (store.shape.batch, store.shape.heads, 2, rows, store.shape.width)
        self._staging = Staging(shape, store.shape.dtype, device, depth)
        self._coordinator = ThreadPoolExecutor(1, "herald-coordinator")
        self._pool = ThreadPoolExecutor(workers, "herald-worker")
        self._commits: list[Future[int]] = []

    def close(self, *, wait: bool = True) -> None:
        """Drops jobs that have not begun and ends the threads.

        Args:
            wait: for jobs at work; not for one that hangs.
        """
        for pool in (self._coordinator, self._pool):
            pool.shutdown(wait=wait, cancel_futures=True)

    def __enter__(self) -> Retrieval:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def commit(
        self, kv: Sequence[Float[Array, "X K 2 T H"]], rows: Sequence[tuple[int, int, int]]
    ) -> None:
        """Writes rows to the store, once they are computed; returns at once.

        Args:
            kv: of each layer, on the device.
            rows: (index into X, request, position of the first row).
        """
        place = memory.host_sharding(self._device)
        if self._device.platform == "cpu":
            # There a "copy" to the host may be the array itself, which a program may donate.
            kv = [jnp.array(layer, copy=True) for layer in kv]
        parts: list[Any] = [jax.device_put(layer, place) for layer in kv]
        small: list[Any] = [None] * len(parts)
        if self.store.shape.quantised:
            small = [jax.device_put(_quantise(layer[:, :, 0]), place) for layer in kv]
        job = self._coordinator.submit(self._write, parts, small, list(rows))
        self._commits.append(job)

    def settle(self, timeout: float | None = None) -> int:
        """Waits for the commits so far; their bytes.

        Raises:
            Exception: what went wrong in one of them.
            TimeoutError: after so many seconds.
        """
        jobs, self._commits = self._commits, []
        return sum(job.result(timeout) for job in jobs)

    def request(
        self, layer: int, queries: Float[Array, "B K Q H"], spans: Sequence[Span]
    ) -> Future[Retrieved]:
        """Asks for the rows of one layer; returns at once.

        Args:
            layer: which.
            queries: computed or still being computed, on the device.
            spans: of the requests that need rows.
        """
        there = jax.device_put(queries, memory.host_sharding(self._device))
        return self._coordinator.submit(self._retrieve, layer, there, list(spans))

    def _write(
        self, parts: list[jax.Array], small: list[Any], rows: list[tuple[int, int, int]]
    ) -> int:
        written = 0
        for layer, (kv, pair) in enumerate(zip(parts, small, strict=True)):
            view = np.asarray(kv)
            keys = None if pair is None else tuple(np.asarray(part) for part in pair)
            for index, row, start in rows:
                own = None if keys is None else (keys[0][index], keys[1][index])
                self.store.write(layer, row, start, view[index], own)
                written += view[index].nbytes
        return written

    def _retrieve(self, layer: int, queries: jax.Array, spans: list[Span]) -> Retrieved:
        clock = time.perf_counter
        asked = clock()
        host_queries = np.asarray(queries)
        begun = clock()
        buffer = self._staging.next()
        jobs = [
            self._pool.submit(self._fill, layer, span, host_queries[span.row], buffer[span.row])
            for span in spans
        ]
        ids: dict[int, np.ndarray] = {}
        errors: dict[int, Exception] = {}
        seconds = {"query": begun - asked, "scan": 0.0, "gather": 0.0}
        counts = np.zeros(len(buffer), np.int32)
        for span, job in zip(spans, jobs, strict=True):
            try:
                chosen, scan, gather = job.result()
            except Exception as error:  # one request's failure is not the others'
                errors[span.row] = error
                continue
            ids[span.row], counts[span.row] = chosen, chosen.shape[1]
            seconds["scan"] += scan
            seconds["gather"] += gather
        filled = clock()
        kv = self._staging.send()
        seconds["copy"] = clock() - filled
        scanned = sum(map(self._scans, spans)) * self._scan_bytes()
        return Retrieved(
            kv, counts, ids, errors, scanned, self._staging.nbytes, seconds, begun, clock()
        )

    def _scans(self, span: Span) -> bool:
        """Whether keys must be read: not where all rows are wanted."""
        return span.count < span.end - span.first or self._selector.rule.coverage is not None

    def _scan_bytes(self) -> int:
        shape = self.store.shape
        size = 1 if shape.quantised else jnp.dtype(shape.dtype).itemsize
        return shape.heads * shape.capacity * shape.width * size

    def _fill(
        self, layer: int, span: Span, queries: np.ndarray, out: np.ndarray
    ) -> tuple[np.ndarray, float, float]:
        clock = time.perf_counter
        started = clock()
        ids = self._select(layer, span, queries)
        chosen = clock()
        self.store.gather(layer, span.row, ids, out, self._granule)
        return ids, chosen - started, clock() - chosen

    def _select(self, layer: int, span: Span, queries: np.ndarray) -> np.ndarray:
        store, place = self.store, (span.first, span.end, span.count)
        if not self._scans(span):
            every = np.arange(span.first, span.end, dtype=np.int32)
            return np.broadcast_to(every, (store.shape.heads, len(every)))
        if not store.shape.quantised:
            return self._selector.select(store.keys(layer, span.row), queries, *place)
        small, scales = store.quantised_keys(layer, span.row)
        exact = store.key_view(layer, span.row)
        return self._selector.select_quantised(small, scales, exact, queries, *place)
