"""Pool attention for more than 64 query rows per KV head: bound by the tensor cores.

A thread block takes ``CONSUMERS`` x 64 query rows of one (request, KV head) and walks over all
slots and the tail, or where ``mosaic.py`` splits the heads over a part of them.  One warpgroup
fills a ring of tiles, the others read every tile and keep their rows' running softmax, so that the
softmax of one can run beside the products of the other.  Of a quantised tile one consumer widens
the keys and the other the values, for both.

Ran on an H200 (jax 0.11.2).
"""

import dataclasses
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
        tail_rows [B,1,rows,E], slot_bias [B,K,steps*TOK] and slot_scales [B,K,2,R], of the named
        slots, where the shape has them; of split heads, slots and tail are those of the whole) to
        (out [B,K,rows,H], lse [B,K,rows]).
    """

    def pool_attention_block(q, *refs):
        batch, head, tile = (lax.axis_index(name) for name in ("batch", "head", "tile"))
        wg = lax.axis_index("wg")
        operands, rest = tiles.select(shape, batch, head, refs)
        out, lse, q_tiles, keys, values, columns, row_lse, q_landed, *barriers = rest
        landed, tail_landed, consumed, turn, *barriers = barriers
        wide: Any = barriers.pop(0) if shape.quantised else None
        tail_free: Any = barriers.pop(0) if shape.quantised else None
        staging = barriers
        ring = tiles.Ring(keys, values, columns, landed, tail_landed)
        # The tail is not quantised: it takes the place of the widened tiles.
        tail_ring = (
            ring if wide is None else dataclasses.replace(ring, keys=wide[0], values=wide[1])
        )

        def tail_stage(tail_tile):
            if wide is None:
                return lax.rem(tail_tile + shape.steps, stages)
            # The first, as a traced number: a constant index does not lower inside run_state.
            return tail_tile * 0

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
                stage = tail_stage(tail_tile)
                if shape.quantised:
                    plgpu.barrier_wait(tail_free)
                else:
                    reuse(stage, used)
                    used |= lax.shift_left(jnp.int32(1), stage)
                tiles.load_tail(shape, operands, tail_ring, stage, tail_tile)
                return used

            used = lax.fori_loop(0, shape.steps, produce_slots, jnp.int32(0))
            if shape.tail_tiles:
                used = lax.fori_loop(0, shape.tail_tiles, produce_tail, used)
            # Every phase of a barrier is waited for, so that none outlives the kernel.
            for stage in range(stages):
                reuse(jnp.int32(stage), used)
            if shape.quantised:
                plgpu.barrier_wait(tail_free)

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

            def widened(stage, turns):
                """The tile for both, half of it converted here."""
                # The buffer of the turn before the last: whoever is here has ended that one,
                # and the other has at least begun the last.
                buffer = lax.rem(turns, 2)
                for index, narrow in enumerate((keys, values)):

                    @pl.when(wg == index)
                    def _widen(index=index, narrow=narrow):
                        tiles.widen(narrow.at[stage], wide[index].at[buffer])

                plgpu.commit_smem()
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(turn)
                return wide[0].at[buffer], wide[1].at[buffer]

            def slot_step(j, state):
                carry, turns = state
                stage, ids = lax.rem(j, stages), tiles.step_slots(shape, operands, j)
                scales = tiles.step_scales(shape, operands, j)

                def attend_slots(*carry):
                    plgpu.barrier_wait(landed.at[stage])
                    tile = keys.at[stage], values.at[stage]
                    if shape.quantised:
                        tile = widened(stage, turns)
                    return tiles.attend(
                        q_tile,
                        *tile,
                        carry,
                        columns=tiles.slot_columns(shape, ring, stage, ids),
                        scales=tiles.spread(shape, scales),
                        **attend,
                    )

                named = tiles.named(ids)
                carry = lax.cond(named, attend_slots, lambda *carry: carry, *carry)
                if shape.quantised:
                    turns += named.astype(jnp.int32)

                @pl.when(named)
                def _release():
                    plgpu.barrier_arrive(consumed.at[stage])

                return carry, turns

            def tail_step(tail_tile, carry):
                stage = tail_stage(tail_tile)
                plgpu.barrier_wait(tail_landed.at[stage])

                @pl.when(wg == 0)
                def _clear():
                    tiles.clear_unseen_values(tail_ring, stage)

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
                    tail_ring.keys.at[stage],
                    tail_ring.values.at[stage],
                    carry,
                    columns=plgpu.load(columns.at[stage], layout=tiles.BY_COLUMN),
                    rows=rows,
                    **attend,
                )
                plgpu.barrier_arrive(tail_free if shape.quantised else consumed.at[stage])
                return carry

            start = (tiles.initial(shape.head_dim), jnp.int32(0))
            carry, _ = lax.fori_loop(0, shape.steps, slot_step, start)
            if shape.quantised:
                plgpu.barrier_arrive(tail_free)
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
    item, slot_item = (jnp.dtype(each).itemsize for each in (shape.dtype, shape.slot_dtype))
    h, tokens = shape.head_dim, shape.tile_tokens
    wide = 2 * tokens * 2 * h * item if shape.quantised else 0
    ring = stages * tokens * (2 * h * slot_item + 4)
    return ring + wide + BLOCK_ROWS * (h * item + 4) + 4096


def _scratch(shape: tiles.Shape, stages: int, stage_weights: bool) -> list[Any]:
    tok, h, dtype, rows = shape.tile_tokens, shape.head_dim, shape.dtype, tiles.ROWS
    swizzled, slot_dtype = tiles.swizzled(dtype), shape.slot_dtype
    scratch = [
        plgpu.SMEM((CONSUMERS, rows, h), dtype, transforms=swizzled),
        plgpu.SMEM((stages, tok, h), slot_dtype, transforms=tiles.swizzled(slot_dtype, h)),
        plgpu.SMEM((stages, tok, h), slot_dtype, transforms=tiles.swizzled(slot_dtype, h)),
        plgpu.SMEM((stages, tok), jnp.float32),
        plgpu.SMEM((CONSUMERS, rows), jnp.float32),
        plgpu.Barrier(num_barriers=CONSUMERS),
        plgpu.Barrier(num_arrivals=shape.slot_copies, num_barriers=stages),
        plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
        plgpu.Barrier(num_arrivals=CONSUMERS),
    ]
    if shape.quantised:
        wide = plgpu.SMEM((2, tok, h), dtype, transforms=swizzled)
        scratch += [(wide, wide), plgpu.Barrier(num_arrivals=CONSUMERS)]
    if stage_weights:
        scratch.append(plgpu.SMEM((CONSUMERS, rows, tok), dtype, transforms=swizzled))
    return scratch
