"""Softmax-weighted sums over keys that come in parts (running maximum and total)."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.grouping import MASKED

# (sum of weights times values, largest score so far, sum of weights), relative to the largest.
Carry = tuple[
    Float32[Array, "*rows H"],
    Float32[Array, "*rows"],
    Float32[Array, "*rows"],
]


def start(rows: tuple[int, ...], head_dim: int) -> Carry:
    """The carry before any key."""
    return (
        jnp.zeros((*rows, head_dim), jnp.float32),
        jnp.full(rows, MASKED, jnp.float32),
        jnp.zeros(rows, jnp.float32),
    )


def add(
    carry: Carry, scores: Float32[Array, "*rows S"], values: Float[Array, "*batch S H"]
) -> Carry:
    """Adds keys with the given scores; a score of MASKED (or below) counts for nothing.

    A row that has seen only masked keys holds garbage, which the first real score wipes
    out exactly (its factor is exp(MASKED - score) = 0), and ``finish`` otherwise.
    """
    out, largest, total = carry
    new = jnp.maximum(largest, jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - new[..., None])
    shrink = jnp.exp(largest - new)
    out = out * shrink[..., None] + jnp.matmul(weights, values)
    return out, new, total * shrink + weights.sum(axis=-1)


def finish(carry: Carry) -> tuple[Float32[Array, "*rows H"], Float32[Array, "*rows"]]:
    """Output and log-sum-exp; 0 and -inf for a row without any key."""
    out, largest, total = carry
    empty = largest <= MASKED
    total = jnp.where(empty, 1.0, total)
    out = jnp.where(empty[..., None], 0.0, out / total[..., None])
    return out, jnp.where(empty, -jnp.inf, largest + jnp.log(total))
