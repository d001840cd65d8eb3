"""Block selection in plain jax.numpy: the contract, and the oracle of the kernels."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.chunking import map_chunks
from pallas_kernels.geometry import BlockGeometry
from pallas_kernels.grouping import MASKED, group_queries

# Bound on one chunk of float32 scores, [B, N, T, C] or [B, K, T, C].
CHUNK_BYTES = 64 << 20


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Selection:
    """Selected KV blocks of every query token and KV head.

    Attributes:
        ids: block ids, ascending, then -1 to the end.
        count: number of ids that are not -1.
    """

    ids: Int32[Array, "B K T R"]
    count: Int32[Array, "B K T"]


def select_blocks_multi_head(
    q: Float[Array, "B T N H"],
    compressed: Float[Array, "B K C H"],
    query_block: Int32[Array, "B T"],
    visible: Int32[Array, "B T"],
    *,
    num_blocks: int,
    geometry: BlockGeometry,
    init_blocks: int,
    local_blocks: int,
    budget: int,
    width: int,
    dense: Bool[Array, " B"] | None,
    mask_future: bool,
    scale: float,
    coarse: Float[Array, "B K X H"] | None = None,
    coarse_visible: Int32[Array, "B T"] | None = None,
) -> Selection:
    """See ``pallas_kernels.block_selection.select_blocks_multi_head``."""
    score = functools.partial(multi_head_scores, scale=scale)
    if coarse is not None:
        assert coarse_visible is not None
        score = functools.partial(_coarse_scores, coarse=coarse, scale=scale)
        visible = jnp.stack([visible, coarse_visible], axis=2)
    return _in_chunks(
        score,
        functools.partial(pool_scores, num_blocks=num_blocks, geometry=geometry),
        functools.partial(
            choose_blocks,
            init_blocks=init_blocks,
            local_blocks=local_blocks,
            budget=budget,
            width=width,
            dense=dense,
            mask_future=mask_future,
        ),
        q,
        compressed,
        query_block,
        visible,
    )


def select_blocks_forecast(
    forecast: Float[Array, "B T K H"],
    compressed: Float[Array, "B K C H"],
    query_block: Int32[Array, "B T"],
    visible: Int32[Array, "B T"],
    *,
    num_blocks: int,
    geometry: BlockGeometry,
    init_blocks: int,
    local_blocks: int,
    budget: int,
    width: int,
    dense: Bool[Array, " B"] | None,
    mask_future: bool,
) -> Selection:
    """See ``pallas_kernels.block_selection.select_blocks_forecast``."""
    return _in_chunks(
        forecast_scores,
        functools.partial(pool_scores, num_blocks=num_blocks, geometry=geometry),
        functools.partial(
            choose_blocks,
            init_blocks=init_blocks,
            local_blocks=local_blocks,
            budget=budget,
            width=width,
            dense=dense,
            mask_future=mask_future,
        ),
        forecast,
        compressed,
        query_block,
        visible,
    )


def _in_chunks(
    score: Callable[[Array, Array, Array], Array],
    pool: Callable[[Array], Array],
    choose: Callable[[Array, Array], Selection],
    queries: Float[Array, "B T heads H"],
    compressed: Float[Array, "B K C H"],
    query_block: Int32[Array, "B T"],
    visible: Int32[Array, "B T"],
) -> Selection:
    """Score, pool and choose for chunks of query tokens whose scores fit CHUNK_BYTES."""

    def select(queries: Array, query_block: Array, visible: Array) -> tuple[Array, Array]:
        chosen = choose(pool(score(queries, compressed, visible)), query_block)
        return chosen.ids, chosen.count

    per_token = 4 * queries.shape[0] * queries.shape[2] * max(compressed.shape[2], 1)
    chunk = max(1, CHUNK_BYTES // per_token)
    ids, count = map_chunks(
        select, chunk, (queries, query_block, visible), axes=(1, 1, 1), out_axes=(2, 2)
    )
    return Selection(ids=ids, count=count)


def multi_head_scores(
    q: Float[Array, "B T N H"],
    compressed: Float[Array, "B K C H"],
    visible: Int32[Array, "B T"],
    *,
    scale: float,
) -> Float32[Array, "B K T C"]:
    """Attention mass of each compressed key, summed over the G heads of a group.

    Softmax per head over the visible keys ``j < visible``; 0 where invisible.
    """
    b, t, n, _ = q.shape
    k, c = compressed.shape[1:3]
    dots = _dot(group_queries(q, k) * scale, compressed)
    seen = _seen(visible, c)[:, :, None]
    s = jnp.where(seen, dots.reshape(b, k, n // k, t, c), MASKED)
    largest = jnp.max(s, axis=-1, keepdims=True, initial=MASKED)
    weights = jnp.where(seen, jnp.exp(s - largest), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    # The division is by 1 where nothing is visible: 0 there, not NaN.
    share = weights / jnp.where(total > 0, total, 1.0)
    # Added up one by one: XLA:CPU of jax 0.10 takes 54 ms for the sum over this axis where the
    # additions take 6 (T=512, N=9, C=511).
    mass = share[:, :, 0]
    for g in range(1, n // k):
        mass = mass + share[:, :, g]
    return mass


def _coarse_scores(
    q: Float[Array, "B T N H"],
    compressed: Float[Array, "B K C H"],
    visible: Int32[Array, "B T 2"],
    *,
    coarse: Float[Array, "B K X H"],
    scale: float,
) -> Float32[Array, "B K T C"]:
    """``multi_head_scores`` with the sums of the softmax over the coarse keys."""
    b, t, n, _ = q.shape
    k, c = compressed.shape[1:3]
    queries = group_queries(q, k) * scale
    dots = _dot(queries, coarse).reshape(b, k, n // k, t, -1)
    seen = _seen(visible[..., 1], coarse.shape[2])[:, :, None]
    total = jax.nn.logsumexp(jnp.where(seen, dots, -jnp.inf), axis=-1, keepdims=True)
    total = jnp.where(total > -jnp.inf, total, 0.0)
    dots = _dot(queries, compressed).reshape(b, k, n // k, t, c)
    seen = _seen(visible[..., 0], c)[:, :, None]
    return jnp.where(seen, jnp.exp(dots - total), 0.0).sum(axis=2)


def forecast_scores(
    forecast: Float[Array, "B T K H"],
    compressed: Float[Array, "B K C H"],
    visible: Int32[Array, "B T"],
) -> Float32[Array, "B K T C"]:
    """Raw dot products; -inf where ``j >= visible``."""
    k, c = compressed.shape[1:3]
    dots = _dot(group_queries(forecast, k), compressed)
    return jnp.where(_seen(visible, c), dots, -jnp.inf)


def _dot(queries: Float32[Array, "B K T H"], compressed: Float[Array, "B K C H"]) -> Array:
    """Dot products in float32 of every query with every compressed key of its KV head."""
    return jnp.einsum("bkth,bkch->bktc", queries, compressed.astype(jnp.float32))


def _seen(visible: Int32[Array, "B T"], num_keys: int) -> Bool[Array, "B 1 T C"]:
    key = lax.broadcasted_iota(jnp.int32, (1, 1, 1, num_keys), 3)
    return key < visible[:, None, :, None]


def pool_scores(
    scores: Float32[Array, "B K T C"], *, num_blocks: int, geometry: BlockGeometry
) -> Float32[Array, "B K T M"]:
    """Maximum of the scores over ``geometry.pool_range`` of every block; -inf where empty."""
    r = geometry.strides_per_block
    c = min(scores.shape[3], num_blocks * r)
    scores = lax.slice_in_dim(scores, 0, c, axis=3)
    padded = jnp.pad(
        scores, ((0, 0), (0, 0), (0, 0), (1, num_blocks * r - c)), constant_values=-jnp.inf
    )
    # Column i of `padded` is compressed key i - 1.
    before = lax.slice_in_dim(padded, 0, num_blocks * r, stride=r, axis=3)
    inside = lax.slice_in_dim(padded, 1, num_blocks * r + 1, axis=3)
    inside = inside.reshape(*scores.shape[:3], num_blocks, r).max(axis=4)
    return jnp.maximum(before, inside)


def choose_blocks(
    block_scores: Float32[Array, "B K T M"],
    query_block: Int32[Array, "B T"],
    *,
    init_blocks: int,
    local_blocks: int,
    budget: int,
    width: int | None = None,
    dense: Bool[Array, " B"] | None = None,
    mask_future: bool = True,
) -> Selection:
    """Forced blocks, then the best scores, ties to the lowest id; ids ascending.

    See ``pallas_kernels.block_selection.select_blocks_multi_head`` for the rules.
    """
    b, k, t, m = block_scores.shape
    width = budget if width is None else width
    block = lax.broadcasted_iota(jnp.int32, (1, 1, 1, m), 3)
    own = query_block[:, None, :, None]
    forced = (block < init_blocks) | ((block >= own - local_blocks) & (block <= own))
    scores = jnp.where(forced, jnp.inf, block_scores)
    if mask_future:
        # Blocks of the past that score -inf come first all the same: they have lower ids.
        scores = jnp.where(block > own, -jnp.inf, scores)
    # XLA's top-k is stable (ties to the lower index), and its CPU version wants two axes.
    # On two CPU cores, 1536 rows of 128, 24 kept: 4 ms; bisection by counting 7 ms;
    # comparing all pairs 60 ms.
    _, best = lax.top_k(scores.reshape(b * k * t, m), min(budget, m))
    best = best.reshape(b, k, t, -1)
    # m stands for "none" while sorting, so that these end up last.
    best = lax.sort(jnp.where(best > own, m, best))
    ids = jnp.where(best < m, best, -1)
    ids = jnp.pad(ids, ((0, 0), (0, 0), (0, 0), (0, width - ids.shape[3])), constant_values=-1)
    if dense is not None:
        every = lax.broadcasted_iota(jnp.int32, (1, 1, 1, width), 3)
        every = jnp.where((every <= own) & (every < m), every, -1)
        ids = jnp.where(dense[:, None, None, None], every, ids)
    return Selection(ids=ids, count=(ids >= 0).sum(axis=3, dtype=jnp.int32))
