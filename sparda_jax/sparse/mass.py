"""True attention mass by block: what an ideal selector would go by."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.grouping import MASKED, group_queries
from sparda_jax.typing import Array, Float, Int


def block_mass(
    q: Float[Array, "B T N H"],
    keys: Float[Array, "B K S H"],
    positions: Int[Array, "B T"],
    block_size: int,
) -> Float[Array, "B K T M"]:
    """Attention of every block under dense causal attention, summed over the G heads: G in all.

    Of size N x T x S: callers take chunks of T.

    Args:
        q: queries after RoPE.
        keys: keys after RoPE, S a multiple of P.
        positions: of the queries.
        block_size: P.
    """
    batch, count, heads, width = q.shape
    groups, length = keys.shape[1:3]
    # 16-bit products are exact in the float32 sum; float32 ones are taken as such.
    queries = group_queries(q, groups).astype(keys.dtype)
    dots = jnp.einsum("bkth,bksh->bkts", queries, keys, preferred_element_type=jnp.float32)
    shape = (batch, groups, heads // groups, count, length)
    scores = dots.reshape(shape) * width**-0.5
    token = jnp.arange(length, dtype=jnp.int32)
    seen = token <= positions[:, None, None, :, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, MASKED), axis=-1)
    return weights.reshape(*shape[:-1], -1, block_size).sum((2, -1))
