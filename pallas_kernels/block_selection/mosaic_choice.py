"""Exact top-k of block scores on Hopper (Mosaic GPU): the last step of block selection.

One warpgroup takes one row at a time, all its scores in registers as order-preserving
integers.  A threshold that exactly the budget reaches is found by bisection on its 32 bits (one
count a bit, and it stops when the count fits); where ties leave none, the last tie taken is
found by bisection on the block id, so that the lowest ids win.  The chosen blocks form a bit
set, whose n-th set bit is the n-th id.

Ran on an H200 (jax 0.11.2): equal to the reference on all shapes tried.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

# A warpgroup's layout has 64 rows; a row is one word of 32 blocks.
_UNIT = 64 * 32
# 128 scores a thread, as registers allow.
MAX_BLOCKS = 8 * _UNIT
ROWS_PER_BLOCK = 4
# Loads of four words overlap; rows have a multiple of 64.
_WORDS_A_STEP = 4
_LOWEST = np.int32(-(2**31))
_FORCED = np.int32(2**31 - 1)


def padded_blocks(num_blocks: int) -> int:
    """Blocks of a row of scores, whole units of the kernel's layout."""
    return -(-num_blocks // _UNIT) * _UNIT


def choose(
    scores: Float[Array, "X T M"],
    query_block: Int32[Array, "X T"],
    limit: Int32[Array, " X"],
    *,
    num_blocks: int,
    init_blocks: int,
    local_blocks: int,
    width: int,
    mask_future: bool,
) -> Int32[Array, "X T R"]:
    """Forces, chooses and sorts: see ``pallas_kernels.block_selection``.

    Args:
        scores: block scores, a row as long as ``padded_blocks``; what lies from ``num_blocks``
            on, or with ``mask_future`` after the row's own block, is never used.
        query_block: own block of each row.
        limit: blocks to choose in each batch.
        num_blocks: M.
        init_blocks: forced at the start.
        local_blocks: forced before the own block.
        width: ids a row at least; R is ``width`` rounded up to 128.
        mask_future: a block after the own one is never a candidate; else it is dropped after.

    Returns:
        Ids ascending, padded with -1.
    """
    x, t, padded = scores.shape
    words = padded // 32
    width = -(-width // 128) * 128
    rows = ROWS_PER_BLOCK if t % ROWS_PER_BLOCK == 0 else 1

    def body(*refs: Any) -> None:
        names = ("scores", "query_block", "limit", "out", "flags", "words", "ones")
        named = dict(zip(names, refs, strict=True))
        row = functools.partial(
            _row, named, num_blocks, init_blocks, local_blocks, width, mask_future
        )
        first = lax.axis_index("t") * rows
        lax.fori_loop(0, rows, lambda i, _: row(lax.axis_index("x"), first + i), None)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((x, t, width), jnp.int32),
        scratch_types=[plgpu.SMEM(s, jnp.int32) for s in ((words, 32), (words,), (words,))],
        grid=(x, t // rows),
        grid_names=("x", "t"),
        kernel_name="selection_choice",
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=2048),
    )(scores.reshape(x, t, words, 32), query_block, limit)


def _row(
    refs: dict[str, Any], num_blocks: int, init_blocks: int, local_blocks: int, width: int,
    mask_future: bool, x: Any, t: Any,
) -> None:  # fmt: skip
    """One row of the result."""
    own = refs["query_block"][x, t]

    @pl.when(own < 0)
    def _nothing() -> None:
        refs["out"][x, t] = _strided(width, -1)

    @pl.when(own >= 0)
    def _something() -> None:
        refs["flags"][...] = _chosen_flags(
            refs, num_blocks, init_blocks, local_blocks, mask_future, x, t, own
        )
        plgpu.commit_smem()
        # From one block after the other over all threads to one word a row.
        flags = plgpu.load(refs["flags"], layout=plgpu.Layout.WGMMA, optimized=False)
        words = flags.sum(axis=1)
        refs["words"][...] = words
        refs["ones"][...] = _ones(words)
        plgpu.commit_smem()
        refs["out"][x, t] = _nth_bits(refs, width, lax.div(own, 32) + 1)


def _chosen_flags(
    refs: dict[str, Any],
    num_blocks: int,
    init_blocks: int,
    local_blocks: int,
    mask_future: bool,
    x: Any,
    t: Any,
    own: Any,
) -> Any:
    """int32 [words, 32]: 1 << (block % 32) where chosen, else 0."""
    source = refs["scores"].at[x, t]
    layout = plgpu.Layout.WG_STRIDED(source.shape, vec_size=4)
    scores = plgpu.load(source, layout=layout)
    iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, scores.shape, layout=layout)
    bit = iota(1)
    block = iota(0) * 32 + bit
    candidates = jnp.minimum(own + 1, num_blocks) if mask_future else jnp.int32(num_blocks)
    keys = _ordered(scores)
    forced = (block < init_blocks) | ((block >= own - local_blocks) & (block <= own))
    keys = jnp.where(forced, _FORCED, keys)
    keys = jnp.where(block < candidates, keys, _LOWEST)
    wanted = jnp.minimum(refs["limit"][x], candidates)

    def undecided(state: Any) -> Any:
        bit, _, exact = state
        return (bit >= 0) & ~exact

    def halve(state: Any) -> Any:
        bit, value, _ = state
        higher = value | (jnp.int32(1) << bit)
        reached = _count(keys >= (higher ^ _LOWEST))
        return bit - 1, jnp.where(reached >= wanted, higher, value), reached == wanted

    # All candidates lie above the lowest integer, so where all are wanted, 1 is exact.
    every = wanted == candidates
    start = (jnp.int32(31), jnp.where(every, jnp.int32(1), jnp.int32(0)), every)
    _, value, exact = lax.while_loop(undecided, halve, start)
    value = value ^ _LOWEST
    # The largest id with fewer ties before it than are missing: the last tie that is taken.
    last = lax.cond(
        exact,
        lambda: jnp.int32(num_blocks),
        lambda: _last_tie(keys == value, block, wanted - _count(keys > value), num_blocks),
    )
    chosen = (keys > value) | ((keys == value) & (block <= last))
    chosen = chosen & (block <= own)
    return jnp.where(chosen, jnp.int32(1) << bit, 0)


