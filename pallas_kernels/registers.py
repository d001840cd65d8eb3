"""How tiles lie in registers, for the Mosaic GPU kernels of several operations."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu


def row_layout(head_dim: int) -> Any:
    """Registers of a [TOK, H] tile: 8 neighbouring values a thread, whole rows in one warp."""
    threads_per_row = head_dim // 8
    rows = 32 // threads_per_row
    return plgpu.Layout.TILED(
        plgpu.Tiling(((4 * rows, head_dim), (rows, head_dim), (8,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )
