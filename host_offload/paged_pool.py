"""A host pool of pages: a sequence takes as many as it has blocks, and two may share some."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from host_offload import memory
from host_offload.host_pool import HostPool, PoolLayer, filled_blocks, write_runs
from pallas_kernels import block_fetch


def page_runs(pages: Int[Array, " Q"], num_heads: int) -> Int[Array, "Q K"]:
    """Flat run index of each KV head's part of some pages; -1 stays -1."""
    runs = pages[:, None] * num_heads + jnp.arange(num_heads, dtype=jnp.int32)
    return jnp.where(pages[:, None] < 0, -1, runs)


def _write(
    pool: PoolLayer, kv: Float[Array, "1 K M 2 P H"], first: Int[Array, ""], pages: Int[Array, " Q"]
) -> PoolLayer:
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
    """`PagedPool.read_pages` inside a program, which may have other work beside it.

    Args:
      pool: the layer.
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


class PagedPool(HostPool):
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
      dtype: see `HostPool`.
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
        self._place = memory.device_sharding(device)
        self._compiled: dict[tuple[Any, ...], jax.stages.Compiled] = {}
        self._read = functools.partial(read_pages, dtype=jnp.dtype(compute_dtype).name)
        shape = (pages, heads, 1, 2, size, width)
        empty = jax.jit(
            functools.partial(jnp.zeros, shape, compute_dtype), out_shardings=self._place
        )
        for index in range(resident, num_layers):
            self.store_layer(index, empty())

    @property
    def compilations(self) -> int:
        """Programs compiled so far."""
        return len(self._compiled)

    def _run(
        self, function: Callable[..., Any], args: Sequence[Any], out: Any, **options: Any
    ) -> Any:
        """Compiles ahead of time, once for each shape.

        In a jit the pool's type would say host memory, which the kernels' bulk copies refuse.
        """
        key = (function, *((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(args)))
        if key not in self._compiled:
            types = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)
            places = jax.tree.map(lambda leaf: leaf.sharding, args)
            run = jax.jit(function, in_shardings=places, out_shardings=out, **options)
            self._compiled[key] = run.lower(*types).compile()
        return self._compiled[key](*args)

    def _update(self, function: Callable[..., Any], index: int, *args: jax.Array) -> None:
        layer = self._layer(index)
        places = jax.tree.map(lambda leaf: leaf.sharding, layer)
        self._layers[index] = self._run(function, (layer, *args), places, donate_argnums=0)

    def write_pages(
        self,
        index: int,
        kv: Float[Array, "1 K M 2 P H"],
        first: Int[Array, ""],
        pages: Int[Array, " Q"],
    ) -> None:
        """Writes some blocks of one sequence of one layer, in place.

        Args:
          index: layer.
          kv: all its blocks, on the device.
          first: the first of those that `pages` tells of; at most M - Q.
          pages: where each goes; -1: nowhere.
        """
        self._update(_write, index, kv, first, pages)

    def read_pages(
        self, index: int, pages: Int[Array, " Q"], count: Int[Array, ""]
    ) -> Float[Array, "1 K Q 2 P H"]:
        """Blocks of one layer, copied to the device.

        Args:
          index: layer.
          pages: where each is.
          count: how many of them to copy; the rest is zero.
        """
        kv: jax.Array = self._run(self._read, (self._layer(index), pages, count), self._place)
        return kv

    def write_back_pages(
        self,
        tails: tuple[Float[Array, "B K 2 2 P H"], ...],
        targets: Int[Array, " B"],
        pages: Int[Array, " B"],
    ) -> None:
        """As `write_back`, each block to its page.

        Args:
          tails: L tail rings; block j lies in ring row j % 2.
          targets: block id to write for each sequence; any where there is none.
          pages: where each goes; -1: nowhere.
        """
        for index, tail in enumerate(tails):
            if self._layers[index] is not None:
                self._update(_write_tail, index, tail, targets, pages)
