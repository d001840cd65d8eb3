"""Compressed keys in plain jax.numpy."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.geometry import BlockGeometry


def compress_keys(
    keys: Float[Array, "B K S H"], geometry: BlockGeometry
) -> Float[Array, "B K C H"]:
    """See ``pallas_kernels.compressed_keys.compress_keys``."""
    b, k, s, h = keys.shape
    stride = geometry.kernel_stride
    per_window = geometry.kernel_size // stride
    count = geometry.num_compressed(s)
    # Every window is a sum of whole strides: sum each stride once, then add neighbours.
    strides = count + per_window - 1 if count else 0
    x = lax.slice_in_dim(keys, 0, strides * stride, axis=2).astype(jnp.float32)
    sums = x.reshape(b, k, strides, stride, h).sum(axis=3)
    total = jnp.zeros((b, k, count, h), jnp.float32)
    for i in range(per_window if count else 0):
        total = total + lax.slice_in_dim(sums, i, i + count, axis=2)
    return (total / geometry.kernel_size).astype(keys.dtype)


def compress_latest(window: Float[Array, "B K kernel H"]) -> Float[Array, "B K H"]:
    """See ``pallas_kernels.compressed_keys.compress_latest``."""
    return jnp.mean(window.astype(jnp.float32), axis=2).astype(window.dtype)
