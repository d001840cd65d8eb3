"""Block selection by Mosaic GPU kernels: one query token, or many."""

from typing import Any

from jaxtyping import Array

from pallas_kernels.block_selection import mosaic_decode, mosaic_prefill
from pallas_kernels.block_selection.reference import Selection


def select_blocks_forecast(
    forecast: Array, compressed: Array, query_block: Array, visible: Array, **rules: Any
) -> Selection:
    """See ``pallas_kernels.block_selection.select_blocks_forecast``."""
    kernels = mosaic_decode if forecast.shape[1] == 1 else mosaic_prefill
    return kernels.select_blocks_forecast(forecast, compressed, query_block, visible, **rules)


def select_blocks_multi_head(
    q: Array, compressed: Array, query_block: Array, visible: Array, **rules: Any
) -> Selection:
    """See ``pallas_kernels.block_selection.select_blocks_multi_head``."""
    kernels = mosaic_decode if q.shape[1] == 1 else mosaic_prefill
    return kernels.select_blocks_multi_head(q, compressed, query_block, visible, **rules)
