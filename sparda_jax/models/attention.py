"""Dense attention: of a whole sequence, of a chunk of one, and of one token."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import online_softmax
from pallas_kernels.grouping import MASKED, group_queries, ungroup
from sparda_jax.typing import Array, Bool, Float, Int

# Key tokens scored at a time where cuDNN does not serve: the scores of a tile stay in cache.
TILE_TOKENS = 512


def cudnn_serves(q: Float[Array, "B T N H"]) -> bool:
    """Whether cuDNN's fused attention takes these values: 16 bit, and a head size it knows."""
    return (
        jax.default_backend() == "gpu"
        and q.dtype in (jnp.bfloat16, jnp.float16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 128
    )


def attention_bias(bias: Float[Array, "B S K"], num_heads: int) -> Float[Array, "B N 1 S"]:
    """A bias of keys as `jax.nn.dot_product_attention` takes it."""
    group = num_heads // bias.shape[2]
    return jnp.repeat(bias.transpose(0, 2, 1), group, axis=1)[:, :, None]


def dense_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    lengths: Int[Array, " B"] | None,
    bias: Float[Array, "B T K"] | None = None,
) -> Float[Array, "B T N H"]:
    """Causal softmax(q k / sqrt(H) + bias) v over the first `lengths` keys of each row.

    Args:
        q: queries after RoPE.
        k: keys.
        v: values.
        lengths: valid tokens of each row; None: all.
        bias: added to the scores of a key (NOSA). No fused kernel serves then: the scores of all
            pairs are held, which `chunk_attention` avoids.
    """
    fused = bias is None and cudnn_serves(q)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        None if bias is None else attention_bias(bias, q.shape[2]),
        is_causal=True,
        scale=1 / math.sqrt(q.shape[-1]),
        query_seq_lengths=None if lengths is None else jnp.full_like(lengths, q.shape[1]),
        key_value_seq_lengths=lengths,
        implementation="cudnn" if fused else "xla",
    )


def causal_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    positions: Int[Array, "B T"],
) -> Float[Array, "B T N H"]:
    """Dense attention of whole sequences, T x T in no memory whatever the device.

    Args:
        q: queries after RoPE.
        k: keys after RoPE.
        v: values.
        positions: 0 .. T-1 in every row.
    """
    if cudnn_serves(q):
        return dense_attention(q, k, v, None)
    return chunk_attention(q, k, v, positions)


def masked_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Bool[Array, "*B T S"],
) -> Float[Array, "B T N H"]:
    """Softmax(q k / sqrt(H)) v over the keys that `mask` names, for one sequence or each."""
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=mask[None, None] if mask.ndim == 2 else mask[:, None],
        scale=1 / math.sqrt(q.shape[-1]),
        implementation="cudnn" if cudnn_serves(q) else "xla",
    )


def chunk_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    positions: Int[Array, "B T"],
    bias: Float[Array, "B S K"] | None = None,
) -> Float[Array, "B T N H"]:
    """Causal attention of some queries of a sequence over its cached keys.

    Works through the keys in tiles and stops after the last one that any query sees; one softmax
    over all S keys took 2.8 times as long for the last chunk, on two CPU cores (T=512, S=6144, N=9,
    K=3, H=64), and as long again for every earlier one.

    Args:
        q: queries after RoPE.
        k: keys, position s at row s; rows after the last position are not read as such.
        v: values.
        positions: absolute positions of the queries.
        bias: added to the scores of a key, or None.
    """
    batch, count, _, width = q.shape
    length, heads = k.shape[1:3]
    tile = min(TILE_TOKENS, length)
    queries = group_queries(q, heads) / math.sqrt(width)
    row_positions = jnp.tile(positions, (1, q.shape[2] // heads))[:, None, :, None]

    def add_tile(index: Array, carry: online_softmax.Carry) -> online_softmax.Carry:
        # The last tile is moved back to stay inside; what it then repeats is masked.
        start = jnp.minimum(index * tile, length - tile)
        keys, values = (
            lax.dynamic_slice_in_dim(rows, start, tile, axis=1)
            .transpose(0, 2, 1, 3)
            .astype(jnp.float32)
            for rows in (k, v)
        )
        token = start + jnp.arange(tile, dtype=jnp.int32)
        seen = (token >= index * tile) & (token <= row_positions)
        scores = jnp.einsum("bkth,bksh->bkts", queries, keys)
        if bias is not None:
            rows = lax.dynamic_slice_in_dim(bias, start, tile, axis=1)
            scores = scores + rows.transpose(0, 2, 1)[:, :, None].astype(jnp.float32)
        return online_softmax.add(carry, jnp.where(seen, scores, MASKED), values)

    tiles = jnp.max(positions) // tile + 1
    carry = online_softmax.start((batch, heads, queries.shape[2]), width)
    out, _ = online_softmax.finish(lax.fori_loop(0, tiles, add_tile, carry))
    return ungroup(out, count).astype(q.dtype)
