"""Bounded memory for the references: a function of query tokens, a chunk of them at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def map_chunks(
    function: Callable[..., Any],
    chunk: int,
    arrays: Sequence[jax.Array],
    axes: Sequence[int],
    out_axes: Sequence[int],
) -> tuple[jax.Array, ...]:
    """Applies ``function`` to chunks of the token axis, one after the other.

    The last chunk is padded with zeros, whose results are dropped, so ``function`` must treat
    tokens independently.

    Args:
        function: takes the chunks, returns a tuple of arrays.
        chunk: tokens per call; at least 1.
        arrays: arguments of ``function``.
        axes: token axis of each argument.
        out_axes: token axis of each result.

    Returns:
        The results, over all tokens.
    """
    length = arrays[0].shape[axes[0]]
    if length <= chunk:
        return tuple(function(*arrays))
    count = -(-length // chunk)

    def split(x: jax.Array, axis: int) -> jax.Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, count * chunk - length)
        x = jnp.pad(x, widths)
        shape = (*x.shape[:axis], count, chunk, *x.shape[axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), axis, 0)

    def merge(x: jax.Array, axis: int) -> jax.Array:
        x = jnp.moveaxis(x, 0, axis)
        shape = (*x.shape[:axis], count * chunk, *x.shape[axis + 2 :])
        return lax.slice_in_dim(x.reshape(shape), 0, length, axis=axis)

    pieces = tuple(split(x, axis) for x, axis in zip(arrays, axes, strict=True))
    results = lax.map(lambda xs: tuple(function(*xs)), pieces)
    return tuple(merge(x, axis) for x, axis in zip(results, out_axes, strict=True))
