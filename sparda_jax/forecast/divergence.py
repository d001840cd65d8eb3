"""KL divergence between two distributions, over the windows of selected blocks or over blocks.

Masks over all blocks and windows, no lists: nothing is gathered, and no gradient is scattered.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouping import MASKED
from sparda_jax.config import SparseConfig
from sparda_jax.typing import Array, Bool, Float, Int

# Added to sums and put under logarithms, as in the public code.
EPSILON = 1e-8


def members(ids: Int[Array, "B K T R"], num_blocks: int) -> Bool[Array, "B K T M"]:
    """The selected blocks as a mask."""
    # Lists first: one fused reduction, whose threads run along the blocks.
    named = jnp.moveaxis(ids, -1, 0)[..., None]
    return (named == jnp.arange(num_blocks, dtype=jnp.int32)).any(0)


def candidates(
    sparse: SparseConfig,
    chosen: Bool[Array, "B K T M"],
    positions: Int[Array, "B T"],
    local_blocks: Int[Array, "B T"] | None = None,
) -> Bool[Array, "B K T M"]:
    """Which chosen blocks no rule forced, with so many local ones; None: the policy's."""
    own = positions // sparse.geometry.block_size
    last = (own - (sparse.local_blocks if local_blocks is None else local_blocks))[:, None, :, None]
    block = lax.broadcasted_iota(jnp.int32, (1, 1, 1, chosen.shape[-1]), 3)
    return chosen & (block >= sparse.init_blocks) & (block < last)


def partition(
    share: Float[Array, "B K T C"], free: Bool[Array, "B K T C"], slots: int
) -> tuple[Float[Array, "B K T C"], Float[Array, "B K T 1"], Float[Array, "B K T 1"]]:
    """What is put on the free windows, and on everything else together; each at least EPSILON.

    Args:
        share: weights of all windows; divided by their sum here.
        free: windows of the free blocks.
        slots: windows of a whole selection. The public code compares that many, of which those
            that are not free hold EPSILON; so they count in the sum.

    Returns:
        Weights of the free windows (0 elsewhere), the rest, and the sum with all slots: what to
        divide by.
    """
    share = share / (share.sum(-1, keepdims=True) + EPSILON)
    inside = jnp.where(free, share, 0.0)
    rest = share.sum(-1, keepdims=True) - inside.sum(-1, keepdims=True)
    rest = jnp.maximum(jnp.maximum(rest, 0.0), EPSILON)
    kept = jnp.where(free, jnp.maximum(share, EPSILON), 0.0)
    empty = slots - free.sum(-1, keepdims=True, dtype=jnp.float32)
    return kept, rest, kept.sum(-1, keepdims=True) + rest + empty * EPSILON


def divergence(
    target: Float[Array, "B K T C"],
    share: Float[Array, "B K T C"],
    free: Bool[Array, "B K T C"],
    slots: int,
) -> Float[Array, "B K T"]:
    """KL(target || share) over the free windows and the rest; see `partition` for the arguments."""
    wanted, wanted_rest, wanted_sum = partition(target, free, slots)
    got, got_rest, got_sum = partition(share, free, slots)
    log = lambda kept: jnp.log(jnp.where(free, kept, 1.0))
    inside = (wanted * (log(wanted) - log(got))).sum(-1, keepdims=True)
    rest = wanted_rest * (jnp.log(wanted_rest) - jnp.log(got_rest))
    out = (inside + rest) / wanted_sum + jnp.log(got_sum) - jnp.log(wanted_sum)
    return out[..., 0]


def block_divergence(
    mass: Float[Array, "B K T M"],
    scores: Float[Array, "B K T M"],
    free: Bool[Array, "B K T M"],
) -> Float[Array, "B K T"]:
    """w KL(mass / w || softmax(scores)) over the free blocks, w being the mass of all of them.

    What forced blocks get plays no part; a token counts by what selection can win or lose there.

    Args:
        mass: attention mass of every block.
        scores: of every block.
        free: candidates; none: 0.
    """
    wanted = jnp.where(free, mass, 0.0)
    whole = wanted.sum(-1, keepdims=True)
    share = jax.nn.log_softmax(jnp.where(free, scores, MASKED), axis=-1)
    # Where nothing is wanted the logarithm does not matter, but it must be one.
    log = lambda values: jnp.log(jnp.maximum(values, EPSILON))
    return (wanted * (log(wanted) - log(whole) - share)).sum(-1)
