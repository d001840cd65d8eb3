"""A host pool of pages: a sequence takes as many as it has blocks, and two may share some."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from host_offload import memory
from host_offload.host_pool import BlockPool, PoolLayer, filled_blocks, write_runs
from pallas_kernels import block_fetch


def page_runs(pages: Int[Array, " Q"], num_heads: int) -> Int[Array, "Q K"]:
    """Flat run index of each KV head's part of some pages; -1 stays -1."""
    runs = pages[:, None] * num_heads + jnp.arange(num_heads, dtype=jnp.int32)
    return jnp.where(pages[:, None] < 0, -1, runs)


def write_pages(
    pool: PoolLayer, kv: Float[Array, "1 K M 2 P H"], first: Int[Array, ""], pages: Int[Array, " Q"]
) -> PoolLayer:
    """The layer with some blocks of one sequence; for programs, as `read_pages`.

    Args:
      pool: a layer of a `PagedPool`; in place where donated.
      kv: all blocks of the sequence, on the device.
      first: the first of those that `pages` tells of; at most M - Q.
      pages: where each goes; -1: nowhere.
    """
    some = jax.lax.dynamic_slice_in_dim(kv, first, pages.shape[0], axis=2)
    runs = page_runs(pages, kv.shape[1]).T  # as the blocks lie
    return write_runs(pool, some.reshape(-1, *kv.shape[3:]), runs.reshape(-1))


def _write_tail(
    pool: PoolLayer,
    tail: Float[Array, "B K 2 2 P H"],
    targets: Int[Array, " B"],
    pages: Int[Array, " B"],
) -> PoolLayer:
    runs = page_runs(pages, tail.shape[1])
    return write_runs(pool, filled_blocks(tail, targets), runs.reshape(-1))


def read_pages(
    pool: PoolLayer, pages: Int[Array, " Q"], count: Int[Array, ""], *, dtype: str
) -> Float[Array, "1 K Q 2 P H"]:
    """Blocks of one layer, copied to the device: for a program that may have other work beside it.

    Compiled ahead of time, with types that say nothing of host memory, by bulk copies.

    Args:
      pool: a layer of a `PagedPool`.
      pages: where each block is.
      count: how many of them to copy; the rest is zero.
      dtype: of the result.
    """
    heads, number = pool.values.shape[1], pages.shape[0]
    block = pool.values.shape[3:]
    target = jnp.arange(number, dtype=jnp.int32)[:, None] + number * jnp.arange(
        heads, dtype=jnp.int32
    )
    runs = block_fetch.fetch_blocks(
        pool.values.reshape(-1, *block),
        jnp.zeros((heads * number, *block), dtype),
        page_runs(pages, heads).reshape(-1),
        target.reshape(-1),
        count * heads,
        pool_scales=None if pool.scales is None else pool.scales.reshape(-1, 2),
    )
    return runs.reshape(1, heads, number, *block)


class PagedPool(BlockPool):
    """KV blocks of rows that come and go, in pages that are handed out one by one.

    A page is one block of all KV heads. A layer is an array [X, K, 1, 2, P, H]: a pool of X
    sequences of one block each. Which row has which page, the caller knows.

    Args:
      num_layers: L.
      device: whose pool it is.
      pages: X.
      block: [K, P, H].
      compute_dtype: of the KV on the device.
      resident: the first so many layers are not in the pool.
      dtype: see `BlockPool`.
    """

    def __init__(
        self,
        num_layers: int,
        device: jax.Device,
        *,
        pages: int,
        block: tuple[int, int, int],
        compute_dtype: jnp.dtype,
        resident: int = 0,
        dtype: str | None = None,
    ):
        super().__init__(num_layers, device, resident=resident, dtype=dtype)
        heads, size, width = block
        self._compiled: dict[tuple[Any, ...], jax.stages.Compiled] = {}
        shape = (pages, heads, 1, 2, size, width)
        place = memory.device_sharding(device)
        empty = jax.jit(functools.partial(jnp.zeros, shape, compute_dtype), out_shardings=place)
        for index in range(resident, num_layers):
            self.store_layer(index, empty())

    @property
    def compilations(self) -> int:
        """Programs compiled so far."""
        return len(self._compiled)

    def _update(self, function: Callable[..., PoolLayer], index: int, *args: jax.Array) -> None:
        """Writes to a layer by a program that is compiled ahead of time, once for each shape.

        In a jit the pool's type would say host memory, which the kernels' bulk copies refuse.
        """
        every = (self._layer(index), *args)
        key = (function, *((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(every)))
        if key not in self._compiled:
            types = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), every)
            places = jax.tree.map(lambda leaf: leaf.sharding, every)
            run = jax.jit(function, in_shardings=places, out_shardings=places[0], donate_argnums=0)
            self._compiled[key] = run.lower(*types).compile()
        self._layers[index] = self._compiled[key](*every)

    def replace(self, index: int, layer: PoolLayer) -> None:
        """Takes what a program made of a layer that it was given."""
        self._layers[index] = layer

    def write_back_pages(
        self,
        tails: tuple[Float[Array, "B K 2 2 P H"], ...],
        targets: Int[Array, " B"],
        pages: Int[Array, " B"],
    ) -> None:
        """Writes the filled tail block of some sequences to its page, in every layer kept here.

        Args:
          tails: L tail rings; block j lies in ring row j % 2.
          targets: block id to write for each sequence; any where there is none.
          pages: where each goes; -1: nowhere.
        """
        for index, tail in enumerate(tails):
            if self._layers[index] is not None:
                self._update(_write_tail, index, tail, targets, pages)
