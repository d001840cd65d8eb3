"""NOSA's second stage: blocks that are important whatever the query (spec/sparda.md, sec. 2).

The query chooses `query_blocks` of the budget, by InfLLM-V2 or by Forecast. The rest goes to the
blocks whose importance, a function of the values alone, is highest; these change little from token
to token. The importance of a token is also added to its attention scores.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.block_selection import Selection, choose_blocks
from pallas_kernels.block_selection.reference import pool_scores
from pallas_kernels.compressed_keys import compress_keys
from pallas_kernels.geometry import BlockGeometry
from sparda_jax.config import SparseConfig
from sparda_jax.typing import Array, Bool, Float, Int


def selection_width(sparse: SparseConfig, num_blocks: int) -> int:
    """R of the selections this policy makes: the budget, or more where rows may be dense.

    A row is dense below `dense_len` tokens, so it has at most the blocks of `dense_len - 1`.
    """
    if sparse.dense_len == 0:
        return sparse.budget_blocks
    dense_blocks = int(sparse.geometry.num_blocks(sparse.dense_len - 1))
    return max(sparse.budget_blocks, min(dense_blocks, num_blocks))


def first_stage(sparse: SparseConfig, importance: Array | None) -> SparseConfig:
    """The rules by which the query chooses its share.

    Raises:
        ValueError: a policy with a second stage, for a model that does not tell importance.
    """
    if sparse.query_blocks is None:
        return sparse
    if importance is None:
        raise ValueError(f"query_blocks {sparse.query_blocks} needs a model with importance (NOSA)")
    return dataclasses.replace(sparse, budget_blocks=sparse.query_blocks, query_blocks=None)


def block_bias(bias: Float[Array, "B T K"], block_size: int) -> Float[Array, "B K M P"]:
    """The importance of every token by block, the last one filled up with zeros."""
    batch, count, heads = bias.shape
    bias = jnp.pad(bias, ((0, 0), (0, -count % block_size), (0, 0)))
    return bias.transpose(0, 2, 1).reshape(batch, heads, -1, block_size)


def block_importance(
    bias: Float[Array, "B K M P"], lengths: Int[Array, " B"], geometry: BlockGeometry
) -> Float[Array, "B K M"]:
    """Mean importance of each window of the compressed keys, and the maximum over every block's.

    Args:
        bias: of every token; those past `lengths` are not looked at.
        lengths: tokens of each row.
        geometry: the windows.
    """
    batch, heads, blocks, _ = bias.shape
    means = compress_keys(bias.reshape(batch, heads, -1, 1), geometry)[..., 0]
    complete = geometry.num_compressed(lengths)[:, None, None]
    seen = jnp.arange(means.shape[2]) < complete
    scores = jnp.where(seen, means, -jnp.inf)[:, :, None]
    return pool_scores(scores, num_blocks=blocks, geometry=geometry)[:, :, 0]


def second_stage(
    chosen: Selection,
    importance: Float[Array, "B K M"] | None,
    positions: Int[Array, "B T"],
    sparse: SparseConfig,
    num_blocks: int,
    *,
    dense: Bool[Array, " B"] | None = None,
    mask_future: bool = True,
) -> Selection:
    """The query's blocks, and the most important others up to the budget.

    Args:
        chosen: by the query, under `first_stage(sparse)`; all there is without `query_blocks`.
        importance: see `block_importance`.
        positions: of the query tokens.
        sparse: the policy.
        num_blocks: M, blocks that the cache can hold.
        dense: rows that select all their blocks; None: none.
        mask_future: see `select_blocks_multi_head`.
    """
    if sparse.query_blocks is None or importance is None:
        return chosen
    shape = (*chosen.ids.shape[:3], 1)
    b, k, t = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(3))
    query_block = positions // sparse.geometry.block_size
    future = jnp.arange(num_blocks) > query_block[:, None, :, None]
    scores = jnp.where(future, -jnp.inf, importance[:, :, None])
    if not mask_future:
        # A future block that took a place in the first stage, and became -1, keeps it.
        lost = chosen.count < jnp.minimum(sparse.query_blocks, query_block[:, None] + 1)
        after = jnp.arange(num_blocks) == query_block[:, None, :, None] + 1
        scores = jnp.where(after & lost[..., None], jnp.inf, scores)
    # An id of -1 would count from the end: beyond it, it is dropped.
    index = jnp.where(chosen.ids < 0, num_blocks, chosen.ids)
    return choose_blocks(
        scores.at[b, k, t, index].set(jnp.inf, mode="drop"),
        query_block,
        init_blocks=sparse.init_blocks,
        local_blocks=sparse.local_blocks,
        budget=sparse.budget_blocks,
        width=selection_width(sparse, num_blocks),
        dense=dense,
        mask_future=mask_future,
    )
