"""Block selection for one query token per request, with Mosaic GPU kernels.

Scores by a kernel that reads the compressed keys once; pooling to blocks, forced blocks and
the softmax's normalisation by XLA (small arrays, a few fused loops); top-k by a kernel.
Ran on an H200 (jax 0.11.2): the blocks of the reference, but for one in a thousand with the
multi-head selector, where scores differ in their last bits.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels import interpret
from pallas_kernels.block_selection import mosaic_scores, mosaic_top_k
from pallas_kernels.block_selection.reference import Selection
from pallas_kernels.block_selection.tuning import forecast_launch, multi_head_launch
from pallas_kernels.geometry import BlockGeometry

_DTYPES = (jnp.bfloat16, jnp.float16)
_HEAD_DIMS = (64, 128)


def select_blocks_forecast(
    forecast: Float[Array, "B 1 K H"],
    compressed: Float[Array, "B K C H"],
    query_block: Int32[Array, "B 1"],
    visible: Int32[Array, "B 1"],
    *,
    mask_future: bool,
    **rules: Any,
) -> Selection:
    """See ``pallas_kernels.block_selection.select_blocks_forecast``; one query token.

    Raises:
        NotImplementedError: H not 64 or 128; keys not bfloat16 or float16, or of another dtype
            than the queries; more than 8192 blocks; ``mask_future=False``.
    """
    _check(forecast, compressed, rules["num_blocks"], mask_future)
    return _select(
        forecast, compressed, query_block, visible, score=_forecast_scores, scale=1.0,
        simulated=interpret.is_active(), **rules,
    )  # fmt: skip


def select_blocks_multi_head(
    q: Float[Array, "B 1 N H"],
    compressed: Float[Array, "B K C H"],
    query_block: Int32[Array, "B 1"],
    visible: Int32[Array, "B 1"],
    *,
    mask_future: bool,
    scale: float,
    coarse: Float[Array, "B K X H"] | None = None,
    coarse_visible: Int32[Array, "B 1"] | None = None,
    **rules: Any,
) -> Selection:
    """See ``pallas_kernels.block_selection.select_blocks_multi_head``; one query token.

    Raises:
        NotImplementedError: as ``select_blocks_forecast``; also more than 64 heads a group, and
            coarse keys: one token's sum costs no pass of its own, so that they would add one.
    """
    _check(q, compressed, rules["num_blocks"], mask_future)
    group = q.shape[2] // compressed.shape[1]
    if group > 64:
        raise NotImplementedError(f"{group} query heads per KV head exceed 64")
    if coarse is not None or coarse_visible is not None:
        raise NotImplementedError("coarse keys for one query token")
    return _select(
        q, compressed, query_block, visible, score=_multi_head_scores, scale=scale,
        simulated=interpret.is_active(), **rules,
    )  # fmt: skip


def _check(queries: Array, compressed: Array, num_blocks: int, mask_future: bool) -> None:
    if queries.shape[1] != 1:
        raise NotImplementedError(f"the decode kernel takes 1 query token, got {queries.shape[1]}")
    if compressed.shape[3] not in _HEAD_DIMS:
        raise NotImplementedError(f"head dim {compressed.shape[3]} is not one of {_HEAD_DIMS}")
    if compressed.dtype not in _DTYPES or queries.dtype != compressed.dtype:
        raise NotImplementedError(
            f"queries {queries.dtype} and keys {compressed.dtype} are not both bfloat16 or float16"
        )
    if compressed.shape[2] == 0:
        raise NotImplementedError("a capacity of 0 compressed keys")
    if num_blocks > mosaic_top_k.MAX_BLOCKS:
        raise NotImplementedError(f"{num_blocks} blocks exceed {mosaic_top_k.MAX_BLOCKS}")
    if not mask_future:
        raise NotImplementedError("mask_future=False, which exists for parity tests only")


_STATIC = (
    "score", "scale", "num_blocks", "geometry", "init_blocks", "local_blocks", "budget", "width",
    "simulated",
)  # fmt: skip


# One jit, so that a program with many layers lowers the kernels once.
@functools.partial(jax.jit, static_argnames=_STATIC)
def _select(
    queries: Array,
    compressed: Array,
    query_block: Int32[Array, "B 1"],
    visible: Int32[Array, "B 1"],
    *,
    score: Callable[[Array, Array, Array, float], Float32[Array, "B K C"]],
    scale: float,
    num_blocks: int,
    geometry: BlockGeometry,
    init_blocks: int,
    local_blocks: int,
    budget: int,
    width: int,
    dense: Bool[Array, " B"] | None,
    simulated: bool,
) -> Selection:
    """Scores, pools, forces and chooses; ``simulated`` only tells two traces apart."""
    del simulated
    scores = score(queries, _at_least_one_tile(compressed), visible, scale)
    return _choose(
        scores[..., : compressed.shape[2]], query_block, num_blocks, geometry, init_blocks,
        local_blocks, budget, width, dense,
    )  # fmt: skip


def _forecast_scores(
    forecast: Float[Array, "B 1 K H"],
    compressed: Float[Array, "B K C H"],
    visible: Int32[Array, "B 1"],
    scale: float,
) -> Float32[Array, "B K C"]:
    """Raw dot products, -inf where invisible; a scale would not change the order."""
    del scale
    b, k, c, h = compressed.shape
    launch = forecast_launch(b * k * -(-c // mosaic_scores.TILE))
    kernel = mosaic_scores.forecast_scores(
        b, k, c, h, compressed.dtype, ctas=launch.ctas, stages=launch.stages
    )
    scores = kernel(forecast[:, 0], compressed, visible[:, 0])
    seen = lax.broadcasted_iota(jnp.int32, scores.shape, 2) < visible[:, :, None]
    return jnp.where(seen, scores, -jnp.inf)


def _multi_head_scores(
    q: Float[Array, "B 1 N H"],
    compressed: Float[Array, "B K C H"],
    visible: Int32[Array, "B 1"],
    scale: float,
) -> Float32[Array, "B K C"]:
    """Softmax mass summed over the group, 0 where invisible."""
    b, k, c, h = compressed.shape
    group = q.shape[2] // k
    padded = -(-group // 8) * 8
    heads = jnp.pad(q.reshape(b, k, group, h), ((0, 0), (0, 0), (0, padded - group), (0, 0)))
    launch = multi_head_launch(b * k, -(-c // mosaic_scores.TILE))
    kernel = mosaic_scores.multi_head_scores(
        b, k, c, h, padded, compressed.dtype, chunks=launch.ctas, stages=launch.stages, scale=scale
    )
    mass = _softmax_mass(*kernel(heads, compressed, visible[:, 0]), group)
    seen = lax.broadcasted_iota(jnp.int32, mass.shape, 2) < visible[:, :, None]
    return jnp.where(seen, mass, 0.0)


def _at_least_one_tile(compressed: Array) -> Array:
    """A copy needs a whole tile to read; pads the few keys of a short capacity."""
    missing = mosaic_scores.TILE - compressed.shape[2]
    if missing <= 0:
        return compressed
    return jnp.pad(compressed, ((0, 0), (0, 0), (0, missing), (0, 0)))


def _softmax_mass(scores: Array, maxima: Array, sums: Array, group: int) -> Float32[Array, "B K C"]:
    """Softmax per head over the keys, summed over the heads of a group."""
    largest = maxima.max(axis=(2, 3))
    total = (sums * jnp.exp2(maxima - largest[:, :, None, None])).sum(axis=(2, 3))
    log_total = jnp.where(total > 0, largest + jnp.log2(total), jnp.inf)
    weights = jnp.exp2(scores - log_total[:, :, None])
    # Padding heads would add a uniform softmax.
    real = lax.broadcasted_iota(jnp.int32, weights.shape, 3) < group
    return jnp.where(real, weights, 0.0).sum(axis=3)


def _pool(
    scores: Float32[Array, "B K C"], num_blocks: int, geometry: BlockGeometry
) -> Float32[Array, "B K M"]:
    """``reference.pool_scores`` without a reduction, so that XLA fuses it with what follows."""
    r = geometry.strides_per_block
    c = min(scores.shape[2], num_blocks * r)
    padded = jnp.pad(
        scores[..., :c], ((0, 0), (0, 0), (1, num_blocks * r - c)), constant_values=-jnp.inf
    )
    pooled = padded[..., : num_blocks * r : r]
    for i in range(1, r + 1):
        pooled = jnp.maximum(pooled, padded[..., i : i + (num_blocks - 1) * r + 1 : r])
    return pooled


def _choose(
    scores: Float32[Array, "B K C"],
    query_block: Int32[Array, "B 1"],
    num_blocks: int,
    geometry: BlockGeometry,
    init_blocks: int,
    local_blocks: int,
    budget: int,
    width: int,
    dense: Bool[Array, " B"] | None,
) -> Selection:
    """Pools to blocks, forces blocks in, and keeps the best."""
    b, k = scores.shape[:2]
    pooled = _pool(scores, num_blocks, geometry)
    block = lax.broadcasted_iota(jnp.int32, (1, 1, num_blocks), 2)
    own = query_block[:, :, None]
    forced = (block < init_blocks) | ((block >= own - local_blocks) & (block <= own))
    limit = jnp.full((b,), budget, jnp.int32)
    if dense is not None:
        forced |= dense[:, None, None]
        limit = jnp.where(dense, width, budget)
    keys = mosaic_top_k.sortable(jnp.where(forced, jnp.inf, pooled))
    keys = jnp.where(block <= own, keys, mosaic_top_k.NEVER)
    blocks = -(-num_blocks // mosaic_top_k.CHUNK) * mosaic_top_k.CHUNK
    keys = jnp.pad(
        keys, ((0, 0), (0, 0), (0, blocks - num_blocks)), constant_values=mosaic_top_k.NEVER
    )
    select = mosaic_top_k.top_k(b * k, blocks, width)
    ids, count = select(keys.reshape(b * k, blocks), jnp.repeat(limit, k))
    return Selection(ids=ids.reshape(b, k, 1, width), count=count.reshape(b, k, 1))
