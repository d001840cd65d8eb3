"""Teacher scores in plain jax.numpy: the contract, and the oracle of the kernel."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.block_selection.reference import multi_head_scores, pool_scores
from pallas_kernels.chunking import map_chunks
from pallas_kernels.compressed_keys import compress_keys
from pallas_kernels.geometry import BlockGeometry

# Bound on one chunk of float32 scores, [B, N, T, S].
CHUNK_BYTES = 64 << 20


def teacher_scores(
    q: Float[Array, "B T N H"],
    keys: Float[Array, "B K S H"],
    positions: Int32[Array, "B T"],
    *,
    fine: BlockGeometry,
    windows: int,
    scale: float,
) -> Float32[Array, "B K T C"]:
    """See ``pallas_kernels.teacher_scores.teacher_scores``.

    Args:
        q: see there.
        keys: see there.
        positions: see there.
        fine: the fine grid, whose "blocks" are the standard windows.
        windows: C.
        scale: see there.
    """
    fine_keys = compress_keys(keys, fine)

    def score(q: Array, visible: Array) -> tuple[Array]:
        mass = multi_head_scores(q, fine_keys, visible, scale=scale)
        return (pool_scores(mass, num_blocks=windows, geometry=fine),)

    chunk = max(1, CHUNK_BYTES // (4 * q.shape[0] * q.shape[2] * max(keys.shape[2], 1)))
    visible = jnp.clip(fine.started_windows(positions), 0, fine_keys.shape[2])
    (out,) = map_chunks(score, chunk, (q, visible), axes=(1, 1), out_axes=(2,))
    return out
