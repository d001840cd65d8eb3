"""Scores of compressed keys for one query token per request, as Mosaic GPU kernels.

Both read the visible compressed keys once, at memory speed, and write float32 scores.
"""

import math
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.registers import row_layout

LOG2E = math.log2(math.e)
# Compressed keys of one tile: the rows of one wgmma.
TILE = 64
LOWEST = -1e30


def forecast_scores(
    batch: int, heads: int, keys: int, head_dim: int, dtype: jnp.dtype, *, ctas: int, stages: int
) -> Callable[..., jax.Array]:
    """Kernel for raw dot products of one vector per KV head.

    Persistent thread blocks walk over all tiles of all (request, KV head) pairs.  No tensor
    cores: one vector leaves them idle, and the products are then exact in float32.

    Returns:
        Function (forecast [B,K,H], compressed [B,K,C,H], visible [B]) to
        scores [B,K,ceil(C/64)*64]; what lies at or after ``visible`` is undefined.
    """
    tiles = -(-keys // TILE)
    total = batch * heads * tiles
    layout = row_layout(head_dim)

    def forecast_scores_kernel(forecast, compressed, visible, out, key_tiles, vectors, landed):
        cta = lax.axis_index("cta")
        steps = lax.div(total - cta + (ctas - 1), ctas)

        def place(step):
            index = step * ctas + cta
            pair, tile = lax.div(index, tiles), lax.rem(index, tiles)
            return lax.div(pair, heads), lax.rem(pair, heads), tile * TILE

        def load(step):
            @pl.when(step < steps)
            def _inside():
                b, k, first = place(step)
                stage = lax.rem(step, stages)

                @pl.when(first < visible[b])
                def _load():
                    # The last tile may run into the next pair's keys: masked by the caller.
                    plgpu.copy_gmem_to_smem(
                        compressed.at[b, k, pl.ds(first, TILE)],
                        key_tiles.at[stage],
                        landed.at[stage],
                    )
                    plgpu.copy_gmem_to_smem(forecast.at[b, k], vectors.at[stage], landed.at[stage])

        for step in range(stages):
            load(jnp.int32(step))

        @pl.loop(0, steps)
        def _step(step):
            b, k, first = place(step)
            stage = lax.rem(step, stages)

            @pl.when(first < visible[b])
            def _score():
                plgpu.barrier_wait(landed.at[stage])
                x = plgpu.load(key_tiles.at[stage], layout=layout, optimized=False)
                f = plgpu.load(vectors.at[stage], layout=layout.reduce(0))
                # All threads have read the tile before the next copy overwrites it.
                plgpu.commit_smem()
                x, f = x.astype(jnp.float32), f.astype(jnp.float32)
                f = plgpu.layout_cast(lax.broadcast_in_dim(f, x.shape, [1]), layout)
                scores = (x * f).sum(axis=1)
                load(step + stages)
                out[b, k, pl.ds(first, TILE)] = scores

            @pl.when(first >= visible[b])
            def _skip():
                load(step + stages)

    return plgpu.kernel(
        forecast_scores_kernel,
        out_type=jax.ShapeDtypeStruct((batch, heads, tiles * TILE), jnp.float32),
        grid=(ctas,),
        grid_names=("cta",),
        # Warpgroup semantics would choose a swizzle, which needs C to be a multiple of 8.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        scratch_types=[
            plgpu.SMEM((stages, TILE, head_dim), dtype),
            plgpu.SMEM((stages, head_dim), dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        ],
    )


def multi_head_scores(
    batch: int,
    heads: int,
    keys: int,
    head_dim: int,
    group: int,
    dtype: jnp.dtype,
    *,
    chunks: int,
    stages: int,
    scale: float,
) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
    """Kernel for scaled dot products of a group of heads, with what a softmax needs.

    Keys are the rows of the wgmma and heads its columns, so that G = 16 wastes nothing.

    Args:
        batch: B.
        heads: K.
        keys: C, any number from 64 on.
        head_dim: H.
        group: query heads per KV head, padded to a multiple of 8.
        dtype: dtype of queries and keys.
        chunks: thread blocks per (request, KV head).
        stages: tiles in flight.
        scale: factor on the dot products.

    Returns:
        Function (q [B,K,group,H], compressed [B,K,C,H], visible [B]) to
        (scores * log2 e [B,K,ceil(C/64)*64,group], -inf where invisible in the last visible tile
        and undefined after it; running maxima and sums of 2^(score - maximum)
        [B,K,chunks,64,group], to be merged over the chunks and the 64 rows).
    """
    tiles = -(-keys // TILE)

    layout = row_layout(head_dim)

    def multi_head_scores_kernel(
        q, compressed, visible, out, maxima, sums, key_tiles, operand, q_tile, landed, q_landed
    ):
        chunk, k, b = (lax.axis_index(name) for name in ("chunk", "head", "batch"))
        seen = lax.div(visible[b] + (TILE - 1), TILE)
        steps = lax.max(lax.div(seen - chunk + (chunks - 1), chunks), 0)

        def load(step):
            @pl.when(step < steps)
            def _load():
                stage = lax.rem(step, stages)
                plgpu.copy_gmem_to_smem(
                    compressed.at[b, k, pl.ds((step * chunks + chunk) * TILE, TILE)],
                    key_tiles.at[stage],
                    landed.at[stage],
                )

        plgpu.copy_gmem_to_smem(q.at[b, k], q_tile, q_landed)
        for step in range(stages):
            load(jnp.int32(step))
        plgpu.barrier_wait(q_landed)
        row = plgpu.broadcasted_iota(jnp.int32, (TILE, group), 0, layout=plgpu.Layout.WGMMA)

        def score(step, carry):
            largest, total = carry
            stage = lax.rem(step, stages)
            first = (step * chunks + chunk) * TILE
            plgpu.barrier_wait(landed.at[stage])
            # A copy straight into the layout of a wgmma operand would need C to be a multiple
            # of 8: the keys of a pair start anywhere.
            operand[...] = plgpu.load(key_tiles.at[stage], layout=layout, optimized=False)
            # All threads have read the tile before the next copy overwrites it.
            plgpu.commit_smem()
            load(step + stages)

            def product(accumulator):
                plgpu.wgmma(accumulator, operand, q_tile.transpose((1, 0)))
                return accumulator[...]

            s = pl.run_scoped(product, plgpu.ACC((TILE, group), jnp.float32)) * (scale * LOG2E)
            s = jnp.where(row < visible[b] - first, s, -jnp.inf)
            out[b, k, pl.ds(first, TILE)] = s
            new_largest = jnp.maximum(largest, s)
            decayed = total * jnp.exp2(largest - new_largest)
            return new_largest, decayed + jnp.exp2(s - new_largest)

        zero = plgpu.layout_cast(jnp.zeros((TILE, group), jnp.float32), plgpu.Layout.WGMMA)
        largest, total = lax.fori_loop(0, steps, score, (zero + LOWEST, zero))
        maxima[b, k, chunk] = largest
        sums[b, k, chunk] = total

    statistics = jax.ShapeDtypeStruct((batch, heads, chunks, TILE, group), jnp.float32)
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.kernel(
        multi_head_scores_kernel,
        out_type=[
            jax.ShapeDtypeStruct((batch, heads, tiles * TILE, group), jnp.float32),
            statistics,
            statistics,
        ],
        grid=(chunks, heads, batch),
        grid_names=("chunk", "head", "batch"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        scratch_types=[
            plgpu.SMEM((stages, TILE, head_dim), dtype),
            plgpu.SMEM((TILE, head_dim), dtype, transforms=swizzled),
            plgpu.SMEM((group, head_dim), dtype, transforms=swizzled),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(),
        ],
    )
