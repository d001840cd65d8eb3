"""Block fetch and write-back as Mosaic GPU kernels for Hopper.

The pool may lie in pinned host memory: the kernel reads it in place over PCIe.  Two ways, by
the type with which the caller was traced:

* device-typed pool (an ahead-of-time program with pinned ``in_shardings``, or a pool that is
  on the device): bulk copies through a ring of shared-memory buffers; 4 multiprocessors
  saturate the link.
* ``<host>``-typed pool (any jit): bulk copies are refused at trace time, so warps load into
  registers; needs more multiprocessors for a little less speed.

Ran on an H200 (jax 0.11.2), both ways, in and out of loops, in place.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Num

from pallas_kernels import interpret
from pallas_kernels.block_fetch import mosaic_quantised
from pallas_kernels.block_fetch.tuning import SHARED_BYTES, FetchConfig, fetch_config

# Bulk copies move multiples of 16 bytes.
_GRANULE = 16
_THREADS = 128
# Thread blocks of the register path; 8 reach 42-45 GB/s for runs of 32 KiB (development run, H200).
_LOAD_CTAS = 16


def fetch_blocks(
    pool: Num[Array, "X 2 P H"],
    slots: Float[Array, "Y 2 P H"],
    source: Int32[Array, " A"],
    target: Int32[Array, " A"],
    count: Int32[Array, ""],
    *,
    pool_scales: Float32[Array, "X 2"] | None = None,
    after: Array | None = None,
    config: FetchConfig | None = None,
) -> Float[Array, "Y 2 P H"]:
    """See ``block_fetch.api.fetch_blocks``; ``config`` overrides the launch shape.

    Raises:
        NotImplementedError: a run that is no multiple of 16 bytes or larger than shared
            memory; for a ``<host>``-typed or quantised pool, a run (or its keys) that is no
            multiple of 128 elements.
    """
    if source.shape[0] == 0:
        return slots
    if not is_host_typed(pool):
        config = config or fetch_config(_run_bytes(pool))
        _check_ring(pool, config)
        return _fetch_by_ring(
            pool, slots, source, target, count, pool_scales, after,
            config=config, simulated=interpret.is_active(),
        )  # fmt: skip
    run, ctas = pool.shape[1:], min(_LOAD_CTAS, source.shape[0])
    # ``run_state`` would make a reference of the pool, which JAX refuses in host memory.
    slots_ref = jax.new_ref(slots)
    lists = _operands(source, target, count, after)
    if pool_scales is None:
        _register_fetch(run, pool.dtype, ctas)(pool, *lists, slots_ref)
    else:
        kernel = mosaic_quantised.register_fetch(run, slots.dtype, ctas)
        kernel(pool, pool_scales, *lists, slots_ref)
    return jax.freeze(slots_ref)


# One jit, so that a program with many layers lowers the kernel once.
@functools.partial(jax.jit, static_argnames=("config", "simulated"))
def _fetch_by_ring(
    pool: Num[Array, "X 2 P H"],
    slots: Float[Array, "Y 2 P H"],
    source: Int32[Array, " A"],
    target: Int32[Array, " A"],
    count: Int32[Array, ""],
    pool_scales: Float32[Array, "X 2"] | None,
    after: Array | None,
    *,
    config: FetchConfig,
    simulated: bool,
) -> Float[Array, "Y 2 P H"]:
    """Bulk copies; ``simulated`` only tells two traces apart."""
    del simulated
    run, lists = pool.shape[1:], _operands(source, target, count, after)
    if pool_scales is None:
        kernel = _ring_fetch(run, pool.dtype, config)
        return _updated(slots, lambda ref: kernel(pool, *lists, ref))
    kernel = mosaic_quantised.ring_fetch(run, pool.dtype, slots.dtype, config)
    return _updated(slots, lambda ref: kernel(pool, pool_scales, *lists, ref))


def _operands(source: Array, target: Array, count: Array, after: Array | None) -> tuple[Array, ...]:
    """Those between the pool and the slots; the last is not read, its buffer makes a graph wait."""
    runs = lax.reshape(count, (1,))
    return source, target, runs, runs if after is None else after


def write_blocks(
    pool: Float[Array, "X 2 P H"],
    blocks: Float[Array, "A 2 P H"],
    target: Int32[Array, " A"],
    *,
    config: FetchConfig | None = None,
) -> Float[Array, "X 2 P H"]:
    """See ``block_fetch.api.write_blocks``; ``config`` overrides the launch shape.

    Raises:
        NotImplementedError: a ``<host>``-typed pool (JAX has no mutable reference to one);
            a run that is no multiple of 16 bytes or larger than shared memory.
    """
    if is_host_typed(pool):
        raise NotImplementedError("the write-back kernel needs a device-typed pool, got <host>")
    if target.shape[0] == 0:
        return pool
    config = config or FetchConfig(
        ctas=4, stages=max(1, min(4, SHARED_BYTES // _run_bytes(pool))), group=1
    )
    _check_ring(pool, config)
    kernel = _ring_write(pool.shape[1:], pool.dtype, config)
    return _updated(pool, lambda ref: kernel(blocks, target, ref))


def is_host_typed(array: Array) -> bool:
    """Whether the array's type says that it lies in host memory."""
    return jax.typeof(array).memory_space == jax.memory.Space.Host


def _updated(array: Array, update: Callable[[Any], None]) -> Array:
    """The array after ``update`` has written through a reference to it, in place if it may be.

    ``run_state`` and not ``jax.new_ref``, which does not lower inside ``compute_on``.
    """
    return pl.run_state(update)(array)


