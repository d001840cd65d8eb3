"""Pool attention for at most 64 query rows per KV head: bound by memory, split over slots.

Two warpgroups per thread block, each with its own ring of tiles and its own running softmax;
they take turns over the slots and merge in shared memory.  With several thread blocks per
(request, KV head) the partial results leave in float32 with their log-sum-exp.
A wgmma has 64 rows although T*G may be 1: the padding costs tensor-core time that a kernel
bound by memory has to spare.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pool_attention import mosaic_tiles as tiles

WARPGROUPS = 2


def build(
    shape: tiles.Shape,
    *,
    splits: int,
    stages: int,
    scale: float,
    out_dtype: jnp.dtype,
    stage_weights: bool,
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The kernel for one set of shapes.

    Args:
        shape: sizes of the operands; ``rows`` a multiple of 8, at most 64.
        splits: thread blocks per (request, KV head).
        stages: tiles in flight per warpgroup.
        scale: factor on the dot products.
        out_dtype: dtype of the output: that of the queries, or float32 to be merged.
        stage_weights: pass softmax weights through shared memory (for the simulator).

    Returns:
        Function (q [B,K,rows,H], slots, slot_ids, tail [B,K,2,E,H], tail_columns [B,KB,E], then
        tail_rows [B,KB,rows,E] and slot_bias where the shape has them) to
        (out [splits,B,K,rows,H], lse [splits,B,K,64]).
    """
    units = splits * WARPGROUPS

    def pool_attention_rows(q, slots, slot_ids, tail, tail_columns, *refs):
        rest = list(refs)
        tail_rows = rest.pop(0) if shape.row_mask else None
        slot_bias = rest.pop(0) if shape.slot_bias else None
        out, lse, q_tile, keys, values, columns, other, q_landed, *barriers = rest
        landed, tail_landed, merged, *staging = barriers
        batch, head, split = (lax.axis_index(name) for name in ("batch", "head", "split"))
        wg = lax.axis_index("wg")
        operands = tiles.select(
            batch, head, slots, slot_ids, tail, tail_columns, tail_rows, slot_bias
        )
        first = wg * stages
        ring = tiles.Ring(
            keys.at[wg],
            values.at[wg],
            columns.at[wg],
            _Offset(landed, first),
            _Offset(tail_landed, first),
        )
        stage_to = staging[0].at[wg] if staging else None
        unit = split * WARPGROUPS + wg
        main = lax.div(shape.steps - unit + (units - 1), units)
        # The last unit has the fewest slots to attend, so it takes the tail.
        total = main + (unit == units - 1).astype(jnp.int32) * shape.tail_tiles

        def step_ids(j):
            return tiles.step_slots(shape, operands, j * units + unit)

        def load(j, ids):
            stage = lax.rem(j, stages)

            @pl.when(j < main)
            def _slots():
                tiles.load_slots(shape, operands, ring, stage, ids)

            if shape.tail_tiles:

                @pl.when((j >= main) & (j < total))
                def _tail():
                    tiles.load_tail(shape, operands, ring, stage, j - main)

        @pl.when(wg == 0)
        def _load_q():
            plgpu.copy_gmem_to_smem(q.at[batch, head], q_tile.at[pl.ds(0, shape.rows)], q_landed)

        # Ids are read one step before their copy starts: a load from global memory takes as
        # long as a quarter of a tile's arithmetic.
        ahead = tuple(step_ids(jnp.int32(j)) for j in range(stages + 1))
        for j in range(stages):
            load(jnp.int32(j), ahead[j])
        plgpu.barrier_wait(q_landed)

        def slot_step(j, state):
            carry, ahead = state
            ids, stage = ahead[0], lax.rem(j, stages)
            next_ids = step_ids(j + (stages + 1))

            def attend(*carry):
                plgpu.barrier_wait(ring.landed.at[stage])
                return tiles.attend(
                    q_tile,
                    ring.keys.at[stage],
                    ring.values.at[stage],
                    carry,
                    scale=scale,
                    columns=tiles.slot_columns(shape, ring, stage, ids),
                    staging=stage_to,
                )

            carry = lax.cond(tiles.named(ids), attend, lambda *carry: carry, *carry)
            load(j + stages, ahead[stages])
            return carry, (*ahead[1:], next_ids)

        def tail_step(j, carry):
            stage = lax.rem(j, stages)
            plgpu.barrier_wait(ring.tail_landed.at[stage])
            tiles.clear_unseen_values(ring, stage)
            rows = None
            if shape.row_mask:
                at = pl.ds((j - main) * shape.tile_tokens, shape.tile_tokens)
                rows = plgpu.load(
                    operands.tail_rows.at[:, at], layout=plgpu.Layout.WGMMA, optimized=False
                )
            carry = tiles.attend(
                q_tile,
                ring.keys.at[stage],
                ring.values.at[stage],
                carry,
                scale=scale,
                columns=plgpu.load(ring.columns.at[stage], layout=tiles.BY_COLUMN),
                rows=rows,
                staging=stage_to,
            )
            load(j + stages, none)
            return carry

        carry, _ = lax.fori_loop(0, main, slot_step, (tiles.initial(shape.head_dim), ahead))
        none = tuple(jnp.int32(-1) for _ in range(shape.slots_per_tile))
        if shape.tail_tiles:
            carry = lax.fori_loop(main, total, tail_step, carry)

        @pl.when(wg == 1)
        def _hand_over():
            for ref, array in zip(other, carry, strict=True):
                ref[...] = array
            plgpu.barrier_arrive(merged)

        @pl.when(wg == 0)
        def _merge():
            plgpu.barrier_wait(merged)
            layouts = (plgpu.Layout.WGMMA, tiles.BY_ROW, tiles.BY_ROW)
            theirs: Any = tuple(
                plgpu.load(ref, layout=layout) for ref, layout in zip(other, layouts, strict=True)
            )
            result, row_lse = tiles.finish(tiles.merge(carry, theirs))
            # Both of what held the queries and the other half have been read.
            result_tile = q_tile if out_dtype == shape.dtype else other[0]
            result_tile[...] = result.astype(out_dtype)
            other[1][...] = row_lse
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                result_tile.at[pl.ds(0, shape.rows)], out.at[split, batch, head]
            )
            plgpu.copy_smem_to_gmem(other[1], lse.at[split, batch, head])
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        pool_attention_rows,
        out_type=[
            jax.ShapeDtypeStruct(
                (splits, shape.batch, shape.heads, shape.rows, shape.head_dim), out_dtype
            ),
            jax.ShapeDtypeStruct((splits, shape.batch, shape.heads, tiles.ROWS), jnp.float32),
        ],
        grid=(splits, shape.heads, shape.batch),
        grid_names=("split", "head", "batch"),
        num_threads=WARPGROUPS,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=_scratch(shape, stages, stage_weights),
    )


