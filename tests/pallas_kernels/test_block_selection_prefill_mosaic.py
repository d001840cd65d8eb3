"""The prefill selection kernels, simulated with race detection and lowered for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import interpret
from pallas_kernels.block_selection import (
    choose_blocks,
    select_blocks_forecast,
    select_blocks_multi_head,
)
from pallas_kernels.geometry import BlockGeometry

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < interpret.MINIMUM_JAX, reason="Mosaic kernels need jax >= 0.11"
)
if jax.__version_info__ >= interpret.MINIMUM_JAX:
    from pallas_kernels.block_selection import mosaic_choice, mosaic_prefill


def _case(seed, *, group, head_dim=64, geometry=None, length=900, tokens=3, step=70, **changes):
    """Small integers: their dot products are exact, so that ties are ties in any order."""
    rng = np.random.default_rng(seed)
    geometry = geometry or BlockGeometry()
    capacity = geometry.num_compressed(length)
    integers = lambda *shape: jnp.asarray(rng.integers(-2, 3, shape), jnp.bfloat16)
    positions = np.maximum(length - 1 - step * np.arange(tokens), 0)[None, ::-1]
    windows = geometry.complete_windows if group else geometry.started_windows
    rules = {
        "num_blocks": geometry.num_blocks(length),
        "geometry": geometry,
        "init_blocks": 1,
        "local_blocks": 2,
        "budget": 6,
    }
    arguments = (
        integers(1, tokens, max(group, 1), head_dim),
        integers(1, 1, capacity, head_dim),
        jnp.asarray(positions // geometry.block_size, jnp.int32),
        jnp.asarray(np.minimum(windows(positions), capacity), jnp.int32),
    )
    return arguments, rules | changes


@pytest.mark.parametrize(
    ("group", "settings"),
    [
        (0, {}),
        (0, {"geometry": BlockGeometry(128, 32, 16), "length": 2000, "budget": 20}),
        (3, {"geometry": BlockGeometry(16, 32, 16), "step": 440}),  # nothing visible at first
        (0, {"mask_future": False, "local_blocks": 0, "length": 935}),
        (2, {"dense": jnp.array([True]), "width": 20}),
        (2, {"coarse": True}),  # one of the tokens sees no coarse key
    ],
)
def test_equals_reference(group, settings):
    settings = dict(settings)
    coarse = settings.pop("coarse", False)
    arguments, rules = _case(group, group=group, **settings)
    if coarse:
        keys = np.random.default_rng(9).integers(-2, 3, (1, 1, 12, 64))
        rules["coarse"] = jnp.asarray(keys, jnp.bfloat16)
        rules["coarse_visible"] = jnp.array([[0, 5, 12]], jnp.int32)
    select = select_blocks_multi_head if group else select_blocks_forecast
    expected = select(*arguments, **rules, implementation="xla")
    with interpret.simulated():
        got = jax.block_until_ready(select(*arguments, **rules, implementation="mosaic"))
    np.testing.assert_array_equal(got.ids, expected.ids)
    np.testing.assert_array_equal(got.count, expected.count)


def test_choice_of_ties_infinities_and_poison():
    rng = np.random.default_rng(0)
    blocks, limit = 70, 10
    scores = np.full((1, 6, mosaic_choice.padded_blocks(blocks)), np.nan, np.float32)
    scores[..., :blocks] = rng.integers(-2, 3, (1, 6, blocks))
    scores[0, 1, :blocks] = -np.inf
    scores[0, 2, :blocks:2] = -0.0
    own = np.array([[69, 50, 40, 5, 0, -1]], np.int32)
    scores[0, 0, 69] = np.inf
    with interpret.simulated():
        got = mosaic_choice.choose(
            jnp.asarray(scores), jnp.asarray(own), jnp.array([limit]),
            num_blocks=blocks, init_blocks=1, local_blocks=2, width=limit, mask_future=True,
        )  # fmt: skip
        jax.block_until_ready(got)
    for t, last in enumerate(own[0]):
        row = scores[0, t, :blocks] + 0.0
        row[[j for j in range(blocks) if j < 1 or last - 2 <= j <= last]] = np.inf
        best = sorted(range(last + 1), key=lambda j, row=row: (-row[j], j))[:limit]
        assert got[0, t, : len(best)].tolist() == sorted(best)
        assert (got[0, t, len(best) :] == -1).all()


@pytest.mark.parametrize("blocks", [70, 300])  # every pair compared; the kernel
@pytest.mark.parametrize("mask_future", [True, False])
def test_choice_from_given_scores(blocks, mask_future):
    rng = np.random.default_rng(1)
    scores = rng.integers(-2, 3, (2, 1, 3, blocks)).astype(np.float32)
    scores[0, 0, 1, ::2] = -np.inf
    scores[0, 0, 2, 1:30] = -np.inf
    scores = jnp.asarray(scores)
    own = jnp.array([[blocks - 1, 30, 20], [40, 3, 0]], jnp.int32)
    rules = {"init_blocks": 1, "local_blocks": 2, "budget": 9, "width": 80}
    rules["mask_future"] = mask_future
    if mask_future:
        rules["dense"] = jnp.array([False, True])
    expected = choose_blocks(scores, own, **rules, implementation="xla")
    with interpret.simulated():
        got = jax.block_until_ready(choose_blocks(scores, own, **rules, implementation="mosaic"))
    np.testing.assert_array_equal(got.ids, expected.ids)
    np.testing.assert_array_equal(got.count, expected.count)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 32}, "H = 32"),
        ({"geometry": BlockGeometry(256, 32, 16)}, "16 compressed keys"),
        ({"length": 64 * 20_000, "budget": 5}, "20000 blocks"),
    ],
)
def test_refuses(change, message):
    arguments, rules = _case(0, group=0, **change)
    with interpret.simulated(), pytest.raises(NotImplementedError, match=message):
        select_blocks_forecast(*arguments, **rules, implementation="mosaic")


@pytest.mark.parametrize(("group", "length"), [(0, 900), (16, 31)])  # 31: no compressed key
def test_lowers_for_cuda(group, length):
    arguments, rules = _case(0, group=group, head_dim=128, length=length)
    rules |= {"width": 6, "dense": None, "multi_head": bool(group)}
    exported = jax.export.export(
        jax.jit(functools.partial(mosaic_prefill.select_blocks, **rules)), platforms=["cuda"]
    )(*arguments)
    assert exported.mlir_module().count("mosaic_gpu") >= (3 if group else 2)
