"""The host's side of HERALD: commits, scans, gathers and copies beside the device's work.

One coordinator takes jobs in the order they were given: "write these committed rows", "choose and
fetch the rows of this layer". A layer's requests are scanned and gathered by several workers; when
all are done one asynchronous copy takes the layer to the device. So rows that were committed before
a scan was asked for are there when it runs, and whoever asks waits for nothing until it needs the
result. The next layers are at work meanwhile, as many as there are staging buffers: some workers
wait for memory (a scan) while others choose and gather. (A row that is committed while a scan runs
lies behind all that the scan may choose from.)
"""

from __future__ import annotations

import dataclasses
import functools
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from host_offload import memory
from host_offload.cpu_selection import CpuSelector, quantise_rows
from host_offload.native_rows import Implementation, NativeRows, Parts, chosen
from host_offload.row_store import RowStore, pinned_zeros


@functools.partial(jax.jit, static_argnames=("copied", "quantised"))
def _for_host(
    kv: tuple[jax.Array, ...], *, copied: bool, quantised: bool
) -> tuple[tuple[jax.Array, ...] | None, tuple[Any, ...]]:
    """What a commit sends besides, or in place of, the rows themselves; of all layers at once."""
    own = tuple(jnp.array(layer, copy=True) for layer in kv) if copied else None
    small = tuple(quantise_rows(layer[:, :, 0]) if quantised else None for layer in kv)
    return own, small


