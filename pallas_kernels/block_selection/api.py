"""Block selection of InfLLM-V2 and of SparDA's Forecast: the public functions.

Both selectors score compressed keys, take the maximum per block, force the first and the
last blocks in, and keep the best ``budget`` blocks (SparDA, sec. 3).
"""

from typing import Any

from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels import dispatch, layout
from pallas_kernels.block_selection import reference
from pallas_kernels.block_selection.reference import Selection
from pallas_kernels.dispatch import Implementation
from pallas_kernels.geometry import BlockGeometry

__all__ = ["Selection", "choose_blocks", "select_blocks_forecast", "select_blocks_multi_head"]


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
    width: int | None = None,
    dense: Bool[Array, " B"] | None = None,
    mask_future: bool = True,
    scale: float | None = None,
    coarse: Float[Array, "B K X H"] | None = None,
    coarse_visible: Int32[Array, "B T"] | None = None,
    implementation: Implementation = "auto",
) -> Selection:
    """Blocks by the attention mass that all query heads of a group put on compressed keys.

    ``P[k, t, j] = sum over the G heads n of group k of softmax_j(scale * q[t, n] . c[k, j])``
    over the visible keys ``j < visible[b, t]``; 0 where j is invisible, and everywhere when no
    key is visible.  Block m scores ``max of P`` over the keys of ``geometry.pool_range(m, C)``,
    -inf when that range is empty.  Forced, with score +inf: ``m < init_blocks`` and
    ``query_block - local_blocks <= m <= query_block``.  The best ``budget`` blocks are kept, ties
    to the lowest id.  A block ``m <= query_block`` of score -inf is still eligible, after all
    others.  All of it in float32.

    With ``coarse``, keys compressed over larger windows (InfLLM-V2: 4 times the window and the
    stride), the softmax's sum runs over the visible ones of these instead: ``P = sum over n of
    exp(s[n, j] - log sum_i exp(scale * q[n] . coarse[i]))``, where no coarse key is visible
    ``sum over n of exp(s[n, j])``.  Cheaper in prefill, where the sum is a pass of its own; the
    blocks are nearly the same (docs/prefill_kernels.md).

    Args:
        q: queries after RoPE.
        compressed: compressed keys; C is a capacity, ``visible`` says how many are there.
        query_block: block of each query token.
        visible: number of compressed keys that each query token sees.
        num_blocks: M, blocks among which to choose (a capacity).
        geometry: block, window and stride.
        init_blocks: blocks forced at the start.
        local_blocks: blocks forced before the query's own block, which is forced too.
        budget: R, blocks to keep, forced ones included.
        width: length of ``ids``, at least ``budget`` (the default).
        dense: rows b that select every block ``m <= query_block``.  The caller sees to it that
            ``query_block < width`` there; what does not fit is dropped from the end.
        mask_future: a block after the query's own is never a candidate.  False lets it
            compete and then drops it, as the original does: for parity tests only.
        scale: factor on the dot products; 1/sqrt(H) by default.
        coarse: see above; with ``coarse_visible``, how many of them each query token sees.
        coarse_visible: see ``coarse``.
        implementation: "auto", "mosaic" or "xla".

    Returns:
        The selection, ids ascending.

    Raises:
        ValueError: shapes that do not fit; a budget below 1 or above ``width``;
            negative init or local blocks; ``coarse`` without ``coarse_visible`` or the reverse.
        NotImplementedError: "mosaic" cannot be served.
    """
    sizes = layout.match(
        ("q", q, "B T N H"),
        ("compressed", compressed, "B K C H"),
        ("query_block", query_block, "B T"),
        ("visible", visible, "B T"),
        ("dense", dense, "B"),
        ("coarse", coarse, "B K X H"),
        ("coarse_visible", coarse_visible, "B T"),
    )
    if (coarse is None) != (coarse_visible is None):
        raise ValueError("coarse and coarse_visible go together, only one was given")
    layout.group_size(sizes["N"], sizes["K"])
    rules = _checked_rules(num_blocks, init_blocks, local_blocks, budget, width, dense)
    return dispatch.run(
        "block_selection",
        implementation,
        reference.select_blocks_multi_head,
        q,
        compressed,
        query_block,
        visible,
        geometry=geometry,
        mask_future=mask_future,
        scale=sizes["H"] ** -0.5 if scale is None else scale,
        coarse=coarse,
        coarse_visible=coarse_visible,
        **rules,
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
    width: int | None = None,
    dense: Bool[Array, " B"] | None = None,
    mask_future: bool = True,
    implementation: Implementation = "auto",
) -> Selection:
    """Blocks by the raw dot product of one Forecast head per KV head with compressed keys.

    ``score[k, t, j] = forecast[t, k] . c[k, j]`` (no scale, no softmax: neither changes the
    order), -inf where ``j >= visible[b, t]``.  Pooling, forcing and choice as in
    ``select_blocks_multi_head``.

    Args:
        forecast: Forecast queries after RoPE.
        compressed: see ``select_blocks_multi_head``, also for all that follow.
        query_block: see there.
        visible: see there.
        num_blocks: see there.
        geometry: see there.
        init_blocks: see there.
        local_blocks: see there.
        budget: see there.
        width: see there.
        dense: see there.
        mask_future: see there.
        implementation: "auto", "mosaic" or "xla".

    Returns:
        The selection, ids ascending.

    Raises:
        ValueError: as in ``select_blocks_multi_head``.
        NotImplementedError: "mosaic" cannot be served.
    """
    layout.match(
        ("forecast", forecast, "B T K H"),
        ("compressed", compressed, "B K C H"),
        ("query_block", query_block, "B T"),
        ("visible", visible, "B T"),
        ("dense", dense, "B"),
    )
    rules = _checked_rules(num_blocks, init_blocks, local_blocks, budget, width, dense)
    return dispatch.run(
        "block_selection",
        implementation,
        reference.select_blocks_forecast,
        forecast,
        compressed,
        query_block,
        visible,
        geometry=geometry,
        mask_future=mask_future,
        **rules,
    )


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
    implementation: Implementation = "auto",
) -> Selection:
    """Forcing and choice of ``select_blocks_multi_head`` alone, for block scores made elsewhere.

    Args:
        block_scores: no NaN.
        query_block: see ``select_blocks_multi_head``, also for all that follow.
        init_blocks: see there.
        local_blocks: see there.
        budget: see there.
        width: see there.
        dense: see there.
        mask_future: see there.
        implementation: "auto", "mosaic" or "xla".

    Returns:
        The selection, ids ascending.

    Raises:
        ValueError: as in ``select_blocks_multi_head``.
        NotImplementedError: "mosaic" cannot be served.
    """
    sizes = layout.match(
        ("block_scores", block_scores, "B K T M"),
        ("query_block", query_block, "B T"),
        ("dense", dense, "B"),
    )
    rules = _checked_rules(sizes["M"], init_blocks, local_blocks, budget, width, dense)
    del rules["num_blocks"]
    return dispatch.run(
        "block_selection",
        implementation,
        reference.choose_blocks,
        block_scores,
        query_block,
        mask_future=mask_future,
        **rules,
    )


def _checked_rules(
    num_blocks: int,
    init_blocks: int,
    local_blocks: int,
    budget: int,
    width: int | None,
    dense: Array | None,
) -> dict[str, Any]:
    """The arguments with defaults filled in, or a ValueError that names value and limit."""
    width = budget if width is None else width
    if num_blocks < 1:
        raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
    if budget < 1:
        raise ValueError(f"budget must be at least 1 block, got {budget}")
    if init_blocks < 0 or local_blocks < 0:
        raise ValueError(
            f"init_blocks and local_blocks must not be negative, got {init_blocks}, {local_blocks}"
        )
    if width < budget:
        raise ValueError(f"width {width} is smaller than the budget of {budget} blocks")
    return {
        "num_blocks": num_blocks,
        "init_blocks": init_blocks,
        "local_blocks": local_blocks,
        "budget": budget,
        "width": width,
        "dense": dense,
    }
