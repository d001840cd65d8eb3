"""The block-sparse prefill kernel, simulated with race detection and lowered for CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import interpret
from pallas_kernels.block_sparse_attention import block_sparse_attention

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < interpret.MINIMUM_JAX, reason="Mosaic kernels need jax >= 0.11"
)
if jax.__version_info__ >= interpret.MINIMUM_JAX:
    from pallas_kernels.block_sparse_attention import mosaic, plan, specs, tuning


def _case(
    seed, *, tokens, kv_heads, group, blocks, width, start, head_dim=64, block_size=64, bias=False
):
    """Random inputs whose lists overlap in part; one token in eight has an empty list."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    positions = np.minimum(start + np.arange(tokens), blocks * block_size - 1)
    ids = np.full((1, kv_heads, tokens, width), -1, np.int32)
    for k in range(kv_heads):
        favourites = rng.permutation(blocks)
        for t in range(tokens):
            own = positions[t] // block_size
            chosen = [j for j in favourites if j <= own][: width - 2]
            chosen = {*chosen, int(rng.integers(own + 1)), own} if rng.random() > 1 / 8 else set()
            ids[0, k, t, : len(chosen)] = sorted(chosen)
    return {
        "q": normal(1, tokens, kv_heads * group, head_dim),
        "kv": normal(1, kv_heads, blocks, 2, block_size, head_dim),
        "ids": jnp.asarray(ids),
        "positions": jnp.asarray(positions, jnp.int32)[None],
        "key_bias": jnp.asarray(rng.normal(size=(1, kv_heads, blocks, block_size)), jnp.float32)
        if bias
        else None,
    }


def _close(got, expected):
    (out, lse), (ref, ref_lse) = got, expected
    ref = np.asarray(ref, np.float64)
    assert np.linalg.norm(np.asarray(out, np.float64) - ref) < 5e-3 * np.linalg.norm(ref)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(ref_lse))
    np.testing.assert_allclose(lse, ref_lse, atol=2e-3)


SHAPES = {
    # Three tiles; blocks wanted by both consumers, by one, and in part.
    "G16": {"tokens": 18, "kv_heads": 1, "group": 16, "blocks": 9, "width": 5},
    # Padded heads, four blocks a stage, bias.
    "G3": {"tokens": 5, "kv_heads": 2, "group": 3, "block_size": 32, "blocks": 12, "width": 6},
    # One mask word is not enough for the 64 tokens of a consumer.
    "G1": {"tokens": 70, "kv_heads": 1, "group": 1, "block_size": 128, "blocks": 3, "width": 3},
}


@pytest.mark.parametrize(
    ("name", "start", "bias"), [("G16", 400, False), ("G3", 100, True), ("G1", 310, False)]
)
def test_equals_reference(name, start, bias):
    case = _case(len(name), start=start, bias=bias, **SHAPES[name])
    expected = block_sparse_attention(**case, return_lse=True, implementation="xla")
    with interpret.simulated():
        got = block_sparse_attention(**case, return_lse=True, implementation="mosaic")
        jax.block_until_ready(got)
    _close(got, expected)


def test_without_split_and_turns():
    case = _case(7, start=400, **SHAPES["G16"])
    expected = block_sparse_attention(**case, return_lse=True, implementation="xla")
    simple = tuning.Tuning(stages=2, split=False, ping_pong=False)
    with interpret.simulated():
        got = mosaic.block_sparse_attention(**case, return_lse=True, tuning=simple)
        jax.block_until_ready(got)
    _close(got, expected)


def test_rows_that_see_nothing_are_zero():
    case = _case(8, start=0, **SHAPES["G16"])
    case["positions"] = case["positions"].at[0, 3].set(-1)
    case["ids"] = case["ids"].at[0, :, 4].set(-1).at[0, :, 5].set(99).at[0, :, 6, 0].set(8)
    case["ids"] = case["ids"].at[0, :, 6, 1:].set(-1)  # a block of the future only
    with interpret.simulated():
        out, lse = block_sparse_attention(**case, return_lse=True, implementation="mosaic")
        jax.block_until_ready(out)
    assert not np.asarray(out[0, 3:7], np.float32).any()
    assert np.isneginf(lse[0, 3:7]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.zeros((1, 2, 17, 64), jnp.bfloat16)}, "17 query heads"),
        ({"q": jnp.zeros((1, 2, 1, 64), jnp.float32)}, "float32"),
        ({"kv": jnp.zeros((1, 1, 4, 2, 24, 64), jnp.bfloat16)}, "P = 24"),
        ({"scale": 0.0}, "scale 0.0"),
    ],
)
def test_refuses(change, message):
    case = {
        "q": jnp.zeros((1, 2, 1, 64), jnp.bfloat16),
        "kv": jnp.zeros((1, 1, 4, 2, 64, 64), jnp.bfloat16),
        "ids": jnp.zeros((1, 1, 2, 1), jnp.int32),
        "positions": jnp.zeros((1, 2), jnp.int32),
    }
    with interpret.simulated(), pytest.raises(NotImplementedError, match=message):
        block_sparse_attention(**(case | change), implementation="mosaic")


@pytest.mark.parametrize("group", [4, 16])
def test_plan_holds_every_block_once(group):
    rng = np.random.default_rng(0)
    ids = rng.integers(-1, 72, (1, 2, 64, 6))  # 70 and 71 do not exist
    positions = jnp.arange(64, dtype=jnp.int32)[None] + 2000
    made = plan.make_plan(
        jnp.asarray(ids, jnp.int32),
        positions,
        num_blocks=70,
        block_size=64,
        group=group,
        split=True,
    )
    words = np.asarray(made.classes).view(np.uint32)
    members = np.asarray(made.members).view(np.uint32)
    read = lambda row: {j for j in range(96) if row[j // 32] >> (j % 32) & 1}
    absent = {-1, 70, 71}
    for k in range(2):
        for tile in range(64 // (2 * group)):
            first = tile * 2 * group
            lists = ids[0, k, first : first + 2 * group]
            sides = [set(part.ravel()) - absent for part in (lists[:group], lists[group:])]
            partial = {j for j in range(70) if (j + 1) * 64 - 1 > 2000 + first}
            both = sides[0] & sides[1]
            expected = [both, sides[0] - both, sides[1] - both, sides[0] | sides[1]]
            expected = [e - partial for e in expected[:3]] + [expected[3] & partial]
            assert [read(words[0, k, tile, c]) for c in range(4)] == expected
            assert made.counts[0, k, tile].tolist() == [len(e) for e in expected]
        for t in range(64):
            got = {j for j in range(96) if members[0, k, t // 32, j] >> (t % 32) & 1}
            assert got == set(ids[0, k, t]) - absent


def test_drifting_lists_name_no_block_twice():
    spec = specs.Spec(8192, budget=48, local_blocks=9)
    ids = np.asarray(specs.drifting_lists(spec, 0.1))[0]
    later = ids[:, 48 * 64 :]
    assert (np.diff(later, axis=-1) > 0).all()
    assert 48 < specs.union_size(jnp.asarray(ids[None, :, 48 * 64 :]), 8) < 8 * 48


@pytest.mark.parametrize(("head_dim", "bias"), [(128, False), (64, True)])
def test_lowers_for_cuda(head_dim, bias):
    case = _case(1, start=100, bias=bias, head_dim=head_dim, **SHAPES["G16"])

    def call(case):
        return mosaic.block_sparse_attention(**case, return_lse=True)

    exported = jax.export.export(jax.jit(call), platforms=["cuda"])(case)
    assert "mosaic_gpu" in exported.mlir_module()
