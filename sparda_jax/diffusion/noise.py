"""Which tokens of a training window are masked (spec/herald.md, sec. 2.1)."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from sparda_jax.typing import Array, Bool, Float, Int

Scope = Literal["block", "sequence"]


@dataclasses.dataclass(frozen=True)
class NoiseConfig:
    """A token is masked where its u < p, u ~ U(0, 1); p = (1 - floor) t + floor, t ~ U(low, high).

    Attributes:
        scope: one rate for each block (Fast-dLLM v2) or for the whole window (SDAR, LLaDA2).
        low: of t.
        high: of t.
        floor: smallest rate.
        complementary: every window is seen a second time with the other tokens masked.
        suffix: share of blocks whose last p W tokens are masked instead, as when a block is decoded
            from the left; there the second copy masks half a block more, or less.
    """

    scope: Scope = "block"
    low: float = 0.0
    high: float = 1.0
    floor: float = 1e-3
    complementary: bool = True
    suffix: float = 0.0

    def __post_init__(self) -> None:
        if self.scope not in get_args(Scope):
            raise ValueError(f"noise scope must be 'block' or 'sequence', got {self.scope!r}")
        if not 0 <= self.low < self.high <= 1:
            raise ValueError(f"noise levels need 0 <= low < high <= 1, got {self.low}, {self.high}")
        if not 0 <= self.suffix <= 1:
            raise ValueError(f"suffix must be in [0, 1], got {self.suffix}")
        if not 0 <= self.floor < 1:
            raise ValueError(f"noise floor must be in [0, 1), got {self.floor}")


def rates(t: Float[Array, "*levels"], config: NoiseConfig) -> Float[Array, "*levels"]:
    """Mask rate of each noise level."""
    return (1 - config.floor) * t + config.floor


def draw_noise(
    seeds: Int[Array, " B"],
    length: int,
    block_size: int,
    config: NoiseConfig,
    editable: Bool[Array, "B T"] | None = None,
) -> tuple[Bool[Array, "B T"], Float[Array, "B T"]]:
    """Masks and their rates; a window's noise depends on its seed alone.

    At least one token of a window is masked: where chance masks none, the one with the smallest u.

    Args:
        seeds: of each window.
        length: T.
        block_size: W.
        config: how rates are drawn.
        editable: tokens that may be masked (not a prompt); None: all.
    """
    blocks = -(-length // block_size) if config.scope == "block" else 1

    def one(seed: Array) -> tuple[Array, Array]:
        level, chance = jax.random.split(jax.random.key(seed))
        t = jax.random.uniform(level, (blocks,), minval=config.low, maxval=config.high)
        each = block_size if config.scope == "block" else length
        rate = jnp.repeat(rates(t, config), each)[:length]
        u = jax.random.uniform(chance, (length,))
        if config.suffix:
            kind = jax.random.fold_in(jax.random.key(seed), 2)
            ordered = jax.random.uniform(kind, (-(-length // block_size),)) < config.suffix
            behind = block_size - 1 - jnp.arange(length) % block_size
            # The last token always, those before it as the rate grows.
            last = jnp.where(behind == 0, 0.0, (behind + 0.5) / block_size)
            u = jnp.where(jnp.repeat(ordered, block_size)[:length], last, u)
        return u, rate

    u, rate = jax.vmap(one)(seeds)
    if editable is not None:
        u = jnp.where(editable, u, jnp.inf)
    masked = u < rate
    least = (jnp.arange(length) == jnp.argmin(u, axis=1)[:, None]) & jnp.isfinite(u)
    return jnp.where(jnp.any(masked, axis=1, keepdims=True), masked, least), rate


def noisy_copies(
    masked: Bool[Array, "B T"],
    editable: Bool[Array, "B T"],
    block_size: int,
    config: NoiseConfig,
) -> Bool[Array, "C B T"]:
    """Masks of every noisy copy of a window.

    Args:
        masked: of the first.
        editable: tokens that may be masked.
        block_size: W.
        config: says whether there is a second.
    """
    if not config.complementary:
        return masked[None]
    other = ~masked
    if config.suffix:
        blocks = masked.reshape(len(masked), -1, block_size)
        place = jnp.arange(block_size)
        count = blocks.sum(-1, keepdims=True)
        ordered = jnp.all(blocks == (place >= block_size - count), axis=-1, keepdims=True)
        moved = (count + block_size // 2 - 1) % block_size + 1
        other = jnp.where(ordered, place >= block_size - moved, ~blocks).reshape(masked.shape)
    return jnp.stack([masked, editable & other])
