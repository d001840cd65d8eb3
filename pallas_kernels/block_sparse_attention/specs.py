"""Real shapes of block-sparse prefill, and block lists to test and time it with."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32


@dataclasses.dataclass(frozen=True)
class Spec:
    """One shape: batch 1, T query tokens at positions 0 .. T-1.

    Attributes:
        tokens: T.
        heads: N.
        kv_heads: K.
        head_dim: H.
        block_size: P.
        budget: R, blocks a token selects, forced ones included.
        init_blocks: forced at the start.
        local_blocks: forced up to and including the token's own block.
    """

    tokens: int
    heads: int = 32
    kv_heads: int = 2
    head_dim: int = 128
    block_size: int = 64
    budget: int = 96
    init_blocks: int = 1
    local_blocks: int = 33


# MiniCPM4.1-8B (spec/sparda.md 1.1): 96 blocks, of which 1 + 33 are forced.
MINICPM = {f"{length // 1024}K": Spec(length) for length in (24576, 32768, 65536, 131072)}


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def drifting_lists(
    spec: Spec, churn: float, seed: int = 0, dtype: jnp.dtype = jnp.int32
) -> Int32[Array, "1 K T R"]:
    """Lists whose free blocks drift: each is redrawn with probability ``churn`` at each token.

    The free range of a token is cut into as many strata as there are free blocks, and each
    free block stays in its stratum, so that a list never names a block twice.  ``churn`` 1
    makes neighbouring lists independent (the worst case).  A token with no more blocks than the
    budget takes them all.

    Args:
        spec: sizes.
        churn: probability in [0, 1] that a free block changes from one token to the next.
        seed: of the random numbers.
        dtype: of the ids.
    """
    forced = spec.init_blocks + spec.local_blocks
    free = spec.budget - forced
    key_change, key_draw = jax.random.split(jax.random.key(seed))
    shape = (spec.kv_heads, spec.tokens, free)
    own = jnp.arange(spec.tokens) // spec.block_size
    # One row per (redraw, slot): the n-th redraw of a slot reads row n.
    redraws = jnp.cumsum(
        jax.random.bernoulli(key_change, jnp.asarray(churn, jnp.float32), shape), axis=1
    )
    draws = jax.random.uniform(key_draw, shape)
    u = jnp.take_along_axis(draws, jnp.minimum(redraws, spec.tokens - 1), axis=1)
    span = jnp.maximum(own + 1 - forced, 0)[None, :, None]
    low, high = (jnp.arange(free) * span // free, jnp.arange(1, free + 1) * span // free)
    chosen = spec.init_blocks + low + (u * (high - low)).astype(dtype)
    init = jnp.broadcast_to(jnp.arange(spec.init_blocks), (*shape[:2], spec.init_blocks))
    local = own[:, None] - jnp.arange(spec.local_blocks)[::-1]
    local = jnp.broadcast_to(local, (*shape[:2], spec.local_blocks))
    ids = jnp.concatenate([init, chosen, local], axis=-1).astype(dtype)
    every = jnp.arange(spec.budget)
    few = jnp.where(every <= own[:, None], every, -1).astype(dtype)
    return jnp.where((own < spec.budget)[:, None], few, ids)[None]


@functools.partial(jax.jit, static_argnums=2)
def selected_pairs(ids: Array, positions: Array, block_size: int) -> Array:
    """(token, key) pairs that the lists select and causality allows, summed over KV heads.

    Args:
        ids: [B, K, T, R], no block twice.
        positions: [B, T].
        block_size: P.

    Returns:
        float32 scalar.
    """
    last = positions[:, None, :, None]
    seen = jnp.clip(last + 1 - ids * block_size, 0, block_size)
    return jnp.where(ids >= 0, seen, 0).astype(jnp.float32).sum()


@functools.partial(jax.jit, static_argnums=1)
def union_size(ids: Int32[Array, "B K T R"], tokens: int) -> Array:
    """Mean number of different blocks in the lists of ``tokens`` neighbouring tokens.

    Args:
        ids: block lists; -1 does not count.
        tokens: neighbours, a divisor of T.
    """
    b, k, t, r = ids.shape
    merged = jnp.sort(ids.reshape(b, k, t // tokens, tokens * r), axis=-1)
    first = merged[..., :1] >= 0
    new = jnp.concatenate([first, merged[..., 1:] != merged[..., :-1]], axis=-1)
    return (new & (merged >= 0)).sum(-1).mean()