def shared_bytes(shape: tiles.Shape, stages: int) -> int:
    """Shared memory of one thread block, without the simulator's staging buffer."""
    item, h = jnp.dtype(shape.dtype).itemsize, shape.head_dim
    ring = WARPGROUPS * stages * shape.tile_tokens * (2 * h * item + 4)
    return ring + tiles.ROWS * h * (item + 4) + 4096


class _Offset:
    """A reference to barriers, counted from ``first``."""

    def __init__(self, ref: Any, first: jax.Array) -> None:
        self._ref, self._first = ref, first

    @property
    def at(self) -> "_Offset":
        return self

    def __getitem__(self, index: jax.Array) -> Any:
        return self._ref.at[self._first + index]


def _scratch(shape: tiles.Shape, stages: int, stage_weights: bool) -> list[Any]:
    tok, h, dtype = shape.tile_tokens, shape.head_dim, shape.dtype
    rows, single = tiles.ROWS, jnp.float32
    ring = (WARPGROUPS, stages, tok)
    scratch = [
        plgpu.SMEM((rows, h), dtype, transforms=tiles.swizzled(dtype)),
        plgpu.SMEM((*ring, h), dtype, transforms=tiles.swizzled(dtype)),
        plgpu.SMEM((*ring, h), dtype, transforms=tiles.swizzled(dtype)),
        plgpu.SMEM(ring, single),
        (
            plgpu.SMEM((rows, h), single, transforms=tiles.swizzled(single)),
            plgpu.SMEM((rows,), single),
            plgpu.SMEM((rows,), single),
        ),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=shape.slot_copies, num_barriers=WARPGROUPS * stages),
        plgpu.Barrier(num_arrivals=3, num_barriers=WARPGROUPS * stages),
        plgpu.Barrier(),
    ]
    if stage_weights:
        scratch.append(plgpu.SMEM((WARPGROUPS, rows, tok), dtype, transforms=tiles.swizzled(dtype)))
    return scratch
