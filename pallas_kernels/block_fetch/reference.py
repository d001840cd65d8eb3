"""Block copies in plain jax.numpy: a loop of slices, never a gather.

A gather from host memory does not trace, and where it is forced XLA runs it on the host
(jax 0.10, 0.11).  A slice of one run followed by a move is a copy XLA understands.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Num


def fetch_blocks(
    pool: Num[Array, "X 2 P H"],
    slots: Float[Array, "Y 2 P H"],
    source: Int32[Array, " A"],
    target: Int32[Array, " A"],
    count: Int32[Array, ""],
    *,
    pool_scales: Float32[Array, "X 2"] | None,
    after: Array | None = None,
) -> Float[Array, "Y 2 P H"]:
    """See ``pallas_kernels.block_fetch.fetch_blocks``; waits for nothing but what it reads."""
    del after

    def copy(i: Array, slots: Array) -> Array:
        run = lax.dynamic_index_in_dim(pool, _at(source, i), 0)
        run = jax.device_put(run, jax.memory.Space.Device)
        if pool_scales is not None:
            scales = lax.dynamic_index_in_dim(pool_scales, _at(source, i), 0)
            run = (run.astype(jnp.float32) * scales[..., None, None]).astype(slots.dtype)
        return lax.dynamic_update_index_in_dim(slots, run, _at(target, i), 0)

    return lax.fori_loop(0, count, copy, slots)


def write_blocks(
    pool: Float[Array, "X 2 P H"],
    blocks: Float[Array, "A 2 P H"],
    target: Int32[Array, " A"],
) -> Float[Array, "X 2 P H"]:
    """See ``pallas_kernels.block_fetch.write_blocks``."""
    space = jax.typeof(pool).memory_space
    # Blocks to write come first; the loop runs over these only (mostly none: a tail block
    # fills once in P steps).
    index = jnp.arange(target.shape[0], dtype=jnp.int32)
    _, order = lax.sort((jnp.where(target >= 0, 0, 1), index), num_keys=1, is_stable=True)

    def copy(i: Array, pool: Array) -> Array:
        at = _at(order, i)
        block = jax.device_put(lax.dynamic_index_in_dim(blocks, at, 0), space)
        return lax.dynamic_update_index_in_dim(pool, block, _at(target, at), 0)

    return lax.fori_loop(0, (target >= 0).sum(dtype=jnp.int32), copy, pool)


def _at(array: Int32[Array, " A"], i: Array) -> Int32[Array, ""]:
    return lax.dynamic_index_in_dim(array, i, 0, keepdims=False)
