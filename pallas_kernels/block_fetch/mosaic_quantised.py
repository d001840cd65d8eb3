"""Block fetch from a quantised pool to slots of a float dtype, as Mosaic GPU kernels for Hopper.

Half the bytes over the link; the multiprocessors that copy also convert.  Two ways, as in
``mosaic.py``: bulk copies into shared memory, or loads into registers for a ``<host>``-typed pool.
Ran on an H200 (jax 0.11.2), both ways.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.block_fetch.tuning import FetchConfig

_THREADS = 128


def ring_fetch(
    run: tuple[int, ...], dtype: jnp.dtype, wide: jnp.dtype, config: FetchConfig
) -> Callable[..., None]:
    """Kernel (pool, scales, source, target, count, after, slots_ref) with bulk copies.

    Args:
        run: [2, P, H].
        dtype: of the pool.
        wide: dtype of the slots.
        config: launch.
    """
    ctas, stages, group = config.ctas, config.stages, config.group
    layout = half_layout(run)

    def fetch_blocks_quantised(pool, scales, source, target, count, after, slots, buffers, landed):
        del after
        cta = lax.axis_index("cta")
        last = count[0] - 1
        groups = lax.div(count[0] + (group - 1), group)
        steps = lax.div(groups - cta + (ctas - 1), ctas)

        def index(step, i):
            # The last group is filled up with its last run: written twice, with the same values.
            return lax.min((step * ctas + cta) * group + i, last)

        def load(step):
            @pl.when(step < steps)
            def _load():
                stage = lax.rem(step, stages)
                for i in range(group):
                    plgpu.copy_gmem_to_smem(
                        pool.at[source[index(step, i)]], buffers.at[stage, i], landed.at[stage]
                    )

        for step in range(stages):
            load(jnp.int32(step))

        @pl.loop(0, steps)
        def _step(step):
            stage = lax.rem(step, stages)
            # Read before the wait, which hides them.
            runs = [source[index(step, i)] for i in range(group)]
            factors = [[scales[each, of] for of in range(run[0])] for each in runs]
            places = [target[index(step, i)] for i in range(group)]
            plgpu.barrier_wait(landed.at[stage])
            for i in range(group):
                for of in range(run[0]):
                    half = plgpu.load(buffers.at[stage, i, of], layout=layout, optimized=False)
                    slots[places[i], of] = _widened(half, factors[i][of], wide)
            # All threads have read the tile before the next copy overwrites it.
            plgpu.commit_smem()
            load(step + stages)

    return plgpu.kernel(
        fetch_blocks_quantised,
        out_type=(),
        grid=(ctas,),
        grid_names=("cta",),
        # Warpgroup semantics would lay the buffers out for the tensor cores.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        scratch_types=[
            plgpu.SMEM((stages, group, *run), dtype),
            plgpu.Barrier(num_arrivals=group, num_barriers=stages),
        ],
    )


def register_fetch(run: tuple[int, ...], wide: jnp.dtype, ctas: int) -> Callable[..., None]:
    """Kernel (pool, scales, source, target, count, after, slots_ref): through registers."""
    layout = half_layout(run)

    def fetch_blocks_quantised_registers(pool, scales, source, target, count, after, slots):
        del after
        cta = lax.axis_index("cta")
        steps = lax.div(count[0] - cta + (ctas - 1), ctas)

        @pl.loop(0, steps)
        def _step(step):
            i = step * ctas + cta
            for of in range(run[0]):
                half = plgpu.load(pool.at[source[i], of], layout=layout)
                slots[target[i], of] = _widened(half, scales[source[i], of], wide)

    return plgpu.kernel(
        fetch_blocks_quantised_registers,
        out_type=(),
        grid=(ctas,),
        grid_names=("cta",),
        scratch_types=(),
    )


def half_layout(run: tuple[int, ...]) -> Any:
    """Registers of the keys or the values of a run, at most 8 neighbours a thread.

    Raises:
        NotImplementedError: sizes that are no multiple of 128.
    """
    elements = math.prod(run[1:])
    if elements % _THREADS:
        raise NotImplementedError(
            f"{elements} elements of keys in a quantised run are no multiple of {_THREADS}"
        )
    return plgpu.Layout.WG_STRIDED(run[1:], vec_size=math.gcd(elements // _THREADS, 8))


def _widened(half: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return (half.astype(jnp.float32) * scale).astype(dtype)
