"""Attention of a block over what is cached before it, and writing its KV."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pool_attention import pool_attention
from sparda_jax.diffusion.state import LayerKV, Prefix
from sparda_jax.typing import Array, Bool, Float, Int


def pack(k: Float[Array, "B T K H"], v: Float[Array, "B T K H"]) -> Float[Array, "B K 2 T H"]:
    """Keys and values of a block, head-major as caches hold them."""
    return jnp.stack([k, v], axis=1).transpose(0, 3, 1, 2, 4)


def dense_prefix(cache: LayerKV, start: Int[Array, " B"]) -> Prefix:
    """All tokens before `start`: whole KV blocks as slots, those of the last one as the rest."""
    batch, heads, blocks, _, size, _ = cache.shape
    whole = start // size
    number = jnp.arange(blocks, dtype=jnp.int32)
    ids = jnp.where(number < whole[:, None], number, -1)
    index = whole[:, None, None, None, None, None]
    rest = jnp.take_along_axis(cache, index, axis=2, mode="clip")[:, :, 0]
    mask = jnp.arange(size) < (start % size)[:, None]
    ids = jnp.broadcast_to(ids[:, None], (batch, heads, blocks))
    return Prefix(cache, ids, rest, mask)


def block_mask(
    committing: Bool[Array, " B"], width: int, *, causal_clean: bool
) -> Bool[Array, "B W W"]:
    """Who attends whom in a block: all see all, but clean tokens nothing behind them if causal.

    Args:
        committing: rows whose tokens are all clean.
        width: W.
        causal_clean: see `DiffusionConfig`.
    """
    if not causal_clean:
        return jnp.ones((committing.shape[0], width, width), bool)
    index = jnp.arange(width)
    return ~committing[:, None, None] | (index[:, None] >= index)


def attend(
    q: Float[Array, "B T N H"],
    prefix: Prefix,
    own: Float[Array, "B K 2 E H"],
    own_mask: Bool[Array, "B T E"],
) -> Float[Array, "B T N H"]:
    """One softmax over a prefix and the block's own tokens.

    Args:
        q: queries after RoPE.
        prefix: what every query sees.
        own: KV of the block (and whatever rides along: a draft, the next block).
        own_mask: which of these each query sees.
    """
    shared = jnp.broadcast_to(prefix.rest_mask[:, None], (*q.shape[:2], prefix.rest_mask.shape[1]))
    out = pool_attention(
        q,
        prefix.slots,
        prefix.slot_ids,
        jnp.concatenate([prefix.rest, own], axis=3),
        jnp.concatenate([shared, own_mask], axis=2),
    )
    assert not isinstance(out, tuple)  # no log-sum-exp was asked for
    return out


def write_block(
    cache: LayerKV,
    own: Float[Array, "B K 2 W H"],
    start: Int[Array, " B"],
    rows: Bool[Array, " B"],
) -> LayerKV:
    """Writes the KV of a block at its positions, for the rows that are named."""
    size, width = cache.shape[4], own.shape[3]

    def one(cache: Array, own: Array, start: Array, write: Array) -> Array:
        at = (0, start // size, 0, start % size, 0)
        old = lax.dynamic_slice(cache, at, (cache.shape[0], 1, 2, width, cache.shape[4]))
        return lax.dynamic_update_slice(cache, jnp.where(write, own[:, None], old), at)

    return jax.vmap(one)(cache, own, start, rows)
