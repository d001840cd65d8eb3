"""Block selection by GPU kernels: one query token, or many; the choice alone."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.block_selection import counting, mosaic_choice, mosaic_decode, mosaic_prefill
from pallas_kernels.block_selection.reference import Selection


def select_blocks_forecast(
    forecast: Array, compressed: Array, query_block: Array, visible: Array, **rules: Any
) -> Selection:
    """See ``pallas_kernels.block_selection.select_blocks_forecast``."""
    operands = (forecast, compressed, query_block, visible)
    if forecast.shape[1] == 1:
        return mosaic_decode.select_blocks_forecast(*operands, **rules)
    return mosaic_prefill.select_blocks(*operands, multi_head=False, **rules)


def select_blocks_multi_head(
    q: Array, compressed: Array, query_block: Array, visible: Array, **rules: Any
) -> Selection:
    """See ``pallas_kernels.block_selection.select_blocks_multi_head``."""
    operands = (q, compressed, query_block, visible)
    if q.shape[1] == 1:
        return mosaic_decode.select_blocks_multi_head(*operands, **rules)
    return mosaic_prefill.select_blocks(*operands, multi_head=True, **rules)


def choose_blocks(
    block_scores: Array,
    query_block: Array,
    *,
    budget: int,
    width: int,
    dense: Array | None,
    **rules: Any,
) -> Selection:
    """See ``pallas_kernels.block_selection.choose_blocks``."""
    b, k, t, m = block_scores.shape
    if m > mosaic_choice.MAX_BLOCKS:
        raise NotImplementedError(f"{m} blocks; the kernel takes {mosaic_choice.MAX_BLOCKS}")
    if dense is not None and not rules["mask_future"]:
        raise NotImplementedError("dense rows with mask_future=False")
    limit = jnp.full((b,), budget, jnp.int32)
    if dense is not None:
        limit = jnp.where(dense, min(m, width), limit)
    rows = (jnp.repeat(query_block, k, axis=0), jnp.repeat(limit, k, axis=0))
    if m <= counting.MAX_BLOCKS:
        ids = counting.choose(block_scores.reshape(b * k, t, m), *rows, width=width, **rules)
    else:
        # The padding is past the last block, which the kernel never looks at.
        widths = ((0, 0), (0, 0), (0, 0), (0, mosaic_choice.padded_blocks(m) - m))
        scores = jnp.pad(block_scores, widths).reshape(b * k, t, -1)
        ids = mosaic_choice.choose(scores, *rows, num_blocks=m, width=width, **rules)
    ids = ids[..., :width].reshape(b, k, t, width)
    return Selection(ids=ids, count=(ids >= 0).astype(jnp.int32).sum(-1))
