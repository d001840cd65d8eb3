"""Which masks of a block a denoising step replaces; `DenoiseParams` states the rules."""

from __future__ import annotations

import jax.numpy as jnp

from sparda_jax.diffusion.config import STRATEGIES, RuleState
from sparda_jax.typing import Array, Bool, Float, Int


def candidates(
    masked: Bool[Array, "B W"], sub_block: Int[Array, " B"]
) -> tuple[Bool[Array, "B W"], Int[Array, " B"]]:
    """Masks of the leftmost sub-block that has any, and its number (0 where there is no mask)."""
    number = jnp.arange(masked.shape[1]) // sub_block[:, None]
    first = jnp.take_along_axis(number, jnp.argmax(masked, axis=1)[:, None], axis=1)
    return masked & (number == first), first[:, 0]


def ranks(keys: Float[Array, "B W"]) -> Int[Array, "B W"]:
    """Place of each key in descending order, equal keys from left to right."""
    index = jnp.arange(keys.shape[1])
    other, own = keys[:, None, :], keys[:, :, None]
    before = (other > own) | ((other == own) & (index[None, None] < index[None, :, None]))
    return jnp.sum(before, axis=-1, dtype=jnp.int32)


def choose(
    probability: Float[Array, "B W"],
    entropy: Float[Array, "B W"],
    open_: Bool[Array, "B W"],
    step: Int[Array, " B"],
    rule: RuleState,
) -> Bool[Array, "B W"]:
    """Positions that are decided now; at least one where any is open.

    Args:
        probability: confidence of the token that each position would get.
        entropy: of each position's distribution, nats.
        open_: masks that may be replaced.
        step: denoising steps already done in this block.
        rule: of each request.
    """
    width = open_.shape[1]
    count = width // rule.steps + (step < width % rule.steps)
    count = jnp.minimum(jnp.maximum(count, 1), open_.sum(1))[:, None]
    confidence = jnp.where(open_, probability, -jnp.inf)
    rank = ranks(confidence)
    best = open_ & (rank < count)
    above = open_ & (probability > rule.threshold[:, None])
    certainty = ranks(jnp.where(open_, -entropy, -jnp.inf))
    spent = jnp.where(certainty[:, None, :] <= certainty[:, :, None], entropy[:, None, :], 0.0)
    spent = jnp.where(open_[:, None, :], spent, 0.0).sum(-1)
    chosen = {
        "sequential": open_ & (jnp.cumsum(open_, axis=1) <= count),
        "low_confidence_static": best,
        "low_confidence_dynamic": jnp.where(above.sum(1, keepdims=True) >= count, above, best),
        "entropy_bounded": open_ & ((spent < rule.entropy_bound[:, None]) | (certainty == 0)),
        "threshold_or_best": above | (open_ & (rank == 0)),
        "threshold_or_first": above | (open_ & (jnp.cumsum(open_, axis=1) == 1)),
    }
    stacked = jnp.stack([chosen[name] for name in STRATEGIES], axis=1)  # [B, strategy, W]
    return jnp.take_along_axis(stacked, rule.strategy[:, None, None], axis=1)[:, 0]
