"""Exact top-k of block scores, ids ascending, as a Mosaic GPU kernel.

One warpgroup per row of scores.  The k-th largest score is found by bisection over its bits,
counting in registers; among equal scores a second bisection finds the highest id that still
fits (ties go to the lowest ids).  The chosen ids then leave as bit words, from which thread r
picks the r-th set bit.  Every step is a function of the scores alone: deterministic.
"""

from collections.abc import Callable

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32

# Scores of one chunk: 64 words of 32 bits.
CHUNK = 2048
# Words looked at together when ids are unpacked.
_UNROLL = 8
# Blocks that the registers of a warpgroup hold: 64 scores a thread.
MAX_BLOCKS = 8192
NEVER = np.int32(-(2**31))


def sortable(scores: Float32[Array, "*S"]) -> Int32[Array, "*S"]:
    """Integers in the order of the scores; above ``NEVER``, and 0.0 and -0.0 are equal."""
    bits = lax.bitcast_convert_type(scores + 0.0, jnp.int32)
    return bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))


def top_k(rows: int, blocks: int, width: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The kernel for one set of shapes.

    Args:
        rows: rows of scores.
        blocks: scores of a row, a multiple of ``CHUNK`` up to ``MAX_BLOCKS``.
        width: length of the output.

    Returns:
        Function (keys int32[rows, blocks] from ``sortable`` or NEVER, limit int32[rows]) to
        (ids int32[rows, width], count int32[rows]): the ``limit`` largest keys that are not
        NEVER, ascending ids, -1 behind them.
    """
    chunks, words = blocks // CHUNK, blocks // 32
    # A multiple of the threads, and what of it a bulk copy of whole 16 bytes can leave out.
    padded = -(-width // 128) * 128
    stored = width if width % 4 == 0 else padded
    id_bits = blocks.bit_length() - 1

    def top_k_kernel(keys, chunked, limits, ids, counts, word_ref, size_ref, id_ref):
        row = lax.axis_index("row")
        flat = plgpu.Layout.WG_STRIDED((blocks,), vec_size=4)
        x = plgpu.load(keys.at[row], layout=flat)

        def count(mask):
            return jnp.sum(mask.astype(jnp.int32))

        k = lax.min(limits[row], count(x > NEVER))
        # Unsigned order is signed order with the top bit flipped.
        threshold, exact = _bisect(32, lambda value: count(x >= (value ^ NEVER)), k)
        threshold = threshold ^ NEVER
        missing = k - count(x > threshold)
        position = plgpu.broadcasted_iota(jnp.int32, (blocks,), 0, layout=flat)
        tied = jnp.where(x == threshold, position, jnp.int32(blocks))
        # With exactly k scores at or above the threshold no tie is left out.
        last = _last_tie(id_bits, lambda value: count(tied < value), missing)
        last = lax.select(exact | (missing == 0), jnp.int32(blocks), last)
        last = lax.select(k == 0, jnp.int32(-1), last)

        shape = (64, 32)
        i = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        bit = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        for chunk in range(chunks):
            y = plgpu.load(chunked.at[row, chunk], layout=plgpu.Layout.WGMMA, optimized=False)
            block = chunk * CHUNK + i * 32 + bit
            chosen = ((y > threshold) | ((y == threshold) & (block <= last))) & (y > NEVER)
            flags = jnp.where(chosen, jnp.ones_like(bit), jnp.zeros_like(bit))
            word_ref[chunk * 64 : (chunk + 1) * 64] = lax.shift_left(flags, bit).sum(axis=1)
            size_ref[chunk * 64 : (chunk + 1) * 64] = flags.sum(axis=1)

        id_ref[...] = _unpack(word_ref, size_ref, words, padded, k)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(id_ref.at[:stored], ids.at[row])
        counts[row] = k
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        top_k_kernel,
        out_type=[
            jax.ShapeDtypeStruct((rows, stored), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
        ],
        grid=(rows,),
        grid_names=("row",),
        scratch_types=[plgpu.SMEM((size,), jnp.int32) for size in (words, words, padded)],
    )

    def select(keys: jax.Array, limits: jax.Array) -> tuple[jax.Array, jax.Array]:
        ids, counts = kernel(keys, keys.reshape(rows, chunks, 64, 32), limits)
        return ids[:, :width], counts

    return select


def _bisect(bits, at_least, k):
    """Largest value with ``at_least(value) >= k``, from the top bit; True when it equals k."""

    def going(state):
        bit, _, exact = state
        return (bit >= 0) & jnp.logical_not(exact)

    def step(state):
        bit, value, _ = state
        candidate = value | lax.shift_left(jnp.int32(1), bit)
        found = at_least(candidate)
        return bit - 1, lax.select(found >= k, candidate, value), found == k

    _, value, exact = lax.while_loop(
        going, step, (jnp.int32(bits - 1), jnp.int32(0), jnp.bool_(False))
    )
    return value, exact


def _last_tie(bits, below, missing):
    """Id of the tie that is number ``missing``, where ``below(v)`` counts ties of lower id."""

    def step(i, value):
        candidate = value | lax.shift_left(jnp.int32(1), jnp.int32(bits - 1) - i)
        return lax.select(below(candidate) < missing, candidate, value)

    return lax.fori_loop(0, bits, step, jnp.int32(0))


def _unpack(word_ref, size_ref, words, width, k):
    """Thread r takes the r-th set bit of all words; -1 from k on."""
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=1)
    rank = plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=layout)
    zero = rank ^ rank

    def find(i, state):
        word, index, base, seen = state
        first = i * _UNROLL
        # All reads first: they wait for shared memory together.
        loaded = [(word_ref[first + j], size_ref[first + j]) for j in range(_UNROLL)]
        for j, (bits, size) in enumerate(loaded):
            here = (rank >= seen) & (rank < seen + size)
            word = jnp.where(here, bits, word)
            index = jnp.where(here, first + j, index)
            base = jnp.where(here, seen, base)
            seen = seen + size
        return word, index, base, seen

    word, index, base, _ = lax.fori_loop(
        0, words // _UNROLL, find, (zero, zero, zero, jnp.int32(0))
    )
    skip = rank - base
    word = lax.fori_loop(0, 31, lambda i, word: jnp.where(i < skip, word & (word - 1), word), word)
    lowest = word & (-word)
    return jnp.where(rank < k, index * 32 + 31 - lax.clz(lowest), jnp.int32(-1))
