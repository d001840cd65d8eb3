"""Teacher scores on Hopper: the two score kernels of block selection on the fine grid.

Two passes over the fine keys (log-sum-exp, then probabilities summed over the group and pooled
in registers), in chunks of query tokens that bound the scratch.

Ran on an H200 (jax 0.11.2): equal to the reference on all shapes tried.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.block_selection import mosaic_pooled, mosaic_prefill
from pallas_kernels.compressed_keys import compress_keys
from pallas_kernels.geometry import BlockGeometry

SCRATCH_BYTES = 256 * 2**20
# r + 1 products of at least 8 columns fit the registers of one warpgroup.
MAX_STRIDES = 16


def teacher_scores(
    q: Float[Array, "B T N H"],
    keys: Float[Array, "B K S H"],
    positions: Int32[Array, "B T"],
    *,
    fine: BlockGeometry,
    windows: int,
    scale: float,
) -> Float32[Array, "B K T C"]:
    """See ``pallas_kernels.teacher_scores.teacher_scores`` and its reference.

    Args:
        q: see there.
        keys: see there.
        positions: see there.
        fine: see there.
        windows: see there.
        scale: see there; must be positive.

    Raises:
        NotImplementedError: a shape, dtype or scale outside the kernels' limits.
    """
    b, t, n, h = q.shape
    k = keys.shape[1]
    r = fine.strides_per_block
    if r > MAX_STRIDES:
        raise NotImplementedError(f"{r} fine keys a window; the kernel takes {MAX_STRIDES}")
    mosaic_prefill.check_scores(h, q.dtype, keys.dtype, scale)
    fine_keys = compress_keys(keys, fine)
    columns = -(-max(windows, 1) // 64) * 64
    tile = mosaic_pooled.TILE
    chunk = max(tile, SCRATCH_BYTES // (b * k * columns * 4) // tile * tile)
    chunk = min(chunk, -(-t // tile) * tile)
    shape = mosaic_pooled.Shape(
        batch=b,
        kv_heads=k,
        group=n // k,
        head_dim=h,
        tokens=chunk,
        blocks=windows,
        columns=columns,
        compressed=fine_keys.shape[2],
        strides=r,
        multi_head=True,
        complete=True,
    )
    apart = mosaic_pooled.keys_apart(fine_keys, shape)
    whole = mosaic_pooled.keys_whole(fine_keys)
    visible = jnp.clip(fine.started_windows(positions), 0, fine_keys.shape[2])

    def one(q: Array, visible: Array) -> Array:
        tokens = q.shape[1]
        pad = chunk - tokens
        q = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0))).reshape(b * chunk, n, h)
        visible = jnp.pad(visible, ((0, 0), (0, pad)))
        lse = mosaic_pooled.log_sum_exp(shape, scale, q, whole, visible)
        scores = mosaic_pooled.pooled_scores(shape, scale, q, apart, visible, visible, lse)
        return scores.reshape(b, k, chunk, columns)[:, :, :tokens, :windows]

    if t <= chunk:
        return one(q, visible)

    # Written in place: neither stacked nor transposed, either of which would be a copy.
    def step(i: Array, out: Array) -> Array:
        start = jnp.minimum(i * chunk, t - chunk)
        part = one(
            lax.dynamic_slice_in_dim(q, start, chunk, 1),
            lax.dynamic_slice_in_dim(visible, start, chunk, 1),
        )
        return lax.dynamic_update_slice_in_dim(out, part, start, 2)

    out = jnp.zeros((b, k, t, windows), jnp.float32)
    return lax.fori_loop(0, -(-t // chunk), step, out)
