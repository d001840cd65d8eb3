"""Pool attention for more than 64 query rows per KV head: bound by the tensor cores.

A thread block takes ``CONSUMERS`` x 64 query rows of one (request, KV head) and walks over all
slots and the tail.  One warpgroup fills a ring of tiles, the others read every tile and keep
their rows' running softmax, so that the softmax of one can run beside the products of the other.

Ran on an H200 with every slot named; since then the producer also keeps account of steps
that name none (simulated with race detection, not yet run).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pool_attention import mosaic_tiles as tiles

CONSUMERS = 2
# Query rows of one thread block.
BLOCK_ROWS = CONSUMERS * tiles.ROWS


def build(
    shape: tiles.Shape, *, stages: int, scale: float, stage_weights: bool
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The kernel for one set of shapes.

    Args:
        shape: sizes of the operands; ``rows`` a multiple of ``BLOCK_ROWS``.
        stages: tiles in flight.
        scale: factor on the dot products.
        stage_weights: pass softmax weights through shared memory (for the simulator).

    Returns:
        Function (q [B,K,rows,H], slots, slot_ids, tail [B,K,2,E,H], tail_columns [B,KB,E], then
        tail_rows [B,1,rows,E] and slot_bias [B,K,steps*TOK] where the shape has them) to
        (out [B,K,rows,H], lse [B,K,rows]).
    """

    def pool_attention_block(q, slots, slot_ids, tail, tail_columns, *refs):
        rest = list(refs)
        tail_rows = rest.pop(0) if shape.row_mask else None
        slot_bias = rest.pop(0) if shape.slot_bias else None
        out, lse, q_tiles, keys, values, columns, row_lse, q_landed, *barriers = rest
        landed, tail_landed, consumed, turn, *staging = barriers
        batch, head, tile = (lax.axis_index(name) for name in ("batch", "head", "tile"))
        wg = lax.axis_index("wg")
        operands = tiles.select(
            batch, head, slots, slot_ids, tail, tail_columns, tail_rows, slot_bias, None
        )
        ring = tiles.Ring(keys, values, columns, landed, tail_landed)

        @pl.when(wg == CONSUMERS)
        def _produce():
            plgpu.set_max_registers(40, action="decrease")

            def reuse(stage, used):
                # A barrier counts arrivals, not who arrives: consumers must not arrive for a
                # step that they skip, or one that runs ahead would stand in for the other.
                @pl.when((lax.shift_right_logical(used, stage) & 1) == 1)
                def _wait():
                    plgpu.barrier_wait(consumed.at[stage])

            def produce_slots(j, used):
                ids, stage = tiles.step_slots(shape, operands, j), lax.rem(j, stages)
                named = tiles.named(ids)

                @pl.when(named)
                def _load():
                    reuse(stage, used)
                    tiles.load_slots(shape, operands, ring, stage, j, ids)

                return used | lax.shift_left(named.astype(jnp.int32), stage)

            def produce_tail(tail_tile, used):
                stage = lax.rem(tail_tile + shape.steps, stages)
                reuse(stage, used)
                tiles.load_tail(shape, operands, ring, stage, tail_tile)
                return used | lax.shift_left(jnp.int32(1), stage)

            used = lax.fori_loop(0, shape.steps, produce_slots, jnp.int32(0))
            if shape.tail_tiles:
                used = lax.fori_loop(0, shape.tail_tiles, produce_tail, used)
            # Every phase of a barrier is waited for, so that none outlives the kernel.
            for stage in range(stages):
                reuse(jnp.int32(stage), used)

        @pl.when(wg < CONSUMERS)
        def _consume():
            plgpu.set_max_registers(232, action="increase")
            first = tile * BLOCK_ROWS + wg * tiles.ROWS
            q_tile = q_tiles.at[wg]
            plgpu.copy_gmem_to_smem(
                q.at[batch, head, pl.ds(first, tiles.ROWS)], q_tile, q_landed.at[wg]
            )
            plgpu.barrier_wait(q_landed.at[wg])
            attend: dict[str, Any] = {
                "scale": scale,
                "staging": staging[0].at[wg] if staging else None,
            }

            def slot_step(j, carry):
                stage, ids = lax.rem(j, stages), tiles.step_slots(shape, operands, j)

                def attend_slots(*carry):
                    plgpu.barrier_wait(landed.at[stage])
                    return tiles.attend(
                        q_tile,
                        keys.at[stage],
                        values.at[stage],
                        carry,
                        columns=tiles.slot_columns(shape, ring, stage, ids),
                        **attend,
                    )

                named = tiles.named(ids)
                carry = lax.cond(named, attend_slots, lambda *carry: carry, *carry)

                @pl.when(named)
                def _release():
                    plgpu.barrier_arrive(consumed.at[stage])

                return carry

            def tail_step(tail_tile, carry):
                stage = lax.rem(tail_tile + shape.steps, stages)
                plgpu.barrier_wait(tail_landed.at[stage])

                @pl.when(wg == 0)
                def _clear():
                    tiles.clear_unseen_values(ring, stage)

                # The other warpgroups read the values only after they are cleared.
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(turn)
                rows = None
                if shape.row_mask:
                    at = pl.ds(tail_tile * shape.tile_tokens, shape.tile_tokens)
                    rows = plgpu.load(
                        operands.tail_rows.at[pl.ds(first, tiles.ROWS), at],
                        layout=plgpu.Layout.WGMMA,
                        optimized=False,
                    )
                carry = tiles.attend(
                    q_tile,
                    keys.at[stage],
                    values.at[stage],
                    carry,
                    columns=plgpu.load(columns.at[stage], layout=tiles.BY_COLUMN),
                    rows=rows,
                    **attend,
                )
                plgpu.barrier_arrive(consumed.at[stage])
                return carry

            carry = lax.fori_loop(0, shape.steps, slot_step, tiles.initial(shape.head_dim))
            if shape.tail_tiles:
                carry = lax.fori_loop(0, shape.tail_tiles, tail_step, carry)
            result, result_lse = tiles.finish(carry)
            # The queries are no longer needed: their tile takes the output.
            q_tile[...] = result.astype(shape.dtype)
            row_lse[wg] = result_lse
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_tile, out.at[batch, head, pl.ds(first, tiles.ROWS)])
            plgpu.copy_smem_to_gmem(row_lse.at[wg], lse.at[batch, head, pl.ds(first, tiles.ROWS)])
            plgpu.wait_smem_to_gmem(0)

    rows = (shape.batch, shape.heads, shape.rows)
    return plgpu.kernel(
        pool_attention_block,
        out_type=[
            jax.ShapeDtypeStruct((*rows, shape.head_dim), shape.dtype),
            jax.ShapeDtypeStruct(rows, jnp.float32),
        ],
        # Neighbouring thread blocks share their keys and values: the second read is from L2.
        grid=(shape.batch, shape.heads, shape.rows // BLOCK_ROWS),
        grid_names=("batch", "head", "tile"),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=_scratch(shape, stages, stage_weights),
    )


def shared_bytes(shape: tiles.Shape, stages: int) -> int:
    """Shared memory of one thread block, without the simulator's staging buffer."""
    item, h = jnp.dtype(shape.dtype).itemsize, shape.head_dim
    return stages * shape.tile_tokens * (2 * h * item + 4) + BLOCK_ROWS * (h * item + 4) + 4096


def _scratch(shape: tiles.Shape, stages: int, stage_weights: bool) -> list[Any]:
    tok, h, dtype, rows = shape.tile_tokens, shape.head_dim, shape.dtype, tiles.ROWS
    swizzled = tiles.swizzled(dtype)
    scratch = [
        plgpu.SMEM((CONSUMERS, rows, h), dtype, transforms=swizzled),
        plgpu.SMEM((stages, tok, h), dtype, transforms=swizzled),
        plgpu.SMEM((stages, tok, h), dtype, transforms=swizzled),
        plgpu.SMEM((stages, tok), jnp.float32),
        plgpu.SMEM((CONSUMERS, rows), jnp.float32),
        plgpu.Barrier(num_barriers=CONSUMERS),
        plgpu.Barrier(num_arrivals=shape.slot_copies, num_barriers=stages),
        plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
        plgpu.Barrier(num_arrivals=CONSUMERS),
    ]
    if stage_weights:
        scratch.append(plgpu.SMEM((CONSUMERS, rows, tok), dtype, transforms=swizzled))
    return scratch
