"""Rotary position embedding, half-split convention: channel i is paired with i + H/2.

    q'_i       = q_i cos(t w_i) - q_{i+H/2} sin(t w_i)
    q'_{i+H/2} = q_{i+H/2} cos(t w_i) + q_i sin(t w_i),      w_i = theta^(-2i/H) / f_i

Angles, cos and sin are float32. One table serves a model and a requested maximum length; for
LongRoPE that length alone decides between the short and the long factors f, so a token keeps its
angle however far the sequence has grown (spec/sparda.md, "Where we deviate").

Where the embedding is partial, tables are narrower than a head: H is then the number of rotated
channels, the first of the head, and the others pass unchanged.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from sparda_jax.config import RopeConfig
from sparda_jax.typing import Array, Float, Int

# Cosine and sine of every position, float32 [length, H] each.
RopeTable = tuple[Array, Array]


def inverse_frequencies(config: RopeConfig, length: int) -> np.ndarray:
    """Angle per token of each channel pair, float64 [H/2].

    Args:
        config: the model's rotary embedding.
        length: the requested maximum length, tokens.
    """
    half = config.head_dim // 2
    inverse = config.theta ** (-np.arange(half, dtype=np.float64) / half)
    if config.kind == "longrope":
        long = length > config.original_max_position_embeddings
        return inverse / np.asarray(config.long_factor if long else config.short_factor)
    if config.kind == "llama3":
        # Waves that turn at least high_freq_factor times in the original context stay, those that
        # turn at most low_freq_factor times are slowed by `factor`, the rest are interpolated.
        turns = config.original_max_position_embeddings * inverse / (2 * math.pi)
        span = config.high_freq_factor - config.low_freq_factor
        keep = np.clip((turns - config.low_freq_factor) / span, 0, 1)
        return inverse * (keep + (1 - keep) / config.factor)
    if config.kind == "yarn":
        # The channel whose wave turns so many times in the original context.
        original = config.original_max_position_embeddings
        first, last = (
            half * math.log(original / (turns * 2 * math.pi)) / math.log(config.theta)
            for turns in (config.beta_fast, config.beta_slow)
        )
        low = max(math.floor(first), 0)
        high = min(math.ceil(last), config.head_dim - 1)
        slowed = np.clip((np.arange(half) - low) / max(high - low, 1e-3), 0, 1)
        return inverse * (1 - slowed + slowed / config.factor)
    return inverse


def rope_at(
    config: RopeConfig, positions: Int[Array, "*rows"], length: int
) -> tuple[Float[Array, "*rows H"], Float[Array, "*rows H"]]:
    """Cosine and sine for given positions, computed rather than looked up.

    Args:
        config: the model's rotary embedding.
        positions: absolute token positions.
        length: the requested maximum length, tokens; see `inverse_frequencies`.
    """
    inverse = inverse_frequencies(config, length).astype(np.float32)
    angles = positions.astype(jnp.float32)[..., None] * np.concatenate([inverse, inverse])
    scale = np.float32(config.attention_factor)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rope_table(config: RopeConfig, length: int) -> RopeTable:
    """Cosine and sine of positions 0 .. length-1, built once for a model and maximum length."""
    return rope_at(config, jnp.arange(length, dtype=jnp.int32), length)


def rope_rows(
    table: RopeTable,
    positions: Int[Array, "*rows"],
) -> tuple[Float[Array, "*rows H"], Float[Array, "*rows H"]]:
    """Rows of a table; positions must lie inside it (they are clipped, which XLA does anyway)."""
    cos, sin = table
    return jnp.take(cos, positions, axis=0, mode="clip"), jnp.take(
        sin, positions, axis=0, mode="clip"
    )


def apply_rope(
    x: Float[Array, "B T N H"], cos: Float[Array, "B T Rot"], sin: Float[Array, "B T Rot"]
) -> Float[Array, "B T N H"]:
    """Rotates the first channels of every head, as many as the table has, in float32.

    Args:
        x: queries or keys.
        cos: rows of a table; Rot is H but for partial rotary embedding.
        sin: likewise.

    Returns:
        The dtype of `x`.
    """
    width = cos.shape[-1]
    half = width // 2
    wide = x[..., :width].astype(jnp.float32)
    turned = jnp.concatenate([-wide[..., half:], wide[..., :half]], axis=-1)
    out = wide * cos[:, :, None, :] + turned * sin[:, :, None, :]
    rotated = jax.lax.convert_element_type(out, x.dtype)
    if width == x.shape[-1]:
        return rotated
    return jnp.concatenate([rotated, x[..., width:]], axis=-1)
