"""Block selection: scores of compressed keys, pooled to blocks, forced blocks, top-k."""

from pallas_kernels.block_selection.api import (
    Selection,
    choose_blocks,
    select_blocks_forecast,
    select_blocks_multi_head,
)

__all__ = ["Selection", "choose_blocks", "select_blocks_forecast", "select_blocks_multi_head"]
