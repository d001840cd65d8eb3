"""Reading and writing the caches of one layer, one new token a request at a time."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.compressed_keys import compress_latest
from pallas_kernels.geometry import BlockGeometry
from sparda_jax.engine.state import DenseCache, SparseCache


def append_dense(
    cache: DenseCache,
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    position: Int[Array, " B"],
) -> DenseCache:
    """Writes one token per request at its position."""
    rows = jnp.arange(position.shape[0])
    return DenseCache(k=cache.k.at[rows, position].set(k), v=cache.v.at[rows, position].set(v))


def append_compressed(
    cache: SparseCache,
    k: Float[Array, "B K H"],
    position: Int[Array, " B"],
    geometry: BlockGeometry,
) -> SparseCache:
    """Adds a key to the window and, where it completes one, the compressed key.

    A compressed key is visible to the very step that completes it (spec/sparda.md, our rules), so
    this comes before selection.
    """
    rows = jnp.arange(position.shape[0])
    window = cache.window.at[rows, :, position % geometry.kernel_size].set(k)
    count = geometry.complete_windows(position)
    completes = count > geometry.complete_windows(position - 1)
    # An index past the end is dropped: nothing is written where no window was completed.
    index = jnp.where(completes, count - 1, cache.compressed.shape[2])
    compressed = cache.compressed.at[rows, :, index].set(compress_latest(window), mode="drop")
    return dataclasses.replace(cache, window=window, compressed=compressed)


def move_previous_block(
    cache: SparseCache, position: Int[Array, " B"], row: Int[Array, "B K"], block_size: int
) -> SparseCache:
    """Copies the block before the tail block out of the tail ring, without leaving the device.

    Args:
      cache: the layer's cache.
      position: of the token being decoded.
      row: row of `cache.blocks` to copy to; a negative one copies nothing.
      block_size: P.
    """
    batch, heads, rows = cache.blocks.shape[:3]
    ring = ((position // block_size + 1) % 2)[:, None, None, None, None, None]
    previous = jnp.take_along_axis(cache.tail, ring, axis=2)[:, :, 0]
    b, k = jnp.arange(batch)[:, None], jnp.arange(heads)[None]
    target = jnp.where(row < 0, rows, row)
    return dataclasses.replace(
        cache, blocks=cache.blocks.at[b, k, target].set(previous, mode="drop")
    )


def append_tail(
    cache: SparseCache,
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    position: Int[Array, " B"],
    block_size: int,
) -> SparseCache:
    """Writes one token per request into the tail block."""
    rows = jnp.arange(position.shape[0])
    ring, offset = (position // block_size) % 2, position % block_size
    token = jnp.stack([k, v], axis=2)  # [B, K, 2, H]
    return dataclasses.replace(cache, tail=cache.tail.at[rows, :, ring, :, offset].set(token))


def append_bias(
    cache: SparseCache, bias: Float[Array, "B K"], position: Int[Array, " B"], block_size: int
) -> SparseCache:
    """Writes the importance of one token per request (NOSA)."""
    assert cache.bias is not None
    rows = jnp.arange(position.shape[0])
    block, offset = position // block_size, position % block_size
    return dataclasses.replace(cache, bias=cache.bias.at[rows, :, block, offset].set(bias))


def attended_bias(
    bias: Float[Array, "B K M P"],
    slot_blocks: Int[Array, "B K Z"] | None,
    position: Int[Array, " B"],
) -> dict[str, Array]:
    """`pool_attention`'s biases: of the slots (resident: of all blocks) and of the tail block."""
    slots = bias
    if slot_blocks is not None:
        # An empty slot is not attended: it may take the bias of any block.
        slots = jnp.take_along_axis(bias, jnp.maximum(slot_blocks, 0)[..., None], axis=2)
    newest = (position // bias.shape[3])[:, None, None, None]
    tail = jnp.take_along_axis(bias, newest, axis=2)[:, :, 0]
    return {"slot_bias": slots, "tail_bias": tail}


def tail_block(
    tail: Float[Array, "B K 2 2 P H"], position: Int[Array, " B"], block_size: int
) -> tuple[Float[Array, "B K 2 P H"], Bool[Array, "B 1 P"]]:
    """The block being written and which of its rows exist, the token at `position` included."""
    ring = ((position // block_size) % 2)[:, None, None, None, None, None]
    block = jnp.take_along_axis(tail, ring, axis=2)[:, :, 0]
    mask = jnp.arange(block_size)[None] <= (position % block_size)[:, None]
    return block, mask[:, None]
