"""Block fetch from pinned host memory, timed inside one ahead-of-time program."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.block_fetch import mosaic
from pallas_kernels.block_fetch.tuning import FetchConfig, fetch_config
from sparda_jax.evaluation.kernel_benchmarks.harness import (
    Row,
    Session,
    benchmark,
    converted,
    time_calls,
)

POOL_BYTES = 1 << 30
# Run shape, bytes, megabytes a call -> target in GB/s and the most thread blocks it allows.
TARGETS = {
    (32768, 100): (49.0, 4),
    (16384, 100): (49.0, 4),
    (32768, 10): (44.0, 8),
    (16384, 10): (44.0, 8),
    (4096, 100): (46.0, 8),
    (4096, 10): (None, 8),
    (256, 100): (24.0, 132),
    (256, 10): (None, 132),
}
RUNS = {32768: (2, 64, 128), 16384: (2, 32, 128), 4096: (2, 8, 128), 256: (1, 1, 128)}


@dataclasses.dataclass(frozen=True)
class _Case:
    """One pool, in pinned memory and on the device; scales if it is quantised."""

    device: Any
    host: Any
    pool: jax.Array
    resident: jax.Array
    scales: jax.Array | None


@benchmark("block_fetch")
def fetch(session: Session) -> Iterator[Row]:
    """Random runs of a 1 GiB pinned pool to random slots, 100 or 10 MB a call."""
    for run_bytes, run in RUNS.items():
        case = _case(run, POOL_BYTES // run_bytes)
        for megabytes in (100, 10):
            runs = min(megabytes * 10**6 // run_bytes, case.pool.shape[0])
            config = fetch_config(run_bytes)
            target, most_ctas = TARGETS[run_bytes, megabytes]
            if config.ctas > most_ctas:
                target = None
            timing, wrong = _measure(session, case, run, runs, config)
            rate = converted(timing, runs * run_bytes * 1e-3)
            yield Row(
                name=f"block_fetch/{run_bytes}B/{megabytes}MB/ctas{config.ctas}x{config.stages}",
                timing=rate,
                unit="GB/s",
                better="higher",
                target=target,
                of_roofline=rate.median / 53.0,
                error=wrong,
            )


@benchmark("block_fetch/quantised")
def quantised_fetch(session: Session) -> Iterator[Row]:
    """Runs of 16 KiB of int8 (P=64, H=128) widened to bfloat16 slots; bytes of the pool."""
    case = _case((2, 64, 128), POOL_BYTES // 16384, jnp.int8)
    for megabytes in (100, 10):
        runs = megabytes * 10**6 // 16384
        config = fetch_config(16384)
        timing, wrong = _measure(session, case, (2, 64, 128), runs, config)
        rate = converted(timing, runs * 16384e-3)
        yield Row(
            name=f"block_fetch/int8/16384B/{megabytes}MB/ctas{config.ctas}x{config.stages}",
            timing=rate,
            unit="GB/s",
            better="higher",
            of_roofline=rate.median / 53.0,
            error=wrong,
        )


def _case(run: tuple[int, ...], num_runs: int, dtype: Any = jnp.bfloat16) -> _Case:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    host = device.with_memory_kind("pinned_host")
    shape, scales = (num_runs, *run), None
    if dtype == jnp.int8:
        resident = jax.jit(lambda key: jax.random.randint(key, shape, -127, 128, jnp.int8))(
            jax.random.key(0)
        )
        scales = jax.random.uniform(jax.random.key(1), (num_runs, 2), minval=0.01)
    else:
        resident = jax.jit(lambda key: jax.random.normal(key, shape, dtype))(jax.random.key(0))
    pool = jax.block_until_ready(jax.device_put(resident, host))
    return _Case(device, host, pool, resident, scales)


def _measure(
    session: Session, case: _Case, run: tuple[int, ...], runs: int, config: FetchConfig
) -> tuple[Any, float | None]:
    rng = np.random.default_rng(runs)
    total = case.pool.shape[0]
    source = jnp.asarray(rng.permutation(total)[:runs], jnp.int32)
    target = jnp.asarray(rng.permutation(runs), jnp.int32)
    loops = max(4, round(600e6 / (runs * np.prod(run) * case.pool.dtype.itemsize)))

    def program(pool: Any, slots: Any, source: Any, target: Any, count: Any) -> Any:
        def fetch_once(i: Any, slots: Any) -> Any:
            # Other runs every time: nothing stays in a cache.
            return mosaic.fetch_blocks(
                pool, slots, (source + i * runs) % total, target, count,
                pool_scales=case.scales, config=config,
            )  # fmt: skip

        return lax.fori_loop(0, loops, fetch_once, slots)

    slots = jnp.full((runs, *run), -1, jnp.bfloat16)
    operands = (case.resident, slots, source, target, jnp.int32(runs))
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    shardings = (case.host, *[case.device] * 4)
    # Device-typed avals with a pinned sharding: the kernel may use bulk copies.
    traced = jax.jit(program, in_shardings=shardings, donate_argnums=1).trace(*types)
    compiled = traced.lower().compile()
    state = {"slots": compiled(case.pool, slots, *operands[2:])}
    wrong = None
    if session.refcheck:
        last = (source + (loops - 1) * runs) % total
        expected = case.resident[last]
        if case.scales is not None:
            wide = expected.astype(jnp.float32) * case.scales[last][..., None, None]
            expected = wide.astype(jnp.bfloat16)
        same = state["slots"][target] == expected
        wrong = 1.0 - float(same.mean())

    def call() -> Any:
        state["slots"] = compiled(case.pool, state["slots"], *operands[2:])
        return state["slots"]

    return time_calls(call, calls=loops, repetitions=session.repetitions), wrong
