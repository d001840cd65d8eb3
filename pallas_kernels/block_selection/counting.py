"""Choice among few blocks on a GPU: every pair of a row compared, in plain XLA.

A block's rank is the number of blocks before it in the order of the choice; comparing all pairs is
one fused reduction and needs no sort. Its work grows with the square of the blocks, so it is for
short rows, where the kernel of ``mosaic_choice`` mostly handles padding.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

MAX_BLOCKS = 256


def choose(
    scores: Float[Array, "X T M"],
    query_block: Int32[Array, "X T"],
    limit: Int32[Array, " X"],
    *,
    init_blocks: int,
    local_blocks: int,
    width: int,
    mask_future: bool,
) -> Int32[Array, "X T R"]:
    """Ids ascending, padded with -1; see ``mosaic_choice.choose`` for the arguments."""
    blocks = scores.shape[2]
    block = jnp.arange(blocks, dtype=jnp.int32)
    own = query_block[..., None]
    forced = (block < init_blocks) | ((block >= own - local_blocks) & (block <= own))
    scores = jnp.where(forced, jnp.inf, scores)
    if mask_future:
        # Blocks of the past that score -inf come first all the same: they have lower ids.
        scores = jnp.where(block > own, -jnp.inf, scores)
    # Axis 2 is the block that is ranked, axis 3 the one that it is compared with.
    it, other = scores[..., None], scores[:, :, None]
    earlier = block < block[:, None]
    rank = _count((other > it) | ((other == it) & earlier))
    chosen = (rank < limit[:, None, None]) & (block <= own)
    place = _count(chosen[:, :, None] & earlier)
    return _at_place(chosen, place, width)


def _count(pairs: Bool[Array, "X T M M2"]) -> Int32[Array, "X T M"]:
    return pairs.sum(axis=3, dtype=jnp.int32)


def _at_place(
    chosen: Bool[Array, "X T M"], place: Int32[Array, "X T M"], width: int
) -> Int32[Array, "X T R"]:
    """The chosen block of each place, -1 where none is."""
    block = lax.broadcasted_iota(jnp.int32, (1, 1, 1, chosen.shape[2]), 3)
    here = chosen[:, :, None] & (place[:, :, None] == jnp.arange(width, dtype=jnp.int32)[:, None])
    return jnp.where(here, block, -1).max(axis=3)
