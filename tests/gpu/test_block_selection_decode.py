"""Block selection for one query token on a GPU, against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_selection import select_blocks_forecast, select_blocks_multi_head
from pallas_kernels.geometry import BlockGeometry

pytestmark = pytest.mark.gpu

GEOMETRY = BlockGeometry(64, 32, 16)


def _rules(length, **changes):
    rules = {
        "num_blocks": GEOMETRY.num_blocks(length),
        "geometry": GEOMETRY,
        "init_blocks": 1,
        "local_blocks": 8,
        "budget": 24,
    }
    return rules | changes


def _rows(lengths):
    position = jnp.array(lengths, jnp.int32)[:, None] - 1
    return position // 64, GEOMETRY.complete_windows(position)


def _poisoned(select, args, rules):
    # Freed memory full of NaN: an output element that is not written would show.
    jax.block_until_ready(jnp.full((64, 2**20), jnp.nan)).delete()
    return select(*args, **rules, implementation="mosaic")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("lengths", "changes"),
    [
        ((131072, 1, 63, 64, 65, 100000), {"budget": 96}),
        ((9000, 31, 32, 5000), {}),
        ((2000, 1999), {"width": 32, "dense": jnp.array([True, False])}),
        ((300000,), {"budget": 130}),
    ],
)
def test_forecast_equals_reference(head_dim, lengths, changes):
    rng = np.random.default_rng(len(lengths))
    longest = max(lengths)
    # Small integers: exact dot products, and many ties.
    keys = rng.integers(-3, 4, (len(lengths), 2, GEOMETRY.num_compressed(longest), head_dim))
    forecast = rng.integers(-3, 4, (len(lengths), 1, 2, head_dim))
    args = (
        jnp.asarray(forecast, jnp.bfloat16),
        jnp.asarray(keys, jnp.bfloat16),
        *_rows(lengths),
    )
    rules = _rules(longest, **changes)
    expected = select_blocks_forecast(*args, **rules, implementation="xla")
    for _ in range(2):
        got = _poisoned(select_blocks_forecast, args, rules)
        np.testing.assert_array_equal(got.ids, expected.ids)
        np.testing.assert_array_equal(got.count, expected.count)


@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 64), (16, 128)])
def test_multi_head_chooses_blocks_as_good(group, head_dim):
    rng = np.random.default_rng(group)
    lengths = (40000, 17, 65, 39000)
    # As in the engine, 4 M - 1: no multiple of anything.
    keys = jnp.asarray(rng.normal(size=(4, 2, 2503, head_dim)), jnp.bfloat16)
    q = jnp.asarray(rng.normal(size=(4, 1, 2 * group, head_dim)), jnp.bfloat16)
    args = (q, keys, *_rows(lengths))
    rules = _rules(40000)
    with jax.default_matmul_precision("highest"):
        expected = select_blocks_multi_head(*args, **rules, implementation="xla")
    got = _poisoned(select_blocks_multi_head, args, rules)
    np.testing.assert_array_equal(got.count, expected.count)
    # Scores closer than their last bits may fall either way.
    assert (np.asarray(got.ids) != np.asarray(expected.ids)).mean() < 0.02
    again = _poisoned(select_blocks_multi_head, args, rules)
    np.testing.assert_array_equal(again.ids, got.ids)
