"""Pool attention for at most 64 query rows per KV head: bound by memory, split over slots.

The warpgroups of a thread block have a ring of tiles and a running softmax each; they take turns
over the slots and merge in shared memory.  With several thread blocks per (request, KV head)
these form a cluster: they leave partial results in global memory (which is L2 at this size), wait
for each other, and every one of them merges some of the rows.
A wgmma has 64 rows although T*G may be 1: the padding costs tensor-core time that a kernel
bound by memory has to spare.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pool_attention import mosaic_tiles as tiles

# Rows that one thread block merges at a time.
MERGED_ROWS = 8


def build(
    shape: tiles.Shape,
    *,
    splits: int,
    stages: int,
    warpgroups: int,
    scale: float,
    stage_weights: bool,
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The kernel for one set of shapes.

    Args:
        shape: sizes of the operands; ``rows`` a multiple of 8, at most 64.
        splits: thread blocks per (request, KV head), at most ``MAX_SPLITS``.
        stages: tiles in flight per warpgroup.
        warpgroups: of a thread block, two or three.
        scale: factor on the dot products.
        stage_weights: pass softmax weights through shared memory (for the simulator).

    Returns:
        Function (q [B,K,rows,H], slots, slot_ids, tail [B,K,2,E,H], tail_columns [B,KB,E], then
        tail_rows [B,1,64,E], slot_bias [B,K,steps*TOK] and slot_scales [B,K,2,R], of the named
        slots, where the shape has them) to
        (out [B,K,rows,H], lse [B,K,64]; partial results if there are several splits).
    """
    units = splits * warpgroups

    def pool_attention_rows(q, *refs):
        wg = lax.axis_index("wg")
        batch, head = lax.axis_index("batch"), lax.axis_index("head")
        split = lax.axis_index("split") if splits > 1 else jnp.int32(0)
        operands, rest = tiles.select(shape, batch, head, refs)
        out, lse, *rest = rest
        partial: Any = rest.pop(0) if splits > 1 else None
        statistics: Any = rest.pop(0) if splits > 1 else None
        q_tile, ((keys, values), other_acc), columns, other_rows, *barriers = rest
        q_landed, landed, tail_landed, finished, merged, *barriers = barriers
        handed = [
            tuple(ref.at[i] for ref in (other_acc, *other_rows)) for i in range(warpgroups - 1)
        ]
        # The first doubles as the buffer of the merged result.
        merged_tile = handed[0]
        arrived: Any = barriers.pop(0) if splits > 1 else None
        wide_keys: Any = barriers.pop(0).at[wg] if shape.quantised else None
        wide_values: Any = barriers.pop(0).at[wg] if shape.quantised else None
        stage_to = barriers.pop(0).at[wg] if barriers else None
        first = wg * stages
        ring = tiles.Ring(
            keys.at[wg],
            values.at[wg],
            columns.at[wg],
            _Offset(landed, first),
            _Offset(tail_landed, first),
        )
        # The tail is not quantised: then it takes the place of a widened tile.
        tail_ring = ring
        if shape.quantised:
            tail_ring = dataclasses.replace(
                ring, keys=_Stages(wide_keys), values=_Stages(wide_values)
            )
        unit = split * warpgroups + wg
        main = lax.div(shape.steps - unit + (units - 1), units)
        # The last unit has the fewest slots to attend, so it takes the tail.
        total = main + (unit == units - 1).astype(jnp.int32) * shape.tail_tiles

        def step_lists(j):
            step = j * units + unit
            return (
                tiles.step_slots(shape, operands, step),
                tiles.step_scales(shape, operands, step),
            )

        def load(j, ids):
            stage = lax.rem(j, stages)

            @pl.when(j < main)
            def _slots():
                tiles.load_slots(shape, operands, ring, stage, j * units + unit, ids)

            if shape.tail_tiles and not shape.quantised:

                @pl.when((j >= main) & (j < total))
                def _tail():
                    tiles.load_tail(shape, operands, tail_ring, stage, j - main)

        @pl.when(wg == 0)
        def _load_q():
            plgpu.copy_gmem_to_smem(q.at[batch, head], q_tile.at[pl.ds(0, shape.rows)], q_landed)

        # Ids are read one step before their copy starts: a load from global memory takes as
        # long as a quarter of a tile's arithmetic.
        ahead = tuple(step_lists(jnp.int32(j)) for j in range(stages + 1))
        for j in range(stages):
            load(jnp.int32(j), ahead[j][0])
        plgpu.barrier_wait(q_landed)

        def slot_step(j, state):
            carry, ahead = state
            (ids, scales), stage = ahead[0], lax.rem(j, stages)
            upcoming = step_lists(j + (stages + 1))

            def attend(*carry):
                plgpu.barrier_wait(ring.landed.at[stage])
                tile_keys, tile_values = ring.keys.at[stage], ring.values.at[stage]
                if shape.quantised:
                    tiles.widen(tile_keys, wide_keys)
                    tiles.widen(tile_values, wide_values)
                    plgpu.commit_smem()
                    tile_keys, tile_values = wide_keys, wide_values
                return tiles.attend(
                    q_tile,
                    tile_keys,
                    tile_values,
                    carry,
                    scale=scale,
                    columns=tiles.slot_columns(shape, ring, stage, ids),
                    scales=tiles.spread(shape, scales),
                    staging=stage_to,
                )

            carry = lax.cond(tiles.named(ids), attend, lambda *carry: carry, *carry)
            load(j + stages, ahead[stages][0])
            return carry, (*ahead[1:], upcoming)

        def tail_step(j, carry):
            stage = lax.rem(j, stages)
            if shape.quantised:
                tiles.load_tail(shape, operands, tail_ring, stage, j - main)
            plgpu.barrier_wait(ring.tail_landed.at[stage])
            tiles.clear_unseen_values(tail_ring, stage)
            rows = None
            if shape.row_mask:
                at = pl.ds((j - main) * shape.tile_tokens, shape.tile_tokens)
                rows = plgpu.load(
                    operands.tail_rows.at[:, at], layout=plgpu.Layout.WGMMA, optimized=False
                )
            carry = tiles.attend(
                q_tile,
                tail_ring.keys.at[stage],
                tail_ring.values.at[stage],
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

        # What is handed over takes the memory of the tiles, of all warpgroups.
        plgpu.barrier_arrive(finished)
        for i, refs_of_one in enumerate(handed):

            @pl.when(wg == i + 1)
            def _hand_over(refs_of_one=refs_of_one):
                plgpu.barrier_wait(finished)
                for ref, array in zip(refs_of_one, carry, strict=True):
                    ref[...] = array
                plgpu.barrier_arrive(merged)

        @pl.when(wg == 0)
        def _merge():
            plgpu.barrier_wait(merged)
            layouts = (plgpu.Layout.WGMMA, tiles.BY_ROW, tiles.BY_ROW)
            both = carry
            for refs_of_one in handed:
                theirs: Any = tuple(
                    plgpu.load(ref, layout=layout)
                    for ref, layout in zip(refs_of_one, layouts, strict=True)
                )
                both = tiles.merge(both, theirs)
            if splits == 1:
                result, row_lse = tiles.finish(both)
                # What held the queries, and what was handed over, has been read.
                q_tile[...] = result.astype(shape.dtype)
                merged_tile[1][...] = row_lse
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(q_tile.at[pl.ds(0, shape.rows)], out.at[batch, head])
                plgpu.copy_smem_to_gmem(merged_tile[1], lse.at[batch, head])
                plgpu.wait_smem_to_gmem(0)
            else:
                for ref, array in zip(merged_tile, both, strict=True):
                    ref[...] = array
                plgpu.commit_smem()
                part = (batch, head, split)
                plgpu.copy_smem_to_gmem(merged_tile[0].at[pl.ds(0, shape.rows)], partial.at[part])
                for i in range(2):
                    plgpu.copy_smem_to_gmem(merged_tile[1 + i], statistics.at[(*part, i)])
                plgpu.wait_smem_to_gmem(0)
                plgpu.barrier_arrive(arrived)
                plgpu.barrier_wait(arrived)

                @pl.loop(0, -(-shape.rows // (splits * MERGED_ROWS)))
                def _combine(i):
                    first_row = (i * splits + split) * MERGED_ROWS

                    @pl.when(first_row < shape.rows)
                    def _rows():
                        _merge_rows(
                            shape, splits, first_row, partial.at[batch, head],
                            statistics.at[batch, head], out.at[batch, head], lse.at[batch, head],
                            merged_tile[1],
                        )  # fmt: skip

    rows = (shape.batch, shape.heads, shape.rows)
    out_type = [
        jax.ShapeDtypeStruct((*rows, shape.head_dim), shape.dtype),
        jax.ShapeDtypeStruct((*rows[:2], tiles.ROWS), jnp.float32),
    ]
    launch: dict[str, Any] = {"grid": (shape.heads, shape.batch), "grid_names": ("head", "batch")}
    if splits > 1:
        parts = (*rows[:2], splits)
        out_type += [
            jax.ShapeDtypeStruct((*parts, shape.rows, shape.head_dim), jnp.float32),
            jax.ShapeDtypeStruct((*parts, 2, tiles.ROWS), jnp.float32),
        ]
        launch |= {"cluster": (splits,), "cluster_names": ("split",)}
    return plgpu.kernel(
        pool_attention_rows,
        out_type=out_type,
        **launch,
        num_threads=warpgroups,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=_scratch(shape, splits, stages, warpgroups, stage_weights),
    )


def _merge_rows(
    shape: tiles.Shape,
    splits: int,
    first_row: jax.Array,
    partial: Any,
    statistics: Any,
    out: Any,
    lse: Any,
    row_lse: Any,
) -> None:
    """Merges the partial results of a few rows over the splits and writes them.

    Args:
        shape: sizes.
        splits: number of partial results.
        first_row: of ``MERGED_ROWS``.
        partial: [splits,rows,H] in global memory, not yet divided by the sums.
        statistics: [splits,2,64]: maxima (of scores times log2 e) and sums.
        out: [rows,H] in global memory.
        lse: [64] in global memory.
        row_lse: [64] in shared memory, free to use.
    """
    at = pl.ds(pl.multiple_of(first_row, MERGED_ROWS), MERGED_ROWS)
    layout = _merge_layout(shape.head_dim)
    by_row = layout.reduce(1)

    def load(ref: Any, layout: Any) -> jax.Array:
        return plgpu.load(ref, layout=layout, optimized=False)

    maxima = [load(statistics.at[i, 0, at], by_row) for i in range(splits)]
    sums = [load(statistics.at[i, 1, at], by_row) for i in range(splits)]
    parts = [load(partial.at[i, at], layout) for i in range(splits)]
    largest = functools.reduce(jnp.maximum, maxima)
    decays = [jnp.exp2(maximum - largest) for maximum in maxima]
    total = functools.reduce(jnp.add, [s * d for s, d in zip(sums, decays, strict=True)])
    acc = functools.reduce(
        jnp.add,
        [
            part * lax.broadcast_in_dim(decay, part.shape, [0])
            for part, decay in zip(parts, decays, strict=True)
        ],
    )
    result, merged_lse = tiles.finish((acc, largest, total))
    out[at] = result.astype(shape.dtype)
    mine = row_lse.at[pl.ds(0, MERGED_ROWS)]
    mine[...] = merged_lse
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(mine, lse.at[at])
    plgpu.wait_smem_to_gmem(0)


def _merge_layout(head_dim: int) -> Any:
    """Registers of an [8, H] tile: a row is 16 threads of one warp."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((MERGED_ROWS, head_dim), (2, head_dim), (head_dim // 16,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )


def shared_bytes(shape: tiles.Shape, stages: int, warpgroups: int) -> int:
    """Shared memory of one thread block, without the simulator's staging buffer."""
    item, slot_item = (jnp.dtype(each).itemsize for each in (shape.dtype, shape.slot_dtype))
    h, tokens = shape.head_dim, warpgroups * shape.tile_tokens
    ring = max(stages * tokens * 2 * h * slot_item, (warpgroups - 1) * tiles.ROWS * h * 4)
    wide = tokens * 2 * h * item if shape.quantised else 0
    return ring + stages * tokens * 4 + wide + tiles.ROWS * h * item + 4096


class _Stages:
    """One buffer in the place of a ring of them."""

    def __init__(self, ref: Any) -> None:
        self._ref = ref

    @property
    def at(self) -> "_Stages":
        return self

    def __getitem__(self, stage: jax.Array) -> Any:
        del stage
        return self._ref


class _Offset:
    """A reference to barriers, counted from ``first``."""

    def __init__(self, ref: Any, first: jax.Array) -> None:
        self._ref, self._first = ref, first

    @property
    def at(self) -> "_Offset":
        return self

    def __getitem__(self, index: jax.Array) -> Any:
        return self._ref.at[self._first + index]


def _scratch(
    shape: tiles.Shape, splits: int, stages: int, warpgroups: int, stage_weights: bool
) -> list[Any]:
    tok, h, dtype = shape.tile_tokens, shape.head_dim, shape.dtype
    rows, single = tiles.ROWS, jnp.float32
    ring, passive = (warpgroups, stages, tok), warpgroups - 1
    keys = plgpu.SMEM((*ring, h), shape.slot_dtype, transforms=tiles.swizzled(shape.slot_dtype, h))
    wide = plgpu.SMEM((warpgroups, tok, h), dtype, transforms=tiles.swizzled(dtype))
    scratch = [
        plgpu.SMEM((rows, h), dtype, transforms=tiles.swizzled(dtype)),
        # What the warpgroups hand over needs no memory of its own: room for more tiles.
        plgpu.RefUnion(
            (keys, keys), plgpu.SMEM((passive, rows, h), single, transforms=tiles.swizzled(single))
        ),
        plgpu.SMEM(ring, single),
        (plgpu.SMEM((passive, rows), single), plgpu.SMEM((passive, rows), single)),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=shape.slot_copies, num_barriers=warpgroups * stages),
        plgpu.Barrier(num_arrivals=3, num_barriers=warpgroups * stages),
        plgpu.Barrier(num_arrivals=warpgroups),
        plgpu.Barrier(num_arrivals=passive),
    ]
    if splits > 1:
        scratch.append(plgpu.ClusterBarrier(collective_axes=("split",)))
    if shape.quantised:
        scratch += [wide, wide]
    if stage_weights:
        scratch.append(plgpu.SMEM((warpgroups, rows, tok), dtype, transforms=tiles.swizzled(dtype)))
    return scratch
