"""How missed blocks get from the host pool into device slots.

Every fetcher does the same thing, ``slots[target[i]] = pool[source[i]]`` for ``i < count``, over
runs of one (block, KV head) each. They differ in who drives the copy:

- `ProgramFetcher` is traced into the compiled decode program (no host round trip).
- `EagerFetcher` is driven by the host between two programs: the miss list comes to the host, rows
  are gathered into staging memory and sent by asynchronous `device_put`, double-buffered. It asks
  nothing of the compiler, and so is the path to compare the others with.
"""

from typing import Protocol

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from host_offload import memory
from host_offload.double_buffer import DoubleBuffer
from host_offload.host_pool import BlockPool, PoolLayer
from host_offload.quantise import dequantise
from pallas_kernels import block_fetch


def _as_runs(blocks: Array) -> Array:
    """[B, K, M, 2, P, H] -> [B*K*M, 2, P, H]."""
    return blocks.reshape(-1, *blocks.shape[3:])


class Fetcher(Protocol):
    """Brings missed blocks of one layer into its slots."""

    def fetch(
        self,
        layer: int,
        slots: Float[Array, "B K Z 2 P H"],
        source: Int[Array, " A"],
        target: Int[Array, " A"],
        count: Int[Array, ""],
        after: Array | None = None,
    ) -> Float[Array, "B K Z 2 P H"]:
        """Slots with runs ``target[i]`` replaced by pool runs ``source[i]``, for i < count.

        The copy begins once ``after`` is computed: the slots of the copy before.  Two at a time
        share the link, and the one that is needed first comes late.
        """
        ...


class ProgramFetcher:
    """Fetches inside a compiled program; the pool arrays are arguments of that program.

    Args:
      pool_layers: L host pools; None for a layer that nothing is fetched for.
    """

    def __init__(self, pool_layers: tuple[PoolLayer | None, ...]):
        self._pool = pool_layers

    def fetch(
        self,
        layer: int,
        slots: Float[Array, "B K Z 2 P H"],
        source: Int[Array, " A"],
        target: Int[Array, " A"],
        count: Int[Array, ""],
        after: Array | None = None,
    ) -> Float[Array, "B K Z 2 P H"]:
        """See `Fetcher.fetch`."""
        pool = self._pool[layer]
        assert pool is not None
        runs = block_fetch.fetch_blocks(
            _as_runs(pool.values),
            _as_runs(slots),
            source,
            target,
            count,
            pool_scales=None if pool.scales is None else pool.scales.reshape(-1, 2),
            after=after,
        )
        return runs.reshape(slots.shape)


def _insert(slots: Array, rows: Array, source: Array, target: Array, scales: Array | None) -> Array:
    """Puts ``rows[i]`` into slot run ``target[i]``; a target past the end is dropped."""
    if scales is not None:
        rows = dequantise(rows, scales.reshape(-1, 2)[source], slots.dtype)
    return _as_runs(slots).at[target].set(rows, mode="drop").reshape(slots.shape)


class EagerFetcher:
    """Fetches from the host side with double-buffered asynchronous `device_put`."""

    # Runs per transfer. One fixed size keeps the insert program compiled once; 32 runs of 32 KiB
    # are a megabyte, where a single copy reaches most of the PCIe rate.
    RUNS_PER_TRANSFER = 32

    def __init__(self, pool: BlockPool, device: jax.Device):
        self._pool = pool
        self._sharding = memory.device_sharding(device)
        self._insert = jax.jit(_insert, donate_argnums=0)
        self._staging: DoubleBuffer | None = None

    def fetch(
        self,
        layer: int,
        slots: Float[Array, "B K Z 2 P H"],
        source: Int[Array, " A"],
        target: Int[Array, " A"],
        count: Int[Array, ""],
        after: Array | None = None,
    ) -> Float[Array, "B K Z 2 P H"]:
        """See `Fetcher.fetch`; transfers go one after another anyway."""
        sources, targets, misses = jax.device_get((source, target, count))
        if misses == 0:
            return slots
        runs, stored = self._pool.view(layer), self._pool.layers[layer]
        scales = None if stored is None else stored.scales
        runs = runs.reshape(-1, *runs.shape[3:])
        if self._staging is None:
            self._staging = DoubleBuffer(
                (self.RUNS_PER_TRANSFER, *runs.shape[1:]), runs.dtype, self._sharding
            )
        step = self._staging.rows
        out_of_range = np.iinfo(np.int32).max
        for start in range(0, int(misses), step):
            stop = min(start + step, int(misses))
            rows = self._staging.send(runs, sources[start:stop])
            lists = np.stack([np.zeros(step, np.int32), np.full(step, out_of_range, np.int32)])
            lists[0, : stop - start] = sources[start:stop]
            lists[1, : stop - start] = targets[start:stop]
            origin, slot_runs = jax.device_put((lists[0], lists[1]), self._sharding)
            slots = self._insert(slots, rows, origin, slot_runs, scales)
        return slots


__all__ = ["EagerFetcher", "Fetcher", "ProgramFetcher"]
