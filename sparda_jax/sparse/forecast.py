"""SparDA's selection: a Forecast query per KV head, made a layer ahead (spec/sparda.md, sec. 4).

Thin: positions and lengths become the operands of `pallas_kernels.block_selection`. In decode the
keys of layer l+1 do not yet hold the token that layer l forecasts from, so a step scores the
compressed keys as they stood before it. That changes no selection: a window that this token
completes begins in a block that is forced anyway, which is why `local_blocks = 0` is refused.
"""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.block_selection import Selection, select_blocks_forecast
from pallas_kernels.geometry import BlockGeometry
from sparda_jax.config import SparseConfig
from sparda_jax.sparse.nosa import first_stage, second_stage, selection_width
from sparda_jax.typing import Array, Bool, Float, Int


def check_lookahead(sparse: SparseConfig) -> None:
    """Refuses policies under which a selection made one layer ahead would miss blocks.

    Raises:
        ValueError: windows that end in this step may begin before the forced local blocks.
    """
    geometry = sparse.geometry
    needed = max(1, -(-(geometry.kernel_size - 1) // geometry.block_size))
    if sparse.local_blocks < needed:
        raise ValueError(
            f"Forecast selection needs local_blocks >= {needed} with windows of "
            f"{geometry.kernel_size} tokens, got {sparse.local_blocks}"
        )


def visible_windows(
    positions: Int[Array, "B T"], prompt_lengths: Int[Array, " B"], geometry: BlockGeometry
) -> Int[Array, "B T"]:
    """Compressed keys that each token's Forecast scores.

    A prompt's token sees the prompt's complete windows that start at or before it, also those that
    reach past it (SparDA trains with that rule); a generated token all windows that were complete
    before its step.

    Args:
        positions: absolute positions of the tokens.
        prompt_lengths: tokens of each prompt; what follows was generated.
        geometry: the grid.
    """
    ends = prompt_lengths[:, None]
    prompt = jnp.minimum(geometry.started_windows(positions), geometry.num_compressed(ends))
    return jnp.where(positions < ends, prompt, geometry.num_compressed(positions))


def select_forecast(
    forecast: Float[Array, "B T K H"],
    compressed: Float[Array, "B K C H"],
    positions: Int[Array, "B T"],
    visible: Int[Array, "B T"],
    sparse: SparseConfig,
    num_blocks: int,
    *,
    dense: Bool[Array, " B"] | None = None,
    mask_future: bool = True,
    importance: Float[Array, "B K M"] | None = None,
) -> Selection:
    """Blocks of every token from its Forecast query, the visible keys being given.

    Args:
        forecast: Forecast queries of the layer before, after RoPE (layer 0: its own projection's).
        compressed: this layer's compressed keys.
        positions: absolute positions of the tokens.
        visible: compressed keys that each token scores; see `visible_windows`.
        sparse: the policy.
        num_blocks: M, blocks that the cache can hold.
        dense: rows that select all their blocks; None: none.
        mask_future: False lets a block after the query's own take a place, as the public code
            does: for tests against it only.
        importance: see `select_prefill`.

    Returns:
        ids `[B, K, T, R]` with R = `selection_width`, and counts.

    Raises:
        ValueError: see `check_lookahead`.
    """
    check_lookahead(sparse)
    stage = first_stage(sparse, importance)
    chosen = select_blocks_forecast(
        forecast,
        compressed,
        positions // sparse.geometry.block_size,
        jnp.clip(visible, 0, compressed.shape[2]),
        num_blocks=num_blocks,
        geometry=sparse.geometry,
        init_blocks=sparse.init_blocks,
        local_blocks=sparse.local_blocks,
        budget=stage.budget_blocks,
        width=selection_width(stage, num_blocks),
        dense=dense,
        mask_future=mask_future,
    )
    return second_stage(
        *(chosen, importance, positions, sparse, num_blocks), dense=dense, mask_future=mask_future
    )


def select_prefill_forecast(
    forecast: Float[Array, "B T K H"],
    compressed: Float[Array, "B K C H"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    sparse: SparseConfig,
    num_blocks: int,
    *,
    mask_future: bool = True,
    importance: Float[Array, "B K M"] | None = None,
) -> Selection:
    """Blocks of every query token of a prompt or of a chunk of it.

    A token scores the complete windows of the prompt that start at or before it.

    Args:
        forecast: see `select_forecast`.
        compressed: of the whole prompt, those of later chunks included.
        positions: absolute positions of the tokens.
        lengths: tokens of the whole prompt, later chunks included; decides on `dense_len`.
        sparse: the policy.
        num_blocks: M, blocks that the cache can hold.
        mask_future: see `select_forecast`.
        importance: see `select_prefill`.
    """
    # No row past its prompt's end is looked at: whatever such a padding row selects is dropped.
    visible = visible_windows(positions, lengths, sparse.geometry)
    return select_forecast(
        forecast,
        compressed,
        positions,
        visible,
        sparse,
        num_blocks,
        dense=None if sparse.dense_len == 0 else lengths < sparse.dense_len,
        mask_future=mask_future,
        importance=importance,
    )


def select_decode_forecast(
    forecast: Float[Array, "B 1 K H"],
    compressed: Float[Array, "B K C H"],
    lengths: Int[Array, " B"],
    sparse: SparseConfig,
    num_blocks: int,
    importance: Float[Array, "B K M"] | None = None,
) -> Selection:
    """Blocks of the newest token of each sequence, from keys as they stood before its step.

    Args:
        forecast: the newest token's; see `select_forecast`.
        compressed: compressed keys; one that the newest token completes is not looked at.
        lengths: tokens of the sequence, the newest included.
        sparse: the policy.
        num_blocks: M, blocks that the cache can hold.
        importance: see `select_prefill`; from values as they stood before this step.
    """
    return select_forecast(
        forecast,
        compressed,
        lengths[:, None] - 1,
        sparse.geometry.num_compressed(lengths - 1)[:, None],
        sparse,
        num_blocks,
        dense=None if sparse.dense_len == 0 else lengths < sparse.dense_len,
        importance=importance,
    )
