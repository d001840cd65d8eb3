"""KV blocks in 8 bits, with one scale for the keys and one for the values of a run."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Num

# Largest magnitude of each stored dtype.
LIMITS = {"int8": 127.0, "float8_e4m3fn": 448.0}


def quantise(
    kv: Float[Array, "*runs 2 P H"], dtype: DTypeLike
) -> tuple[Num[Array, "*runs 2 P H"], Float32[Array, "*runs 2"]]:
    """Values and scales with ``values * scales`` close to ``kv``.

    ``scale = max |x| / limit`` over the P*H numbers of a block's keys, and of its values; int8
    rounds to the nearest, so that it errs by at most half a scale.

    Args:
      kv: blocks.
      dtype: int8 or float8_e4m3fn.
    """
    limit = LIMITS[jnp.dtype(dtype).name]
    wide = kv.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=(-2, -1))
    scales = jnp.where(largest == 0, 1.0, largest / limit)
    scaled = jnp.clip(wide / scales[..., None, None], -limit, limit)
    if jnp.issubdtype(dtype, jnp.integer):
        scaled = jnp.round(scaled)
    return scaled.astype(dtype), scales


def dequantise(
    values: Num[Array, "*runs 2 P H"], scales: Float32[Array, "*runs 2"], dtype: DTypeLike
) -> Float[Array, "*runs 2 P H"]:
    """``values * scales``, computed in float32 and rounded to ``dtype``."""
    return (values.astype(jnp.float32) * scales[..., None, None]).astype(dtype)
