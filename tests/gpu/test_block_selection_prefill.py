"""The prefill selection kernels on a GPU, against the reference in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_selection import select_blocks_forecast, select_blocks_multi_head
from pallas_kernels.geometry import BlockGeometry

pytestmark = pytest.mark.gpu

# group 0 is the Forecast.
CASES = [
    {"group": 0, "length": 20_000, "budget": 96, "local_blocks": 32},
    {"group": 16, "length": 20_000, "budget": 96, "local_blocks": 32},
    {"group": 0, "length": 140_000, "budget": 96},
    {"group": 3, "length": 4096, "head_dim": 64, "geometry": BlockGeometry(32, 32, 16)},
    {
        "group": 5,
        "length": 1000,
        "head_dim": 64,
        "geometry": BlockGeometry(16, 32, 16),
        "budget": 90,
    },
    {"group": 8, "length": 9000, "geometry": BlockGeometry(128, 32, 16), "local_blocks": 0},
    {"group": 0, "length": 5000, "mask_future": False, "local_blocks": 0},
    {"group": 2, "length": 3000, "dense": True, "width": 47},
    {"group": 4, "length": 9000, "coarse": True},
]


@pytest.mark.parametrize("index", range(len(CASES)))
def test_equals_reference(index):
    case = dict(CASES[index])
    rng = np.random.default_rng(index)
    group, length = case.pop("group"), case.pop("length")
    head_dim, geometry = case.pop("head_dim", 128), case.pop("geometry", BlockGeometry())
    rules = {"budget": 20, "local_blocks": 4, "init_blocks": 1} | case
    if "dense" in rules:
        rules["dense"] = jnp.array([True, False])
    batch, kv_heads, tokens = 2, 2, 160
    coarse = BlockGeometry(256, 128, 64) if rules.pop("coarse", False) else None
    capacity = geometry.num_compressed(length)
    # From the first token on in one request, up to the last in the other.
    positions = np.stack([np.arange(tokens) * 3, length - tokens + np.arange(tokens)])
    windows = geometry.complete_windows if group else geometry.started_windows
    # Small integers have exact dot products: ties are ties in any order of summation.
    integers = lambda *shape: jnp.asarray(rng.integers(-2, 3, shape), jnp.bfloat16)
    arguments = (
        integers(batch, tokens, kv_heads * max(group, 1), head_dim),
        integers(batch, kv_heads, capacity, head_dim),
        jnp.asarray(positions // geometry.block_size, jnp.int32),
        jnp.asarray(np.minimum(windows(positions), capacity), jnp.int32),
    )
    rules |= {"num_blocks": geometry.num_blocks(length), "geometry": geometry}
    if coarse:
        rules["coarse"] = integers(batch, kv_heads, coarse.num_compressed(length), head_dim)
        rules["coarse_visible"] = jnp.asarray(coarse.complete_windows(positions), jnp.int32)
    select = select_blocks_multi_head if group else select_blocks_forecast
    jax.block_until_ready(jnp.full((64, 2**20), jnp.nan)).delete()
    run = jax.jit(lambda *a: select(*a, **rules, implementation="mosaic"))
    got = run(*arguments)
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(lambda *a: select(*a, **rules, implementation="xla"))(*arguments)
    ids, reference = np.asarray(got.ids), np.asarray(expected.ids)
    if group:
        # Sums of probabilities round differently: near ties may fall either way.
        assert (ids != reference).any(-1).mean() < 0.01
    else:
        np.testing.assert_array_equal(ids, reference)
        np.testing.assert_array_equal(got.count, expected.count)
    assert (np.asarray(run(*arguments).ids) == ids).all()
