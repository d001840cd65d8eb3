"""The pool of KV blocks in pinned host memory, one array a layer."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Num

from host_offload import memory
from host_offload.quantise import quantise
from pallas_kernels import block_fetch


def tail_block_runs(
    targets: Int[Array, " B"], num_heads: int, num_blocks: int
) -> Int[Array, " BK"]:
    """Flat run index of block ``targets[b]`` for every (sequence, KV head); -1 stays -1."""
    rows = jnp.arange(targets.shape[0] * num_heads, dtype=jnp.int32)
    block = jnp.repeat(targets, num_heads)
    return jnp.where(block < 0, -1, rows * num_blocks + block)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PoolLayer:
    """One layer's blocks. A (block, KV head) is one contiguous run of keys and values.

    Attributes:
      values: in ``pinned_host`` memory.
      scales: of the keys and the values of every run, on the device; None: not quantised.
    """

    values: Num[Array, "B K M 2 P H"]
    scales: Float32[Array, "B K M 2"] | None = None


def _stored(
    kv: Float[Array, "*runs 2 P H"], pool: PoolLayer
) -> tuple[Num[Array, "*runs 2 P H"], Float32[Array, "*runs 2"] | None]:
    """Blocks as the pool keeps them."""
    return (kv, None) if pool.scales is None else quantise(kv, pool.values.dtype)


def write_runs(
    pool: PoolLayer, blocks: Float[Array, "A 2 P H"], runs: Int[Array, " A"]
) -> PoolLayer:
    """The layer with ``blocks[i]`` in run ``runs[i]``, -1 for none; in place where donated."""
    blocks, new_scales = _stored(blocks, pool)
    count = math.prod(pool.values.shape[:3])
    flat = pool.values.reshape(count, *pool.values.shape[3:])
    values = block_fetch.write_blocks(flat, blocks, runs).reshape(pool.values.shape)
    scales = pool.scales
    if scales is not None:
        # An index past the end is dropped.
        kept = jnp.where(runs < 0, count, runs)
        scales = scales.reshape(-1, 2).at[kept].set(new_scales, mode="drop").reshape(scales.shape)
    return PoolLayer(values, scales)


def filled_blocks(
    tail: Float[Array, "B K 2 2 P H"], targets: Int[Array, " B"]
) -> Float[Array, "BK 2 P H"]:
    """Block ``targets[b]`` of every (sequence, KV head), from the tail ring."""
    ring = (targets % 2)[:, None, None, None, None, None]
    filled = jnp.take_along_axis(tail, ring, axis=2)[:, :, 0]
    return filled.reshape(-1, *filled.shape[2:])


def _write_back(
    pool: PoolLayer, tail: Float[Array, "B K 2 2 P H"], targets: Int[Array, " B"]
) -> PoolLayer:
    runs = tail_block_runs(targets, *pool.values.shape[1:3])
    return write_runs(pool, filled_blocks(tail, targets), runs)


class BlockPool:
    """KV blocks in pinned host memory, one array a layer, but for layers that stay on the device.

    What a layer's first axis counts, and how new blocks get in, a subclass says.

    Args:
      num_layers: L.
      device: whose pool it is.
      resident: the first so many layers are not in the pool.
      dtype: int8 or float8_e4m3fn to keep the blocks quantised; None: as they come.

    Attributes:
      layers: L pools, None for a resident layer. Programs read them in place; what writes donates
        and replaces them, so take them from here again for every call.
    """

    def __init__(
        self, num_layers: int, device: jax.Device, *, resident: int = 0, dtype: str | None = None
    ):
        self._resident, self._dtype = resident, dtype
        self._layers: list[PoolLayer | None] = [None] * num_layers
        self._host = memory.host_sharding(device)
        self._quantise = jax.jit(quantise, static_argnums=1)

    @property
    def layers(self) -> tuple[PoolLayer | None, ...]:
        """The pools; every layer that is not resident must have been stored.

        Raises:
          RuntimeError: if a layer was never stored.
        """
        for index, layer in enumerate(self._layers[self._resident :], self._resident):
            if layer is None:
                raise RuntimeError(f"host pool: layer {index} was never stored")
        return tuple(self._layers)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory in use."""
        return memory.tree_bytes([layer.values for layer in self._layers if layer is not None])

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales, which are on the device."""
        return memory.tree_bytes([layer.scales for layer in self._layers if layer is not None])

    def _layer(self, index: int) -> PoolLayer:
        layer = self.layers[index]
        if layer is None:
            raise ValueError(f"host pool: layer {index} stays on the device")
        return layer

    def store_layer(self, index: int, kv: Float[Array, "B K M 2 P H"]) -> None:
        """Starts the copy of one layer's blocks to the host; returns before it is done.

        On a GPU the copy engine works behind the compute that was dispatched after it, so a
        prefill that goes layer by layer hides it.
        """
        scales = None
        if self._dtype is not None:
            kv, scales = self._quantise(kv, self._dtype)
        self._layers[index] = PoolLayer(jax.device_put(kv, self._host), scales)

    def view(self, index: int) -> np.ndarray:
        """A numpy view of one layer's blocks as they are stored, without a copy.

        The view is valid until this layer is next written to; the caller keeps it no longer.
        """
        return memory.host_view(self._layer(index).values)


class HostPool(BlockPool):
    """All KV blocks of a batch; see `BlockPool`. Each sequence has room for M blocks of its own."""

    def __init__(
        self, num_layers: int, device: jax.Device, *, resident: int = 0, dtype: str | None = None
    ):
        super().__init__(num_layers, device, resident=resident, dtype=dtype)
        place = memory.device_sharding(device)
        places: Any = PoolLayer(self._host, None if dtype is None else place)  # type: ignore[arg-type]
        self._write_back = jax.jit(_write_back, donate_argnums=0, out_shardings=places)

    def write_back(
        self, tails: tuple[Float[Array, "B K 2 2 P H"], ...], targets: Int[Array, " B"]
    ) -> None:
        """Writes the filled tail block of some sequences to the host, in every layer kept there.

        Args:
          tails: L tail rings; block j lies in ring row j % 2.
          targets: block id to write for each sequence, -1 for none.
        """
        for index, (pool, tail) in enumerate(zip(self.layers, tails, strict=True)):
            if pool is not None:
                self._layers[index] = self._write_back(pool, tail, targets)
