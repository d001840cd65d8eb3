"""Block-sparse attention in plain jax.numpy: masked-dense over tiles of keys."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels import online_softmax
from pallas_kernels.chunking import map_chunks
from pallas_kernels.grouping import MASKED, group_queries, ungroup
from pallas_kernels.online_softmax import Carry

# Key tokens per tile: the scores of a tile stay in cache.  On two CPU cores (T=512, S=8192, N=9,
# K=3, H=64) 512 tokens take 75-136 ms where one softmax over all keys takes 204-338 ms; tiles of
# 256 to 1024 tokens are as good, 4096 takes 1.5 times as long.
TILE_TOKENS = 512
# Bound on the float32 scores of one tile, [B, N, T, tile].
CHUNK_BYTES = 32 << 20


def block_sparse_attention(
    q: Float[Array, "B T N H"],
    kv: Float[Array, "B K M 2 P H"],
    ids: Int32[Array, "B K T R"],
    positions: Int32[Array, "B T"],
    *,
    key_bias: Float[Array, "B K M P"] | None,
    scale: float,
    return_lse: bool,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """See ``pallas_kernels.block_sparse_attention.block_sparse_attention``.

    All keys of a tile are scored and the unselected ones masked: on the CPU that is cheaper
    than gathering per token.  A tile that no token of the chunk selects, or that lies after all
    of them, is skipped at run time.
    """
    b, _, n, _ = q.shape
    m, _, p = kv.shape[2:5]
    # At least one block, and no more than there are.
    tile = min(m, max(1, TILE_TOKENS // p))

    def attend(q: Array, ids: Array, positions: Array) -> tuple[Array, Array]:
        return _attend_chunk(q, kv, ids, positions, key_bias, scale, tile)

    chunk = max(1, CHUNK_BYTES // (4 * b * n * tile * p))
    out, lse = map_chunks(attend, chunk, (q, ids, positions), axes=(1, 2, 1), out_axes=(1, 1))
    return (out, lse) if return_lse else out


def _attend_chunk(
    q: Float[Array, "B T N H"],
    kv: Float[Array, "B K M 2 P H"],
    ids: Int32[Array, "B K T R"],
    positions: Int32[Array, "B T"],
    key_bias: Float[Array, "B K M P"] | None,
    scale: float,
    tile: int,
) -> tuple[Array, Array]:
    """Online softmax over the tiles, for one chunk of query tokens."""
    b, t, n, h = q.shape
    k, m, _, p = kv.shape[1:5]
    queries = group_queries(q, k) * scale
    rows = queries.shape[2]
    chosen = named_blocks(ids, m)
    last = jnp.max(positions)

    def step(carry: Carry, index: Array) -> tuple[Carry, None]:
        # The last tile is moved back to stay inside; what it then repeats is masked.
        start = jnp.minimum(index * tile, m - tile)
        picked = lax.dynamic_slice_in_dim(chosen, start, tile, axis=3)
        block = start + jnp.arange(tile, dtype=jnp.int32)
        picked = picked & (block >= index * tile)[None, None, None, :]

        def work(carry: Carry) -> Carry:
            part = lax.dynamic_slice_in_dim(kv, start, tile, axis=2).astype(jnp.float32)
            keys = part[:, :, :, 0].reshape(b, k, tile * p, h)
            values = part[:, :, :, 1].reshape(b, k, tile * p, h)
            s = jnp.einsum("bkth,bksh->bkts", queries, keys).reshape(b, k, n // k, t, tile, p)
            if key_bias is not None:
                bias = lax.dynamic_slice_in_dim(key_bias, start, tile, axis=2)
                s = s + bias.astype(jnp.float32)[:, :, None, None]
            token = start * p + jnp.arange(tile * p, dtype=jnp.int32).reshape(1, 1, 1, tile, p)
            seen = picked[..., None] & (token <= positions[:, None, :, None, None])
            s = jnp.where(seen[:, :, None], s, MASKED).reshape(b, k, rows, tile * p)
            return online_softmax.add(carry, s, values)

        needed = jnp.any(picked) & (start * p <= last)
        return lax.cond(needed, work, lambda carry: carry, carry), None

    carry = online_softmax.start((b, k, rows), h)
    carry, _ = lax.scan(step, carry, jnp.arange(-(-m // tile), dtype=jnp.int32))
    out, lse = online_softmax.finish(carry)
    return ungroup(out, t).astype(q.dtype), ungroup(lse, t)


def named_blocks(ids: Int32[Array, "B K T R"], num_blocks: int) -> Bool[Array, "B K T M"]:
    """Whether each block stands in the list; -1 and ids out of range name none."""
    block = jnp.arange(num_blocks, dtype=jnp.int32).reshape(1, 1, 1, 1, num_blocks)
    return jnp.any(ids[..., None] == block, axis=3)
