"""Block selection for prefill on Hopper (Mosaic GPU).

Over chunks of tokens, so that only the block scores of one chunk (at most 64 MiB) are ever in
device memory: scores pooled to blocks (``mosaic_pooled``), then the choice of blocks
(``mosaic_choice``).

Ran on an H200 (jax 0.11.2): equal to the reference on all shapes tried.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels import interpret
from pallas_kernels.block_selection import mosaic_choice, mosaic_pooled
from pallas_kernels.block_selection.reference import Selection
from pallas_kernels.geometry import BlockGeometry

# Block scores of one chunk of tokens.
SCRATCH_BYTES = 64 * 2**20
TILE = mosaic_pooled.TILE


def select_blocks(
    queries: Float[Array, "B T heads H"],
    compressed: Float[Array, "B K C H"],
    query_block: Int32[Array, "B T"],
    visible: Int32[Array, "B T"],
    *,
    multi_head: bool,
    **rules: Any,
) -> Selection:
    """The prefill kernels behind the selectors of ``pallas_kernels.block_selection``.

    Args:
        queries: of all heads, or one Forecast query per KV head.
        compressed: see ``select_blocks_multi_head``, as for all others.
        query_block: see there.
        visible: see there.
        multi_head: ``select_blocks_multi_head``; else ``select_blocks_forecast``.
        **rules: see ``_select``.

    Raises:
        NotImplementedError: a shape or dtype outside the kernel's limits.
    """
    simulated = interpret.is_active()
    return _select(
        queries, compressed, query_block, visible, multi_head=multi_head, simulated=simulated,
        **rules,
    )  # fmt: skip


_STATIC = (
    "multi_head", "simulated", "num_blocks", "geometry", "init_blocks", "local_blocks", "budget",
    "width", "mask_future", "scale",
)  # fmt: skip


# One jit, so that a program with many layers lowers the kernels once.
@functools.partial(jax.jit, static_argnames=_STATIC)
def _select(
    q: Float[Array, "B T N H"],
    compressed: Float[Array, "B K C H"],
    query_block: Int32[Array, "B T"],
    visible: Int32[Array, "B T"],
    *,
    multi_head: bool,
    simulated: bool,
    num_blocks: int,
    geometry: BlockGeometry,
    init_blocks: int,
    local_blocks: int,
    budget: int,
    width: int,
    dense: Bool[Array, " B"] | None = None,
    mask_future: bool = True,
    scale: float | None = None,
    coarse: Float[Array, "B K X H"] | None = None,
    coarse_visible: Int32[Array, "B T"] | None = None,
) -> Selection:
    """Cuts the tokens into chunks and runs the kernels on each.

    ``simulated`` only tells two traces apart.
    """
    del simulated
    b, t, n, h = q.shape
    k, c = compressed.shape[1:3]
    scale = h**-0.5 if scale is None else scale
    _check(h, geometry.strides_per_block, num_blocks, q.dtype, compressed.dtype, scale)
    row_bytes = b * k * mosaic_choice.padded_blocks(num_blocks) * 4
    chunk = max(TILE, SCRATCH_BYTES // row_bytes // TILE * TILE)
    chunks = -(-t // chunk)
    chunk = -(-t // (chunks * TILE)) * TILE
    r = geometry.strides_per_block
    shape = mosaic_pooled.Shape(
        batch=b,
        kv_heads=k,
        group=n // k,
        head_dim=h,
        tokens=chunk,
        blocks=num_blocks,
        columns=mosaic_choice.padded_blocks(num_blocks),
        compressed=c,
        strides=r,
        multi_head=multi_head,
        complete=not mask_future,
    )
    visible = jnp.clip(visible, 0, c)
    apart = mosaic_pooled.keys_apart(compressed, shape)
    whole = mosaic_pooled.keys_whole(compressed if coarse is None else coarse)
    summed = visible if coarse is None else jnp.clip(coarse_visible, 0, coarse.shape[2])
    limit = jnp.full((b,), budget, jnp.int32)
    if dense is not None:
        limit = jnp.where(dense, min(num_blocks, width), limit)

    def one(args: tuple[Array, ...]) -> Array:
        q, query_block, visible, summed = args
        rows = q.reshape(b * chunk, n, h)
        lse = None
        if multi_head:
            lse = mosaic_pooled.log_sum_exp(shape, scale, rows, whole, summed)
            if coarse is not None:
                # A query may see compressed keys and no coarse one.
                lse = jnp.where(lse > -jnp.inf, lse, 0.0)
        scores = mosaic_pooled.pooled_scores(shape, scale, rows, apart, query_block, visible, lse)
        ids = mosaic_choice.choose(
            scores,
            jnp.repeat(query_block, k, axis=0),
            jnp.repeat(limit, k, axis=0),
            num_blocks=num_blocks,
            init_blocks=init_blocks,
            local_blocks=local_blocks,
            width=width,
            mask_future=mask_future,
        )
        return ids[..., :width]

    cut = lambda x, fill: jnp.pad(
        x, ((0, 0), (0, chunks * chunk - t)) + ((0, 0),) * (x.ndim - 2), constant_values=fill
    ).reshape(b, chunks, chunk, *x.shape[2:])
    # An own block of -1 makes padding rows free.
    parts = (cut(q, 0), cut(query_block, -1), cut(visible, 0), cut(summed, 0))
    if chunks == 1:
        ids = one(tuple(x[:, 0] for x in parts))[None]
    else:
        ids = lax.map(one, tuple(x.swapaxes(0, 1) for x in parts))
    ids = ids.reshape(chunks, b, k, chunk, -1).transpose(1, 2, 0, 3, 4)
    ids = ids.reshape(b, k, chunks * chunk, -1)[:, :, :t]
    return Selection(ids=ids, count=(ids >= 0).astype(jnp.int32).sum(-1))


def _check(h: int, strides: int, blocks: int, q_dtype: Any, key_dtype: Any, scale: float) -> None:
    """Refuses what the kernels were not written for."""
    check_scores(h, q_dtype, key_dtype, scale)
    if strides > 8:
        raise NotImplementedError(f"{strides} compressed keys per block; the kernel takes 8")
    if blocks > mosaic_choice.MAX_BLOCKS:
        raise NotImplementedError(f"{blocks} blocks; the kernel takes {mosaic_choice.MAX_BLOCKS}")


def check_scores(h: int, q_dtype: Any, key_dtype: Any, scale: float) -> None:
    """Refuses what the score kernels were not written for.

    Args:
        h: H.
        q_dtype: of the queries.
        key_dtype: of the keys.
        scale: factor on the dot products.

    Raises:
        NotImplementedError: names value and limit.
    """
    if h not in (64, 128):
        raise NotImplementedError(f"H = {h}; the kernel takes 64 and 128")
    if q_dtype != key_dtype or q_dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(
            f"queries {q_dtype}, keys {key_dtype}; the kernel takes bfloat16 or float16 for both"
        )
    if not scale > 0:
        raise NotImplementedError(f"scale {scale}; the kernel takes positive ones")