def _last_tie(ties: Any, block: Any, missing: Any, num_blocks: int) -> Any:
    """The largest id with fewer than ``missing`` ties before it."""
    bits = (num_blocks - 1).bit_length()

    def step(i: Any, value: Any) -> Any:
        higher = value | (jnp.int32(1) << (bits - 1 - i))
        return jnp.where(_count(ties & (block < higher)) < missing, higher, value)

    return lax.fori_loop(0, bits, step, jnp.int32(0))


def _ordered(scores: Any) -> Any:
    """int32 in the order of the scores; -0 as 0, and -inf above the lowest integer."""
    bits = lax.bitcast_convert_type(scores + 0.0, jnp.int32)
    return jnp.where(bits < 0, bits ^ _FORCED, bits)


def _count(mask: Any) -> Any:
    return mask.astype(jnp.int32).sum()


def _ones(x: Any) -> Any:
    """Set bits of each int32, by adding neighbours (Mosaic GPU has no population count)."""
    shift = lambda x, n: lax.shift_right_logical(x, jnp.full_like(x, n))
    x = x - (shift(x, 1) & 0x55555555)
    x = (x & 0x33333333) + (shift(x, 2) & 0x33333333)
    x = (x + shift(x, 4)) & 0x0F0F0F0F
    return shift(x * 0x01010101, 24)


def _nth_bits(refs: dict[str, Any], width: int, words: Any) -> Any:
    """Position of the n-th set bit for every n < ``width``, -1 beyond the last."""
    n = plgpu.broadcasted_iota(
        jnp.int32, (width,), 0, layout=plgpu.Layout.WG_STRIDED((width,), vec_size=1)
    )

    def find(i: Any, state: Any) -> Any:
        before, word, offset, base = state
        for j in range(_WORDS_A_STEP):
            at = i * _WORDS_A_STEP + j
            ones = refs["ones"][at]
            inside = (n >= before) & (n < before + ones)
            word = jnp.where(inside, refs["words"][at], word)
            offset = jnp.where(inside, n - before, offset)
            base = jnp.where(inside, at * 32, base)
            before = before + ones
        return before, word, offset, base

    state = (jnp.int32(0), _strided(width, 0), _strided(width, 0), _strided(width, -1))
    _, word, offset, base = lax.fori_loop(0, pl.cdiv(words, _WORDS_A_STEP), find, state)
    position = base
    for half in (16, 8, 4, 2, 1):
        low = _ones(word & ((1 << half) - 1))
        upper = offset >= low
        offset = jnp.where(upper, offset - low, offset)
        word = jnp.where(upper, lax.shift_right_logical(word, jnp.full_like(word, half)), word)
        position = jnp.where(upper, position + half, position)
    return jnp.where(base >= 0, position, -1)


def _strided(width: int, value: int) -> Any:
    return plgpu.layout_cast(
        jnp.full((width,), value, jnp.int32), plgpu.Layout.WG_STRIDED((width,), vec_size=1)
    )
