"""The decode selection kernels, simulated on the CPU with race detection, and lowered for CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import interpret
from pallas_kernels.block_selection import (
    select_blocks_forecast,
    select_blocks_multi_head,
)
from pallas_kernels.geometry import BlockGeometry

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < interpret.MINIMUM_JAX, reason="Mosaic kernels need jax >= 0.11"
)

GEOMETRY = BlockGeometry(64, 32, 16)


def _small_integers(rng, *shape, dtype=jnp.bfloat16):
    # Dot products of small integers are exact, so that ties are ties in any order of summation.
    return jnp.asarray(rng.integers(-3, 4, shape), dtype)


def _rules(length, **changes):
    rules = {
        "num_blocks": GEOMETRY.num_blocks(length),
        "geometry": GEOMETRY,
        "init_blocks": 1,
        "local_blocks": 2,
        "budget": 6,
    }
    return rules | changes


@pytest.mark.parametrize(
    ("lengths", "head_dim", "changes"),
    [
        ((1300, 700), 128, {}),
        ((64 * 20, 1), 64, {"budget": 5, "width": 8}),  # nothing visible in the second row
        ((1100, 900), 64, {"width": 18, "dense": jnp.array([False, True])}),
        ((700, 65), 64, {"budget": 2}),  # fewer than the forced blocks
    ],
)
def test_forecast_equals_reference(lengths, head_dim, changes):
    rng = np.random.default_rng(len(changes))
    longest = max(lengths)
    keys = _small_integers(rng, 2, 1, GEOMETRY.num_compressed(longest), head_dim)
    forecast = _small_integers(rng, 2, 1, 1, head_dim)
    position = jnp.array(lengths, jnp.int32)[:, None] - 1
    args = (forecast, keys, position // 64, GEOMETRY.complete_windows(position))
    rules = _rules(longest, **changes)
    expected = select_blocks_forecast(*args, **rules, implementation="xla")
    with interpret.simulated():
        got = jax.block_until_ready(select_blocks_forecast(*args, **rules, implementation="mosaic"))
    np.testing.assert_array_equal(got.ids, expected.ids)
    np.testing.assert_array_equal(got.count, expected.count)


@pytest.mark.parametrize(("group", "head_dim", "capacity"), [(3, 64, 136), (16, 128, 135)])
def test_multi_head_equals_reference(group, head_dim, capacity):
    rng = np.random.default_rng(group)
    keys = jnp.asarray(rng.normal(size=(2, 1, capacity, head_dim)), jnp.bfloat16)
    q = jnp.asarray(rng.normal(size=(2, 1, group, head_dim)), jnp.bfloat16)
    position = jnp.array([[2150], [20]], jnp.int32)  # the second row sees no compressed key
    args = (q, keys, position // 64, GEOMETRY.complete_windows(position))
    rules = _rules(2200)
    expected = select_blocks_multi_head(*args, **rules, implementation="xla")
    with interpret.simulated():
        got = jax.block_until_ready(
            select_blocks_multi_head(*args, **rules, implementation="mosaic")
        )
    np.testing.assert_array_equal(got.ids, expected.ids)
    np.testing.assert_array_equal(got.count, expected.count)


def test_short_capacity_is_padded():
    rng = np.random.default_rng(5)
    keys, forecast = _small_integers(rng, 1, 1, 13, 64), _small_integers(rng, 1, 1, 1, 64)
    position = jnp.array([[239]], jnp.int32)
    args = (forecast, keys, position // 64, GEOMETRY.complete_windows(position))
    rules = _rules(240, local_blocks=0, budget=2)
    expected = select_blocks_forecast(*args, **rules, implementation="xla")
    with interpret.simulated():
        got = jax.block_until_ready(select_blocks_forecast(*args, **rules, implementation="mosaic"))
    np.testing.assert_array_equal(got.ids, expected.ids)


def test_top_k_with_many_ties():
    from pallas_kernels.block_selection import mosaic_top_k

    rng = np.random.default_rng(7)
    blocks = 2 * mosaic_top_k.CHUNK
    keys = rng.integers(-5, 6, (3, blocks)).astype(np.int32)
    keys[0, 10:] = mosaic_top_k.NEVER
    keys[1] = mosaic_top_k.NEVER
    limits = np.array([24, 5, 700], np.int32)
    kernel = mosaic_top_k.top_k(3, blocks, 768)
    with interpret.simulated():
        ids, count = jax.block_until_ready(jax.jit(kernel)(jnp.asarray(keys), jnp.asarray(limits)))
    for row in range(3):
        k = min(limits[row], int((keys[row] > mosaic_top_k.NEVER).sum()))
        expected = np.sort(np.argsort(-keys[row].astype(np.int64), kind="stable")[:k])
        assert count[row] == k
        np.testing.assert_array_equal(ids[row, :k], expected)
        assert (np.asarray(ids[row, k:]) == -1).all()


def test_sortable_keeps_the_order_of_floats():
    from pallas_kernels.block_selection import mosaic_top_k

    values = np.array([-np.inf, -2.5, -1e-30, -0.0, 0.0, 1e-30, 3.0, np.inf], np.float32)
    keys = np.asarray(mosaic_top_k.sortable(jnp.asarray(values))).astype(np.int64)
    assert keys[3] == keys[4]
    assert (np.diff(keys) >= 0).all() and len(set(keys)) == 7
    assert keys[0] > mosaic_top_k.NEVER


def test_lowers_for_cuda():
    batch = 8
    shape = jax.ShapeDtypeStruct
    rules = _rules(131072, budget=96, local_blocks=8)
    rows = shape((batch, 1), jnp.int32)

    def lower(function, queries, capacity):
        keys = shape((batch, 2, capacity, 128), jnp.bfloat16)
        call = jax.jit(lambda *args: function(*args, **rules))
        jax.export.export(call, platforms=["cuda"])(queries, keys, rows, rows)

    from pallas_kernels.block_selection import mosaic

    more = {"width": 96, "dense": None, "mask_future": True}
    rules |= more
    lower(mosaic.select_blocks_forecast, shape((batch, 1, 2, 128), jnp.bfloat16), 8191)
    rules |= {"scale": 0.1}
    lower(mosaic.select_blocks_multi_head, shape((batch, 1, 32, 128), jnp.bfloat16), 8191)


@pytest.mark.parametrize(
    ("keys", "changes", "message"),
    [
        (jnp.zeros((1, 1, 128, 96), jnp.bfloat16), {}, "head dim 96"),
        (jnp.zeros((1, 1, 128, 64), jnp.float32), {}, "float32"),
        (jnp.zeros((1, 1, 128, 64), jnp.bfloat16), {"num_blocks": 9000}, "9000 blocks"),
        (jnp.zeros((1, 1, 128, 64), jnp.bfloat16), {"mask_future": False}, "mask_future"),
    ],
)
def test_unsupported_arguments_raise(keys, changes, message):
    forecast = jnp.zeros((1, 1, 1, keys.shape[3]), jnp.bfloat16)
    row = jnp.zeros((1, 1), jnp.int32)
    with interpret.simulated(), pytest.raises(NotImplementedError, match=message):
        select_blocks_forecast(
            forecast, keys, row, row, **_rules(2000, **changes), implementation="mosaic"
        )