# Layers at work at a time, at least; and requests' layers for each worker, so that none waits.
_LAYERS, _EACH = 4, 2


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
        seconds: by part, added up over workers: "scan" (with the choice), "gather"; "copy" and,
            for the query's arrival, "query".
        sending: on the clock of `time.perf_counter`, when the copy began.
        arrived: when it had ended.
        parts: of each request, on that clock.
    """

    kv: Float[Array, "B K 2 R H"]
    counts: np.ndarray
    ids: dict[int, np.ndarray]
    errors: dict[int, Exception]
    scanned_bytes: int
    copied_bytes: int
    seconds: dict[str, float]
    sending: float
    arrived: float
    parts: list[Parts]


def _tell(told: Future[Retrieved], work: Callable[..., None], *args: Any) -> None:
    """Does a step of a retrieval; what goes wrong is told to whoever waits for it."""
    try:
        work(*args)
    except Exception as error:
        told.set_exception(error)


class Staging:
    """Pinned buffers, each filled again only when its last copy has arrived.

    Where the device's memory is the host's (the CPU back end) a copy may hand out the buffer
    itself; every copy has a fresh one there.
    """

    def __init__(self, shape: tuple[int, ...], dtype: jnp.dtype, device: jax.Device, depth: int):
        self._place = memory.device_sharding(device)
        self._shared = device.platform == "cpu"
        self._arrays = [pinned_zeros(shape, dtype, device) for _ in range(depth)]
        self._views = [memory.host_view(array) for array in self._arrays]
        # Buffers that may be filled, each with the copy that was last made of it.
        self._free: queue.SimpleQueue[tuple[int, jax.Array | None]] = queue.SimpleQueue()
        for number in range(depth):
            self._free.put((number, None))

    @property
    def nbytes(self) -> int:
        """Bytes of one buffer."""
        return self._arrays[0].nbytes

    def take(self) -> tuple[int, np.ndarray]:
        """The number of a buffer to fill, and the buffer; waits until one is free."""
        number, sent = self._free.get()
        if sent is not None:
            sent.block_until_ready()
        return number, self._views[number]

    def send(self, number: int) -> jax.Array:
        """Starts the copy of a buffer that `take` gave."""
        source: Any = self._arrays[number]
        if self._shared:
            source = self._views[number].copy()
        sent = jax.device_put(source, self._place)
        self._free.put((number, sent))
        return sent


class Retrieval:
    """Runs the host's work for one batch; use it as a context, so that its threads end.

    With `quantised` the int8 keys are scanned, which the store must have. Rows are chosen and
    gathered by compiled code, or by numpy and XLA: `implementation`, see `native_rows`.

    Attributes:
        store: all committed rows.
        workers: threads that scan and gather.
        pinning_seconds: time that making the staging buffers took, once.
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
        quantised: bool = False,
        implementation: Implementation = "auto",
    ):
        self.store, self.workers, self._quantised = store, workers, quantised
        self._selector, self._device = selector, device
        self._native: NativeRows | None = None
        if chosen(implementation, selector.rule, store.shape.dtype, store.shape.width):
            self._native = NativeRows(store, selector.rule, selector.scale, quantised)
        self._granule = granule
        shape = (store.shape.batch, store.shape.heads, 2, rows, store.shape.width)
        depth = max(_LAYERS, -(-_EACH * workers // store.shape.batch))
        depth = min(depth, store.shape.layers)
        begun = time.perf_counter()
        self._staging = Staging(shape, store.shape.dtype, device, depth)
        self.pinning_seconds = time.perf_counter() - begun
        self._coordinator = ThreadPoolExecutor(1, "herald-coordinator")
        self._pool = ThreadPoolExecutor(workers, "herald-worker")
        self._sender = ThreadPoolExecutor(1, "herald-sender")
        self._commits: list[Future[int]] = []

    def close(self, *, wait: bool = True) -> None:
        """Drops jobs that have not begun and ends the threads.

        Args:
            wait: for jobs at work; not for one that hangs.
        """
        for pool in (self._coordinator, self._pool, self._sender):
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
        # On the CPU a "copy" to the host may be the array itself, which a program may donate.
        copied = self._device.platform == "cpu"
        own, small = _for_host(tuple(kv), copied=copied, quantised=self.store.shape.quantised)
        place = memory.host_sharding(self._device)
        parts, small = jax.device_put((own or tuple(kv), small), place)
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
        told: Future[Retrieved] = Future()
        self._coordinator.submit(_tell, told, self._retrieve, told, layer, there, list(spans))
        return told

    def _write(
        self, parts: tuple[jax.Array, ...], small: tuple[Any, ...], rows: list[tuple[int, int, int]]
    ) -> int:
        jobs = [
            self._pool.submit(self._write_layer, layer, kv, pair, rows)
            for layer, (kv, pair) in enumerate(zip(parts, small, strict=True))
        ]
        return sum(job.result() for job in jobs)

    def _write_layer(
        self, layer: int, kv: jax.Array, small: Any, rows: list[tuple[int, int, int]]
    ) -> int:
        written, view = 0, np.asarray(kv)
        keys = None if small is None else tuple(np.asarray(part) for part in small)
        for index, row, start in rows:
            own = None if keys is None else (keys[0][index], keys[1][index])
            self.store.write(layer, row, start, view[index], own)
            written += view[index].nbytes
        return written

    def _retrieve(
        self, told: Future[Retrieved], layer: int, queries: jax.Array, spans: list[Span]
    ) -> None:
        """Gives a layer's requests to the workers; the sender takes what they have filled."""
        asked = time.perf_counter()
        host_queries = np.asarray(queries)
        begun = time.perf_counter()
        number, buffer = self._staging.take()
        jobs = [
            self._pool.submit(self._fill, layer, span, host_queries[span.row], buffer[span.row])
            for span in spans
        ]
        self._sender.submit(_tell, told, self._send, told, number, spans, jobs, (asked, begun))

    def _send(
        self,
        told: Future[Retrieved],
        number: int,
        spans: list[Span],
        jobs: list[Future[tuple[np.ndarray, Parts]]],
        times: tuple[float, float],
    ) -> None:
        ids: dict[int, np.ndarray] = {}
        errors: dict[int, Exception] = {}
        parts: list[Parts] = []
        counts = np.zeros(self.store.shape.batch, np.int32)
        for span, job in zip(spans, jobs, strict=True):
            try:
                chosen, spent = job.result()
            except Exception as error:  # one request's failure is not the others'
                errors[span.row] = error
                continue
            ids[span.row], counts[span.row] = chosen, chosen.shape[1]
            parts.append(spent)
        sending = time.perf_counter()
        kv = self._staging.send(number).block_until_ready()
        arrived = time.perf_counter()
        seconds = {"query": times[1] - times[0], "copy": arrived - sending}
        seconds["scan"] = sum(chosen - began for began, chosen, _ in parts)
        seconds["gather"] = sum(gathered - chosen for _, chosen, gathered in parts)
        scanned = sum(map(self._scans, spans)) * self._scan_bytes()
        copied = self._staging.nbytes
        told.set_result(
            Retrieved(kv, counts, ids, errors, scanned, copied, seconds, sending, arrived, parts)
        )

    def _scans(self, span: Span) -> bool:
        """Whether keys must be read: not where all rows are wanted."""
        return span.count < span.end - span.first or self._selector.rule.coverage is not None

    def _scan_bytes(self) -> int:
        shape = self.store.shape
        size = 1 if self._quantised else jnp.dtype(shape.dtype).itemsize
        return shape.heads * shape.capacity * shape.width * size

    def _fill(
        self, layer: int, span: Span, queries: np.ndarray, out: np.ndarray
    ) -> tuple[np.ndarray, Parts]:
        if self._native is not None and self._scans(span):
            place = span.first, span.end, span.count
            return self._native.fetch((layer, span.row), queries, place, out, self._granule)
        clock = time.perf_counter
        started = clock()
        ids = self._select(layer, span, queries)
        chosen = clock()
        self.store.gather(layer, span.row, ids, out, self._granule, self._selector.rule.run)
        return ids, (started, chosen, clock())

    def _select(self, layer: int, span: Span, queries: np.ndarray) -> np.ndarray:
        store, place = self.store, (span.first, span.end, span.count)
        if not self._scans(span):
            every = np.arange(span.first, span.end, dtype=np.int32)
            return np.broadcast_to(every, (store.shape.heads, len(every)))
        if not self._quantised:
            return self._selector.select(store.keys(layer, span.row), queries, *place)
        small, scales = store.quantised_keys(layer, span.row)
        exact = store.key_view(layer, span.row)
        return self._selector.select_quantised(small, scales, exact, queries, *place)
