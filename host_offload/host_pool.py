"""The pool of KV blocks in pinned host memory, one array a layer."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from host_offload import memory
from pallas_kernels import block_fetch


def tail_block_runs(
    targets: Int[Array, " B"], num_heads: int, num_blocks: int
) -> Int[Array, " BK"]:
    """Flat run index of block ``targets[b]`` for every (sequence, KV head); -1 stays -1."""
    rows = jnp.arange(targets.shape[0] * num_heads, dtype=jnp.int32)
    block = jnp.repeat(targets, num_heads)
    return jnp.where(block < 0, -1, rows * num_blocks + block)


def _write_back(
    pool: Float[Array, "B K M 2 P H"],
    tail: Float[Array, "B K 2 2 P H"],
    targets: Int[Array, " B"],
) -> Float[Array, "B K M 2 P H"]:
    batch, heads, blocks = pool.shape[:3]
    ring = (targets % 2)[:, None, None, None, None, None]
    filled = jnp.take_along_axis(tail, ring, axis=2)[:, :, 0]
    flat = block_fetch.write_blocks(
        pool.reshape(batch * heads * blocks, *pool.shape[3:]),
        filled.reshape(batch * heads, *filled.shape[2:]),
        tail_block_runs(targets, heads, blocks),
    )
    return flat.reshape(pool.shape)


def _write_row(
    pool: Float[Array, "B K M 2 P H"],
    kv: Float[Array, "1 K Q 2 P H"],
    row: Int[Array, ""],
    block: Int[Array, ""],
) -> Float[Array, "B K M 2 P H"]:
    kv = jax.device_put(kv, jax.memory.Space.Host)
    return jax.lax.dynamic_update_slice(pool, kv, (row, 0, block, 0, 0, 0))


def _read_row(
    pool: Float[Array, "B K M 2 P H"], row: Int[Array, ""], blocks: int
) -> Float[Array, "1 K Q 2 P H"]:
    part = jax.lax.dynamic_slice(
        pool, (row, 0, 0, 0, 0, 0), (1, pool.shape[1], blocks, *pool.shape[3:])
    )
    return jax.device_put(part, jax.memory.Space.Device)


class HostPool:
    """All KV blocks of a batch in pinned host memory.

    Attributes:
      layers: L arrays ``[B, K, M, 2, P, H]`` in ``pinned_host`` memory. A (block, KV head) is one
        contiguous run of keys and values. Programs read them in place; `write_back` donates and
        replaces them, so take them from here again for every call.
    """

    def __init__(self, num_layers: int, device: jax.Device):
        self._sharding = memory.host_sharding(device)
        self._layers: list[jax.Array | None] = [None] * num_layers
        self._write_back = jax.jit(_write_back, donate_argnums=0, out_shardings=self._sharding)
        self._write_row = jax.jit(_write_row, donate_argnums=0, out_shardings=self._sharding)
        place = memory.device_sharding(device)
        self._read_row = jax.jit(_read_row, static_argnums=2, out_shardings=place)

    @property
    def layers(self) -> tuple[jax.Array, ...]:
        """The pool arrays; every layer must have been stored.

        Raises:
          RuntimeError: if a layer was never stored.
        """
        if any(layer is None for layer in self._layers):
            raise RuntimeError(f"host pool: layer {self._layers.index(None)} was never stored")
        return tuple(self._layers)  # type: ignore[arg-type]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory in use."""
        return memory.tree_bytes([layer for layer in self._layers if layer is not None])

    def store_layer(self, index: int, kv: Float[Array, "B K M 2 P H"]) -> None:
        """Starts the copy of one layer's blocks to the host; returns before it is done.

        On a GPU the copy engine works behind the compute that was dispatched after it, so a
        prefill that goes layer by layer hides it.
        """
        self._layers[index] = jax.device_put(kv, self._sharding)

    def write_row(
        self,
        index: int,
        kv: Float[Array, "1 K Q 2 P H"],
        row: Int[Array, ""],
        block: Int[Array, ""],
    ) -> None:
        """Writes consecutive blocks of one sequence of one layer, in place.

        Args:
          index: layer.
          kv: the blocks, on the device.
          row: sequence.
          block: first block; `block + Q <= M`, or the blocks land before it.
        """
        self._layers[index] = self._write_row(self.layers[index], kv, row, block)

    def read_row(self, index: int, row: Int[Array, ""], blocks: int) -> Float[Array, "1 K Q 2 P H"]:
        """The first blocks of one sequence of one layer, copied to the device.

        Args:
          index: layer.
          row: sequence.
          blocks: Q, how many; a program is compiled for each number.
        """
        return self._read_row(self.layers[index], row, blocks)

    def write_back(
        self, tails: tuple[Float[Array, "B K 2 2 P H"], ...], targets: Int[Array, " B"]
    ) -> None:
        """Writes the filled tail block of some sequences to the host, in every layer.

        Args:
          tails: L tail rings; block j lies in ring row j % 2.
          targets: block id to write for each sequence, -1 for none.
        """
        for index, (pool, tail) in enumerate(zip(self.layers, tails, strict=True)):
            self._layers[index] = self._write_back(pool, tail, targets)

    def view(self, index: int) -> np.ndarray:
        """A numpy view of one layer's blocks, without a copy.

        Made from the buffer's address: `numpy.asarray` would leave a reference inside the JAX
        array that blocks donation for as long as the array lives. The view is valid until the next
        `store_layer` or `write_back` of this layer; the caller keeps it no longer than that.
        """
        array = jax.block_until_ready(self.layers[index])
        count = array.size * array.dtype.itemsize
        raw = (ctypes.c_char * count).from_address(array.unsafe_buffer_pointer())
        return np.frombuffer(raw, dtype=array.dtype).reshape(array.shape)
