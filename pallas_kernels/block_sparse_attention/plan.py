"""What the block-sparse kernel must visit: unions of block lists as bit sets, in plain XLA.

A tile is two groups of neighbouring tokens, one group per consumer warpgroup.  Its blocks fall
into four classes: wanted by both groups, by the first only, by the second only, and blocks
that some token of the tile sees only in part (its own block), which need the causal mask.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

SHARED, FIRST, SECOND, PARTIAL = range(4)


class Plan(NamedTuple):
    """Bit sets of one call.  X tiles of 2 * group tokens, Y = ceil(M / 32) words.

    Attributes:
        classes: bit j % 32 of word j // 32 says that block j is in the class (SHARED, ...).
        counts: blocks in each class.
        members: bit t % 32 of ``[t // 32, j]`` says that token t selected block j.
    """

    classes: Int32[Array, "B K X 4 Y"]
    counts: Int32[Array, "B K X 4"]
    members: Int32[Array, "B K T32 M32"]


def make_plan(
    ids: Int32[Array, "B K T R"],
    positions: Int32[Array, "B T"],
    *,
    num_blocks: int,
    block_size: int,
    group: int,
    split: bool,
) -> Plan:
    """Bit sets of the unions of the block lists of ``group`` and ``2 * group`` tokens.

    Args:
        ids: block lists, any order; below 0 or from ``num_blocks`` on: nothing.
        positions: position of each token.
        num_blocks: M.
        block_size: P.
        group: tokens of one consumer; T is a multiple of ``2 * group`` and of 32.
        split: without it the classes FIRST and SECOND stay empty.
    """
    b, k, t, _ = ids.shape
    y = -(-num_blocks // 32)
    words = _token_words(ids, num_blocks, y)
    by_group = _any_bit(words.reshape(b, k, t // group, group, y), 3)
    first, second = by_group[:, :, 0::2], by_group[:, :, 1::2]

    # A block is whole for a token if its last token is at or before the token's position.
    whole_blocks = (positions + 1) // block_size
    whole_blocks = whole_blocks.reshape(b, t // (2 * group), 2 * group).min(-1)
    bits = whole_blocks[:, None, :, None] - 32 * jnp.arange(y, dtype=jnp.int32)
    whole = jnp.where(
        bits >= 32, jnp.uint32(0xFFFFFFFF), (jnp.uint32(1) << jnp.clip(bits, 0, 31)) - 1
    )
    if split:
        classes = [first & second & whole, first & ~second & whole, second & ~first & whole]
    else:
        none = jnp.zeros_like(first)
        classes = [(first | second) & whole, none, none]
    classes.append((first | second) & ~whole)
    stacked = jnp.stack(classes, axis=3)
    counts = lax.population_count(stacked).astype(jnp.int32).sum(-1)
    return Plan(_signed(stacked), counts, _signed(_members(words)))


def _token_words(ids: Array, num_blocks: int, y: int) -> Array:
    """uint32 [B, K, T, Y]: the set of blocks of each token."""
    # Comparing beats a scatter: one fused reduction, no atomics, repeated ids count once.  Lists
    # go first so that each thread of the reduction runs through one list.
    ids = jnp.moveaxis(ids, 3, 0)
    valid = (ids >= 0) & (ids < num_blocks)
    word = jnp.where(valid, ids >> 5, -1)[..., None]
    bit = jnp.uint32(1) << (ids & 31).astype(jnp.uint32)
    here = word == jnp.arange(y, dtype=jnp.int32)
    return _any_bit(jnp.where(here, bit[..., None], jnp.uint32(0)), 0)


def _members(words: Array) -> Array:
    """uint32 [B, K, T/32, 32 Y]: the bit matrix transposed, tokens in the word.

    The producer could gather a block's bits from its tokens' words; measured, the issue slots
    which that takes from the consumers cost more than this pass (random lists: 8 %).
    """
    b, k, t, y = words.shape
    words = words.reshape(b, k, t // 32, 32, y, 1)
    lane = jnp.arange(32, dtype=jnp.uint32)
    bits = (words >> lane) & 1
    return _any_bit(bits << lane[:, None, None], 3).reshape(b, k, t // 32, 32 * y)


def _any_bit(x: Array, axis: int) -> Array:
    return lax.reduce(x, jnp.uint32(0), lax.bitwise_or, (axis,))


def _signed(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)
