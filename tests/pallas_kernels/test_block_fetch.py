"""Copies between pool and slots, with a pool in device and in pinned host memory."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.block_fetch import fetch_blocks, write_blocks

X, Y, P, H = 24, 8, 4, 8


def sharding(kind):
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)


@pytest.fixture(params=["pinned_host", "device"])
def kind(request):
    return request.param


@pytest.fixture
def pool(rng, kind):
    return jax.device_put(rng.normal(size=(X, 2, P, H)).astype(np.float32), sharding(kind))


def ints(*values):
    return jnp.asarray(values, jnp.int32)


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_fetch_copies_exactly_the_counted_runs(pool, kind, count):
    slots = jnp.full((Y, 2, P, H), jnp.nan)  # poisoned: what is not fetched must stay
    source, target = ints(23, 0, 7, 7, 11), ints(5, 0, 7, 1, 2)
    expected = np.full(slots.shape, np.nan, np.float32)
    for i in range(count):
        expected[int(target[i])] = np.asarray(pool)[int(source[i])]
    out = jax.jit(fetch_blocks)(pool, slots, source, target, jnp.int32(count))
    np.testing.assert_array_equal(out, expected)
    assert out.sharding.memory_kind == jnp.zeros(1).sharding.memory_kind
    assert pool.sharding.memory_kind == kind


def test_write_skips_negative_targets(pool, kind):
    before = np.asarray(pool).copy()
    blocks = jnp.asarray(np.random.default_rng(1).normal(size=(4, 2, P, H)), jnp.float32)
    write = jax.jit(write_blocks, donate_argnums=0, out_shardings=sharding(kind))
    out = write(pool, blocks, ints(-1, 23, -1, 0))
    assert pool.is_deleted()
    assert out.sharding.memory_kind == kind
    before[23], before[0] = blocks[1], blocks[3]
    np.testing.assert_array_equal(np.asarray(out), before)
    out = write(out, jnp.full_like(blocks, jnp.nan), ints(-1, -1, -1, -1))
    np.testing.assert_array_equal(np.asarray(out), before)


def serial_decode(pool, slots, steps):
    """Per step: fetch two runs, use all slots, and write one back; in numpy."""
    pool, slots, total = pool.copy(), slots.copy(), 0.0
    for i in range(steps):
        for a in range(2):
            slots[(i + a) % Y] = pool[(5 * i + a) % X]
        total += slots[:, 0, 0, 0].sum()
        pool[(3 * i) % X] = slots[i % Y] + 1
    return pool, slots, total


@pytest.mark.parametrize("loop", ["fori", "while"])
def test_inside_a_loop_with_both_directions(pool, kind, loop):
    steps = 11
    slots = np.random.default_rng(2).normal(size=(Y, 2, P, H)).astype(np.float32)

    def step(i, carry):
        pool, slots, total = carry
        source = (5 * i + jnp.arange(3)) % X
        target = (i + jnp.arange(3)) % Y
        slots = fetch_blocks(pool, slots, source, target, jnp.int32(2))
        total = total + slots[:, 0, 0, 0].sum()
        block = lax.dynamic_index_in_dim(slots, i % Y, 0) + 1
        return write_blocks(pool, block, ((3 * i) % X).reshape(1)), slots, total

    def decode(pool, slots):
        carry = (pool, slots, jnp.float32(0))
        if loop == "fori":
            return lax.fori_loop(0, steps, step, carry)
        return lax.while_loop(
            lambda c: c[0] < steps, lambda c: (c[0] + 1, step(c[0], c[1])), (0, carry)
        )[1]

    device = jnp.zeros(1).sharding
    run = jax.jit(decode, donate_argnums=(0, 1), out_shardings=(sharding(kind), device, device))
    expected = serial_decode(np.asarray(pool), slots, steps)
    out = run(pool, jax.device_put(slots, device))
    for x, y in zip(out, expected, strict=True):
        np.testing.assert_allclose(np.asarray(x), y, rtol=1e-5)


def copies(text, shape):
    """HLO copies of an array of that shape."""
    dims = ",".join(map(str, shape))
    return re.findall(rf"= f32\[{dims}\]\S* copy[-(].*", text)


def test_a_loop_copies_neither_slots_nor_pool(kind):
    """32 steps in one program; a read-only pool, donated slots: everything in place."""
    pool_shape, slots_shape = (X, 2, P, H), (Y, 2, P, H)

    def decode(pool, slots):
        def step(i, slots):
            source, target = (i + jnp.arange(2)) % X, (i + jnp.arange(2)) % Y
            return fetch_blocks(pool, slots, source, target, i % 3)

        return lax.fori_loop(0, 32, step, slots)

    pool = jax.device_put(jnp.zeros(pool_shape), sharding(kind))
    slots = jnp.zeros(slots_shape)
    text = jax.jit(decode, donate_argnums=1).lower(pool, slots).compile().as_text()
    assert "while" in text
    assert not copies(text, slots_shape)
    assert not copies(text, pool_shape)

    def write(pool, blocks):
        return lax.fori_loop(
            0, 32, lambda i, pool: write_blocks(pool, blocks, (i + jnp.arange(2)) % X), pool
        )

    text = (
        jax.jit(write, donate_argnums=0, out_shardings=sharding(kind))
        .lower(pool, slots[:2])
        .compile()
        .as_text()
    )
    assert not copies(text, pool_shape)


def test_errors():
    pool, slots = jnp.zeros((X, 2, P, H)), jnp.zeros((Y, 2, P, H))
    with pytest.raises(ValueError, match="slots has dtype bfloat16, the pool has float32"):
        fetch_blocks(pool, slots.astype(jnp.bfloat16), ints(0), ints(0), jnp.int32(1))
    with pytest.raises(ValueError, match=r"slots has shape .* expected \[Y, 2, P, H\]"):
        fetch_blocks(pool, slots[:, :, :2], ints(0), ints(0), jnp.int32(1))
    with pytest.raises(ValueError, match=r"target has shape \(2,\), expected \[A\] with A=1"):
        fetch_blocks(pool, slots, ints(0), ints(0, 1), jnp.int32(1))
