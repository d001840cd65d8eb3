"""InfLLM-V2 selection: the multi-head selector on compressed keys (spec/sparda.md, sec. 3).

Thin: positions and lengths become the operands of `pallas_kernels.block_selection`.
"""

from __future__ import annotations

from typing import cast

import jax.numpy as jnp

from pallas_kernels.block_selection import Selection, select_blocks_multi_head
from pallas_kernels.block_sparse_attention import block_sparse_attention
from pallas_kernels.compressed_keys import compress_keys
from sparda_jax.config import SparseConfig
from sparda_jax.sparse.nosa import (
    block_bias,
    block_importance,
    first_stage,
    second_stage,
    selection_width,
)
from sparda_jax.typing import Array, Float, Int


def select_prefill(
    q: Float[Array, "B T N H"],
    compressed: Float[Array, "B K C H"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    sparse: SparseConfig,
    num_blocks: int,
    importance: Float[Array, "B K M"] | None = None,
) -> Selection:
    """Blocks of every query token of a prompt or of a chunk of it.

    A query sees the compressed keys whose whole window ends at or before it.

    Args:
        q: queries after RoPE.
        compressed: compressed keys; those past the query's own position are not looked at.
        positions: absolute positions of the queries.
        lengths: tokens of the whole prompt, later chunks included; decides on `dense_len`.
        sparse: the policy.
        num_blocks: M, blocks that the cache can hold.
        importance: of every block, for a policy with `query_blocks`; see `sparse.nosa`.

    Returns:
        ids `[B, K, T, R]` with R = `selection_width`, and counts.
    """
    geometry, stage = sparse.geometry, first_stage(sparse, importance)
    dense = None if sparse.dense_len == 0 else lengths < sparse.dense_len
    chosen = select_blocks_multi_head(
        q,
        compressed,
        positions // geometry.block_size,
        geometry.complete_windows(positions),
        num_blocks=num_blocks,
        geometry=geometry,
        init_blocks=sparse.init_blocks,
        local_blocks=sparse.local_blocks,
        budget=stage.budget_blocks,
        width=selection_width(stage, num_blocks),
        dense=dense,
    )
    return second_stage(chosen, importance, positions, sparse, num_blocks, dense=dense)


def select_decode(
    q: Float[Array, "B 1 N H"],
    compressed: Float[Array, "B K C H"],
    lengths: Int[Array, " B"],
    sparse: SparseConfig,
    num_blocks: int,
    importance: Float[Array, "B K M"] | None = None,
) -> Selection:
    """Blocks of the newest token of each sequence.

    A compressed key counts from the very step whose token completes its window.

    Args:
        q: the newest token's queries after RoPE.
        compressed: compressed keys, those completed by this token included.
        lengths: tokens of the sequence, the newest included.
        sparse: the policy.
        num_blocks: M, blocks that the cache can hold.
        importance: see `select_prefill`.
    """
    positions = lengths[:, None] - 1
    return select_prefill(q, compressed, positions, lengths, sparse, num_blocks, importance)


def to_blocks(
    k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], block_size: int
) -> Float[Array, "B K M 2 P H"]:
    """Token-major keys and values as KV blocks, the last one filled up with zeros."""
    batch, count, heads, dim = k.shape
    kv = jnp.stack([k, v], axis=3)
    kv = jnp.pad(kv, ((0, 0), (0, -count % block_size), (0, 0), (0, 0), (0, 0)))
    kv = kv.reshape(batch, -1, block_size, heads, 2, dim)
    return kv.transpose(0, 3, 1, 4, 2, 5)


def sparse_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"] | None,
    sparse: SparseConfig,
    bias: Float[Array, "B T K"] | None = None,
) -> Float[Array, "B T N H"]:
    """Attention of a whole sequence over the blocks selected from its own keys.

    Args:
        q: queries after RoPE.
        k: keys.
        v: values.
        positions: 0 to T-1.
        lengths: valid tokens of each row; None: all.
        sparse: the policy.
        bias: added to the scores of a key, and its importance (NOSA); None: neither.
    """
    batch, count = positions.shape
    if lengths is None:
        lengths = jnp.full((batch,), count, jnp.int32)
    geometry = sparse.geometry
    kv = to_blocks(k, v, geometry.block_size)
    # Of the filled-up keys: windows that reach past a query are invisible to it in any case.
    compressed = compress_keys(kv[:, :, :, 0].reshape(*kv.shape[:2], -1, k.shape[-1]), geometry)
    blocks = None if bias is None else block_bias(bias, geometry.block_size)
    importance = None if blocks is None else block_importance(blocks, lengths, geometry)
    selection = select_prefill(
        q, compressed, positions, lengths, sparse, kv.shape[2], importance=importance
    )
    return cast(Array, block_sparse_attention(q, kv, selection.ids, positions, key_bias=blocks))
