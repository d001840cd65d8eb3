"""Expert MLP by a Mosaic GPU kernel for Hopper, bound by the memory of the weights.

A thread block multiplies up to 64 rows of one expert by 128 columns of its weights; experts
without rows have no thread block that works.  Every expert's rows begin at a multiple of 8, as
copies of tiles want it, so rows move to such places first and back at the end.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

ROWS = 64  # of one wgmma
COLUMNS = 128
DEPTH = 64
STAGES = 4
# Rows of one store, and what an expert's rows begin at a multiple of.
ALIGNED = 8
_DTYPES = (jnp.bfloat16, jnp.float16)


def expert_mlp(
    x: Float[Array, "rows D"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
    counts: Int32[Array, " E"],
) -> Float[Array, "rows D"]:
    """See ``expert_mlp.api.expert_mlp``; gate times up is rounded once.

    Raises:
        NotImplementedError: a dtype or sizes that the kernel does not serve.
    """
    if x.dtype not in _DTYPES or any(w.dtype != x.dtype for w in (gate, up, down)):
        raise NotImplementedError(f"rows of {x.dtype}, weights of {gate.dtype}, not one of 16 bit")
    for name, size in zip("DF", gate.shape[1:], strict=True):
        if size % COLUMNS:
            raise NotImplementedError(f"{name}={size} is no multiple of {COLUMNS}")
    return _run(x, gate, up, down, counts)


# One jit, so that a program with many layers lowers the kernels once for each shape.
@jax.jit
def _run(x: Array, gate: Array, up: Array, down: Array, counts: Array) -> Array:
    rows, experts = x.shape[0], counts.shape[0]
    touched = min(rows, experts)
    room = -(-(rows + (ALIGNED - 1) * touched) // ALIGNED) * ALIGNED + ROWS - ALIGNED
    ends = jnp.cumsum(counts)
    padded = (counts + ALIGNED - 1) // ALIGNED * ALIGNED
    starts = jnp.cumsum(padded) - padded
    number = jnp.arange(rows, dtype=jnp.int32)
    expert = _group_of(number, ends)
    at = number + jnp.take(starts - (ends - counts), expert, mode="clip")
    # Rows past the last expert's go nowhere.
    place = jnp.where(number < ends[-1], at, room)
    source = jnp.zeros(room, jnp.int32).at[place].set(number, mode="drop")
    tiles = _tiles(counts, starts, rows // ROWS + touched)
    wide = jnp.take(x, source, axis=0)
    inner = _matmul(wide, (gate, up), tiles)
    out = _matmul(inner, (down,), tiles)
    return jnp.take(out, at, axis=0, mode="clip")


def _group_of(number: Array, ends: Array) -> Array:
    """In which group each number lies; behind all: the number of groups."""
    return (number[:, None] >= ends).sum(1, dtype=jnp.int32)


def _tiles(counts: Array, starts: Array, most: int) -> tuple[Array, Array, Array]:
    """Expert, first row over ``ALIGNED`` and rows of each tile; no rows behind the last."""
    each = (counts + ROWS - 1) // ROWS
    ends = jnp.cumsum(each)
    number = jnp.arange(most, dtype=jnp.int32)
    expert = _group_of(number, ends)
    first = (number - jnp.take(ends - each, expert, mode="clip")) * ROWS
    left = jnp.clip(jnp.take(counts, expert, mode="clip") - first, 0, ROWS)
    left = jnp.where(number < ends[-1], left, 0)
    begin = (jnp.take(starts, expert, mode="clip") + first) // ALIGNED
    return jnp.minimum(expert, counts.shape[0] - 1), begin, left


def _matmul(x: Array, weights: tuple[Array, ...], tiles: tuple[Array, Array, Array]) -> Array:
    """Rows of every tile by its expert's matrix; of two matrices silu(first) * second."""
    depth, columns = weights[0].shape[1:]
    steps, item = depth // DEPTH, jnp.dtype(x.dtype).itemsize
    stages = min(STAGES, steps)

    def expert_matmul(experts: Any, begins: Any, lefts: Any, x: Any, *refs: Any) -> None:
        matrices, (out, result, rows, *rest) = refs[: len(weights)], refs[len(weights) :]
        rings, (landed, consumed) = rest[: len(weights)], rest[len(weights) :]
        column, tile, wg = (lax.axis_index(name) for name in ("column", "tile", "wg"))
        expert, left = experts[tile], lefts[tile]
        first = begins[tile] * ALIGNED
        own = pl.ds(column * COLUMNS, COLUMNS)

        @pl.when((wg == 1) & (left > 0))
        def _produce() -> None:
            def load(step: Array, _: None) -> None:
                stage = lax.rem(step, stages)

                @pl.when(step >= stages)
                def _wait() -> None:
                    plgpu.barrier_wait(consumed.at[stage])

                deep = pl.ds(step * DEPTH, DEPTH)
                plgpu.copy_gmem_to_smem(
                    x.at[pl.ds(first, ROWS), deep], rows.at[stage], landed.at[stage]
                )
                for matrix, ring in zip(matrices, rings, strict=True):
                    plgpu.copy_gmem_to_smem(
                        matrix.at[expert, deep, own], ring.at[stage], landed.at[stage]
                    )

            lax.fori_loop(0, steps, load, None)
            # Every phase of a barrier is waited for, so that none outlives the kernel.
            lax.fori_loop(
                max(0, steps - stages),
                steps,
                lambda step, _: plgpu.barrier_wait(consumed.at[lax.rem(step, stages)]),
                None,
            )

        @pl.when((wg == 0) & (left > 0))
        def _consume() -> None:
            def products(*accumulators: Any) -> tuple[Array, ...]:
                def add(step: Array, _: None) -> None:
                    stage = lax.rem(step, stages)
                    plgpu.barrier_wait(landed.at[stage])
                    for accumulator, ring in zip(accumulators, rings, strict=True):
                        plgpu.wgmma(accumulator, rows.at[stage], ring.at[stage])
                    plgpu.wgmma_wait(len(rings))  # those of the step before have ended

                    @pl.when(step > 0)
                    def _release() -> None:
                        plgpu.barrier_arrive(consumed.at[lax.rem(step - 1, stages)])

                lax.fori_loop(0, steps, add, None)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(consumed.at[(steps - 1) % stages])
                return tuple(accumulator[...] for accumulator in accumulators)

            accumulators = [plgpu.ACC((ROWS, COLUMNS), jnp.float32)] * len(weights)
            values = pl.run_scoped(products, *accumulators)
            value = values[0]
            if len(values) > 1:
                value = value / (1 + jnp.exp(-value)) * values[1]
            result[...] = value.astype(result.dtype)
            plgpu.commit_smem()
            for part in range(0, ROWS, ALIGNED):

                @pl.when(part < left)
                def _store(part: int = part) -> None:
                    plgpu.copy_smem_to_gmem(
                        result.at[pl.ds(part, ALIGNED)],
                        out.at[pl.ds(first + part, ALIGNED), own],
                    )

            plgpu.wait_smem_to_gmem(0)

    swizzled = (plgpu.TilingTransform((8, 128 // item)), plgpu.SwizzleTransform(128))
    ring = plgpu.SMEM((stages, DEPTH, COLUMNS), x.dtype, transforms=swizzled)
    kernel = plgpu.kernel(
        expert_matmul,
        out_type=jax.ShapeDtypeStruct((x.shape[0], columns), x.dtype),
        # Neighbouring thread blocks read the same rows.
        grid=(columns // COLUMNS, tiles[0].shape[0]),
        grid_names=("column", "tile"),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=[
            plgpu.SMEM((ROWS, COLUMNS), x.dtype, transforms=swizzled),
            plgpu.SMEM((stages, ROWS, DEPTH), x.dtype, transforms=swizzled),
            *[ring] * len(weights),
            plgpu.Barrier(num_arrivals=1 + len(weights), num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
        ],
    )
    out: Array = kernel(*tiles, x, *weights)
    return out
