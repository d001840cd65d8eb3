"""The fetch and write-back kernels, simulated with race detection, and lowered for CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels import interpret
from pallas_kernels.block_fetch import fetch_blocks, write_blocks
from pallas_kernels.block_fetch.tuning import FetchConfig, fetch_config

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < interpret.MINIMUM_JAX, reason="Mosaic kernels need jax >= 0.11"
)


def _operands(rng, run, *, pool=20, slots=32, named=30):
    return (
        jnp.asarray(rng.normal(size=(pool, *run)), jnp.bfloat16),
        jnp.asarray(rng.normal(size=(slots, *run)), jnp.bfloat16),
        jnp.asarray(rng.integers(0, pool, named), jnp.int32),
        jnp.asarray(rng.permutation(slots)[:named], jnp.int32),
    )


def _expected(pool, slots, source, target, count):
    expected = np.array(slots)
    expected[np.asarray(target[:count])] = np.asarray(pool)[np.asarray(source[:count])]
    return expected


@pytest.mark.parametrize(
    ("run", "config"),
    [
        ((2, 16, 64), FetchConfig(ctas=2, stages=3, group=1)),
        ((2, 1, 64), FetchConfig(ctas=2, stages=2, group=4)),  # several runs behind one barrier
        ((2, 16, 64), FetchConfig(ctas=3, stages=1, group=1)),  # no overlap at all
    ],
)
@pytest.mark.parametrize("count", [0, 1, 21, 30])
def test_ring_copies_exactly_the_named_runs(run, config, count):
    from pallas_kernels.block_fetch import mosaic

    operands = _operands(np.random.default_rng(count), run)
    with interpret.simulated():
        call = jax.jit(lambda *args: mosaic.fetch_blocks(*args, config=config))
        got = jax.block_until_ready(call(*operands, jnp.int32(count)))
    np.testing.assert_array_equal(got, _expected(*operands, count))


def test_registers_copy_exactly_the_named_runs():
    from pallas_kernels.block_fetch import mosaic

    # The simulator has no host-typed references: a device pool through the same kernel.
    pool, slots, source, target = _operands(np.random.default_rng(1), (2, 16, 64))
    kernel = mosaic._register_fetch(pool.shape[1:], pool.dtype, 16)

    @jax.jit
    def call(pool, slots, source, target, count):
        ref = jax.new_ref(slots)
        kernel(pool, source, target, count, count, ref)
        return jax.freeze(ref)

    with interpret.simulated():
        got = jax.block_until_ready(call(pool, slots, source, target, jnp.array([17], jnp.int32)))
    np.testing.assert_array_equal(got, _expected(pool, slots, source, target, 17))


def _quantised(rng, run, dtype, pool=20, slots=24, named=17):
    """A quantised pool with its scales, and lists; the rest as ``_operands``."""
    _, slots, source, target = _operands(rng, run, pool=pool, slots=slots, named=named)
    values = jnp.asarray(rng.integers(-127, 128, (pool, *run)), jnp.float32).astype(dtype)
    scales = jnp.asarray(rng.uniform(0.01, 0.1, (pool, 2)), jnp.float32)
    expected = np.array(slots)

    def fill(count):
        wide = values.astype(jnp.float32) * scales[..., None, None]
        named = np.asarray(target[:count])
        expected[named] = np.asarray(wide.astype(jnp.bfloat16))[np.asarray(source[:count])]
        return expected

    return (values, slots, source, target), scales, fill


@pytest.mark.parametrize(
    ("dtype", "run", "config"),
    [
        ("int8", (2, 16, 64), FetchConfig(ctas=2, stages=2, group=1)),
        ("float8_e4m3fn", (2, 2, 64), FetchConfig(ctas=2, stages=2, group=4)),
    ],
)
def test_quantised_pool_is_widened(dtype, run, config):
    from pallas_kernels.block_fetch import mosaic, mosaic_quantised

    operands, scales, fill = _quantised(np.random.default_rng(3), run, dtype)
    count, expected = jnp.int32(15), fill(15)
    got = fetch_blocks(*operands, count, pool_scales=scales, implementation="xla")
    np.testing.assert_array_equal(got, expected)

    @jax.jit
    def by_registers(pool, slots, source, target):
        ref = jax.new_ref(slots)
        kernel = mosaic_quantised.register_fetch(run, slots.dtype, 3)
        runs = lax.reshape(count, (1,))
        kernel(pool, scales, source, target, runs, runs, ref)
        return jax.freeze(ref)

    with interpret.simulated():
        given = {"pool_scales": scales, "after": scales, "config": config}
        call = jax.jit(lambda *a: mosaic.fetch_blocks(*a, **given))
        by_ring = jax.block_until_ready(call(*operands, count))
        by_registers = jax.block_until_ready(by_registers(*operands))
    np.testing.assert_array_equal(by_ring, expected)
    np.testing.assert_array_equal(by_registers, expected)


def test_public_functions_equal_the_reference():
    rng = np.random.default_rng(2)
    pool, slots, source, target = _operands(rng, (2, 16, 64), named=9)
    blocks = jnp.asarray(rng.normal(size=(9, 2, 16, 64)), jnp.bfloat16)
    target_runs = jnp.asarray(rng.permutation(20)[:9], jnp.int32).at[3].set(-1)
    with interpret.simulated():
        fetched = jax.block_until_ready(
            fetch_blocks(pool, slots, source, target, jnp.int32(5), implementation="mosaic")
        )
        written = jax.block_until_ready(
            write_blocks(pool, blocks, target_runs, implementation="mosaic")
        )
    np.testing.assert_array_equal(
        fetched, fetch_blocks(pool, slots, source, target, jnp.int32(5), implementation="xla")
    )
    np.testing.assert_array_equal(
        written, write_blocks(pool, blocks, target_runs, implementation="xla")
    )


@pytest.mark.parametrize("run", [(2, 64, 128), (2, 32, 128), (2, 8, 128), (1, 1, 128)])
@pytest.mark.parametrize("host", [False, True])
def test_lowers_for_cuda(run, host):
    from pallas_kernels.block_fetch import mosaic

    sharding = jax.sharding.SingleDeviceSharding(
        jax.devices()[0], memory_kind="pinned_host" if host else "device"
    )
    pool = jax.device_put(jnp.zeros((16, *run), jnp.bfloat16), sharding)
    ids = jnp.zeros(8, jnp.int32)
    call = jax.jit(lambda *a: mosaic.fetch_blocks(*a[:-1], after=a[-1]))
    slots = jnp.zeros((16, *run), jnp.bfloat16)
    others = jnp.zeros((7, 5), jnp.bfloat16)
    arguments = (pool, slots, ids, ids, jnp.int32(3), others)
    lowered = jax.export.export(call, platforms=["cuda"])(*arguments).mlir_module()
    # What the kernel waits for is among its operands, though it does not read it.
    assert any("mosaic_gpu" in line and "tensor<7x5xbf16>" in line for line in lowered.split("\n"))
    if run[0] == 2:
        for dtype in (jnp.int8, jnp.float8_e4m3fn):
            narrow = jax.device_put(jnp.zeros(pool.shape, dtype), sharding)
            scales = jnp.zeros((16, 2))
            quantised = jax.jit(lambda *a: mosaic.fetch_blocks(*a[:-1], pool_scales=a[-1]))
            jax.export.export(quantised, platforms=["cuda"])(
                narrow, slots, ids, ids, jnp.int32(3), scales
            )
    if not host:
        write = jax.export.export(jax.jit(mosaic.write_blocks), platforms=["cuda"])
        assert "mosaic_gpu" in write(pool, pool[:8], ids).mlir_module()


def test_unsupported_arguments_raise():
    from pallas_kernels.block_fetch import mosaic

    ids = jnp.zeros(1, jnp.int32)
    odd = jnp.zeros((2, 1, 1, 3), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="6 bytes"):
        mosaic.fetch_blocks(odd, odd, ids, ids, jnp.int32(1))
    large = jnp.zeros((1, 2, 512, 128), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="262144 bytes"):
        mosaic.fetch_blocks(large, large, ids, ids, jnp.int32(1))


def test_default_launch_fits_shared_memory():
    for run_bytes in (256, 4096, 8192, 16384, 32768, 65536):
        config = fetch_config(run_bytes)
        assert config.shared_bytes(run_bytes) <= 220 * 1024
        assert config.stages >= 2