def _run_bytes(pool: Array) -> int:
    return math.prod(pool.shape[1:]) * pool.dtype.itemsize


def _check_ring(pool: Array, config: FetchConfig) -> None:
    run_bytes = _run_bytes(pool)
    if run_bytes % _GRANULE:
        raise NotImplementedError(f"a run of {run_bytes} bytes is no multiple of {_GRANULE}")
    if config.stages < 1 or config.shared_bytes(run_bytes) > SHARED_BYTES:
        raise NotImplementedError(
            f"{config} with runs of {run_bytes} bytes exceeds {SHARED_BYTES} bytes of shared memory"
        )


def _ring_fetch(run: tuple[int, ...], dtype: jnp.dtype, config: FetchConfig) -> Callable[..., None]:
    """Kernel (pool, source, target, count, after, slots_ref): bulk copies through shared memory."""
    ctas, stages, group = config.ctas, config.stages, config.group

    def fetch_blocks_ring(pool, source, target, count, after, slots, buffers, landed):
        del after
        cta = lax.axis_index("cta")
        runs = count[0]
        groups = lax.div(runs + (group - 1), group)
        steps = lax.div(groups - cta + (ctas - 1), ctas)

        def load(step, stage):
            base = (step * ctas + cta) * group
            # The last group is filled up with its last run, so that its barrier completes.
            last = runs - 1
            ids = [source[lax.min(base + i, last) if i else base] for i in range(group)]
            for i, run_id in enumerate(ids):
                plgpu.copy_gmem_to_smem(
                    pool.at[run_id],
                    buffers.at[stage, i],
                    landed.at[stage],
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                )

        def store(step, stage):
            base = (step * ctas + cta) * group
            last = runs - 1
            ids = [target[lax.min(base + i, last) if i else base] for i in range(group)]
            for i, slot in enumerate(ids):

                @pl.when(base + i < runs)
                def _store(i=i, slot=slot):
                    plgpu.copy_smem_to_gmem(buffers.at[stage, i], slots.at[slot])

        for stage in range(stages - 1):

            @pl.when(stage < steps)
            def _fill(stage=stage):
                load(jnp.int32(stage), stage)

        @pl.loop(0, steps)
        def _step(step):
            ahead = step + (stages - 1)

            @pl.when(ahead < steps)
            def _load_ahead():
                # Reuses the buffer of the previous step: its store must have read it.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                load(ahead, lax.rem(ahead, stages))

            stage = lax.rem(step, stages)
            plgpu.barrier_wait(landed.at[stage])
            store(step, stage)

        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        fetch_blocks_ring,
        out_type=(),
        grid=(ctas,),
        grid_names=("cta",),
        scratch_types=[
            plgpu.SMEM((stages, group, *run), dtype),
            plgpu.Barrier(num_arrivals=group, num_barriers=stages),
        ],
    )


def _register_fetch(run: tuple[int, ...], dtype: jnp.dtype, ctas: int) -> Callable[..., None]:
    """Kernel (pool, source, target, count, after, slots_ref): through registers."""
    elements = math.prod(run)
    if elements % _THREADS:
        raise NotImplementedError(
            f"a run of {elements} elements from a <host>-typed pool is no multiple of {_THREADS}"
        )
    vector = math.gcd(elements // _THREADS, 16 // dtype.itemsize)
    layout = plgpu.Layout.WG_STRIDED(run, vec_size=vector)

    def fetch_blocks_registers(pool, source, target, count, after, slots):
        del after
        cta = lax.axis_index("cta")
        steps = lax.div(count[0] - cta + (ctas - 1), ctas)

        @pl.loop(0, steps)
        def _step(step):
            i = step * ctas + cta
            slots[target[i]] = plgpu.load(pool.at[source[i]], layout=layout)

    return plgpu.kernel(
        fetch_blocks_registers, out_type=(), grid=(ctas,), grid_names=("cta",), scratch_types=()
    )


def _ring_write(run: tuple[int, ...], dtype: jnp.dtype, config: FetchConfig) -> Callable[..., None]:
    """Kernel (blocks, target, pool_ref): bulk copies of the blocks that have a target."""
    ctas, stages = config.ctas, config.stages

    def write_blocks_ring(blocks, target, pool, buffers, landed):
        cta = lax.axis_index("cta")
        steps = lax.div(target.shape[0] - cta + (ctas - 1), ctas)

        def load(step, stage):
            i = step * ctas + cta

            @pl.when(target[i] >= 0)
            def _load():
                plgpu.copy_gmem_to_smem(blocks.at[i], buffers.at[stage], landed.at[stage])

        for stage in range(stages - 1):

            @pl.when(stage < steps)
            def _fill(stage=stage):
                load(jnp.int32(stage), stage)

        @pl.loop(0, steps)
        def _step(step):
            ahead = step + (stages - 1)

            @pl.when(ahead < steps)
            def _load_ahead():
                # Reuses the buffer of the previous step: its store must have read it.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                load(ahead, lax.rem(ahead, stages))

            stage = lax.rem(step, stages)
            run_id = target[step * ctas + cta]

            @pl.when(run_id >= 0)
            def _store():
                plgpu.barrier_wait(landed.at[stage])
                plgpu.copy_smem_to_gmem(buffers.at[stage], pool.at[run_id])

        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        write_blocks_ring,
        out_type=(),
        grid=(ctas,),
        grid_names=("cta",),
        scratch_types=[
            plgpu.SMEM((stages, *run), dtype),
            plgpu.Barrier(num_barriers=stages),
        ],
    )
