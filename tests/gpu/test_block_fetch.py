"""Block fetch and write-back on a GPU, from and to pinned host memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from host_offload import overlap
from pallas_kernels.block_fetch import fetch_blocks, write_blocks

pytestmark = pytest.mark.gpu

RUNS = 512


def _shardings():
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return device, device.with_memory_kind("pinned_host")


def _compiled(function, shardings, operands, **options):
    """Ahead-of-time program over device-typed avals, whatever memory the operands are in."""
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    return jax.jit(function, in_shardings=shardings, **options).trace(*types).lower().compile()


def _operands(rng, run, named):
    pool = jnp.asarray(rng.normal(size=(RUNS, *run)), jnp.bfloat16)
    slots = jnp.full((RUNS, *run), -7, jnp.bfloat16)
    source = jnp.asarray(rng.integers(0, RUNS, named), jnp.int32)
    target = jnp.asarray(rng.permutation(RUNS)[:named], jnp.int32)
    return pool, slots, source, target


def _expected(pool, slots, source, target, count):
    expected = np.array(slots)
    expected[np.asarray(target[:count])] = np.asarray(pool)[np.asarray(source[:count])]
    return expected


@pytest.mark.parametrize("run", [(2, 64, 128), (2, 32, 128), (2, 16, 64), (2, 1, 64)])
@pytest.mark.parametrize("count", [0, 1, 7, 299, 300])
def test_fetch_from_pinned_memory(run, count):
    device, host = _shardings()
    pool, slots, source, target = _operands(np.random.default_rng(count), run, 300)
    operands = (pool, slots, source, target, jnp.int32(count))
    expected = _expected(pool, slots, source, target, count)
    pinned = jax.device_put(pool, host)

    def fetch(*args):
        return fetch_blocks(*args, implementation="mosaic")

    # Bulk copies; in place.
    program = _compiled(fetch, (host, *[device] * 4), operands, donate_argnums=1)
    donated = jnp.array(slots)
    address = donated.unsafe_buffer_pointer()
    got = program(pinned, donated, *operands[2:])
    np.testing.assert_array_equal(got, expected)
    assert got.unsafe_buffer_pointer() == address
    # Through registers, in any jit; and the reference.
    np.testing.assert_array_equal(jax.jit(fetch)(pinned, *operands[1:]), expected)
    np.testing.assert_array_equal(
        jax.jit(lambda *a: fetch_blocks(*a, implementation="xla"))(pinned, *operands[1:]), expected
    )


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("run", [(2, 64, 128), (2, 8, 64)])
def test_quantised_pool_is_widened(dtype, run):
    device, host = _shardings()
    rng = np.random.default_rng(3)
    _, slots, source, target = _operands(rng, run, 300)
    pool = jnp.asarray(rng.integers(-127, 128, (RUNS, *run)), jnp.float32).astype(dtype)
    scales = jnp.asarray(rng.uniform(0.01, 0.1, (RUNS, 2)), jnp.float32)
    wide = (pool.astype(jnp.float32) * scales[..., None, None]).astype(jnp.bfloat16)
    operands = (pool, slots, source, target, jnp.int32(299), scales)
    expected = _expected(wide, slots, source, target, 299)
    pinned = jax.device_put(pool, host)

    def fetch(*args):
        return fetch_blocks(*args[:-1], pool_scales=args[-1], implementation="mosaic")

    program = _compiled(fetch, (host, *[device] * 5), operands)
    np.testing.assert_array_equal(program(pinned, *operands[1:]), expected)
    np.testing.assert_array_equal(jax.jit(fetch)(pinned, *operands[1:]), expected)


def test_fetch_in_a_while_loop():
    device, host = _shardings()
    pool, slots, source, target = _operands(np.random.default_rng(5), (2, 64, 128), 100)
    operands = (pool, slots, source, target, jnp.int32(90))

    def program(pool, slots, source, target, count):
        def step(i, slots):
            moved = (source + i) % RUNS
            return fetch_blocks(pool, slots, moved, target, count, implementation="mosaic")

        return lax.fori_loop(0, count // 30, step, slots)

    compiled = _compiled(program, (host, *[device] * 4), operands)
    got = compiled(jax.device_put(pool, host), *operands[1:])
    np.testing.assert_array_equal(got, _expected(pool, slots, (source + 2) % RUNS, target, 90))


def test_write_back_is_in_place():
    device, host = _shardings()
    rng = np.random.default_rng(6)
    pool, blocks, _, target = _operands(rng, (2, 64, 128), 40)
    blocks = jnp.asarray(rng.normal(size=(40, 2, 64, 128)), jnp.bfloat16)
    target = target.at[5].set(-1).at[39].set(-1)
    expected = np.array(pool)
    written = np.asarray(target) >= 0
    expected[np.asarray(target)[written]] = np.asarray(blocks)[written]

    def write(*args):
        return write_blocks(*args, implementation="mosaic")

    options = {"out_shardings": host, "donate_argnums": 0}
    program = _compiled(write, (host, device, device), (pool, blocks, target), **options)
    pinned = jax.device_put(pool, host)
    address = pinned.unsafe_buffer_pointer()
    got = program(pinned, blocks, target)
    assert got.unsafe_buffer_pointer() == address
    assert got.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(np.asarray(got), expected)


def test_fetch_beside_compute_gives_the_same():
    device, host = _shardings()
    pool, slots, source, target = _operands(np.random.default_rng(7), (2, 64, 128), 300)
    slots = jnp.zeros_like(slots)
    x = jnp.asarray(np.random.default_rng(8).normal(size=(64, 1024)), jnp.float32)
    w = jnp.asarray(np.random.default_rng(9).normal(size=(1024, 1024)) / 32, jnp.float32)

    def fetch(*args):
        return fetch_blocks(*args, implementation="mosaic")

    def compute(x, w):
        return lax.tanh(x @ w)

    def program(pool, slots, source, target, x, w):
        def step(i, state):
            slots, x = state
            moved = (source + 17 * i) % RUNS
            return fetch(pool, slots, moved, target, jnp.int32(300)), compute(x, w)

        return lax.fori_loop(0, 4, step, (slots, x))

    operands = (pool, slots, source, target, x, w)
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operands]
    results = []
    for options in (None, overlap.CONCURRENT_OPTIONS):
        program_of = jax.jit(program, in_shardings=(host, *[device] * 5), donate_argnums=1)
        compiled = program_of.trace(*types).lower().compile(compiler_options=options)
        pinned = jax.device_put(pool, host)
        for _ in range(2):
            donated = jnp.array(slots)
            address = donated.unsafe_buffer_pointer()
            results.append(compiled(pinned, donated, *operands[2:]))
            assert results[-1][0].unsafe_buffer_pointer() == address
        np.testing.assert_array_equal(results[-1][1], results[-2][1])
    for got in results:
        np.testing.assert_array_equal(
            got[0], _expected(pool, slots, (source + 51) % RUNS, target, 300)
        )
        np.testing.assert_allclose(got[1], results[0][1], atol=2e-3)
