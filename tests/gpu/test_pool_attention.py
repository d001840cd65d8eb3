"""Pool attention on a GPU, against the reference in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.pool_attention import pool_attention

pytestmark = pytest.mark.gpu

CASES = [
    {"b": 1, "t": 1, "k": 2, "g": 16, "h": 128, "p": 64, "z": 104, "r": 96, "e": 64},
    {"b": 8, "t": 1, "k": 2, "g": 16, "h": 128, "p": 64, "z": 40, "r": 32, "e": 64},
    {"b": 70, "t": 1, "k": 2, "g": 3, "h": 64, "p": 64, "z": 9, "r": 7, "e": 1},
    {"b": 3, "t": 1, "k": 1, "g": 1, "h": 64, "p": 16, "z": 33, "r": 31, "e": 17},
    {"b": 2, "t": 1, "k": 3, "g": 5, "h": 128, "p": 32, "z": 9, "r": 1, "e": 31},
    {"b": 2, "t": 1, "k": 2, "g": 7, "h": 128, "p": 128, "z": 9, "r": 9, "e": 129},
    {"b": 2, "t": 4, "k": 2, "g": 4, "h": 64, "p": 64, "z": 9, "r": 8, "e": 65},
    {"b": 3, "t": 32, "k": 2, "g": 16, "h": 128, "p": 64, "z": 20, "r": 17, "e": 32},
    {"b": 2, "t": 33, "k": 2, "g": 3, "h": 64, "p": 32, "z": 20, "r": 17, "e": 63},
    {"b": 2, "t": 32, "k": 1, "g": 4, "h": 128, "p": 16, "z": 20, "r": 19, "e": 0},
]


def _operands(rng, *, b, t, k, g, h, p, z, r, e):
    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    ids = np.stack([rng.permutation(z)[:r] for _ in range(b * k)]).reshape(b, k, r)
    if r < z:  # otherwise all slots are named
        ids = np.where(rng.random(ids.shape) < 0.2, -1, ids)
    ids[0, 0] = -1  # one row without slots
    mask = rng.random((b, t, e)) < 0.6
    mask[0, 0] = False  # and one query that sees nothing at all
    slots, tail = normal(b, k, z, 2, p, h), normal(b, k, 2, e, h)
    for i, j in np.ndindex(b, k):
        slots[i, j, np.setdiff1d(np.arange(z), ids[i, j])] = np.nan
    tail[np.broadcast_to(~mask.any(1)[:, None, None], tail.shape[:4])] = np.nan
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (normal(b, t, k * g, h), slots, tail)]
    biases = {
        "slot_bias": jnp.asarray(normal(b, k, z, p)),
        "tail_bias": jnp.asarray(normal(b, k, e)),
    }
    ids = jnp.asarray(ids, jnp.int32)
    return (arrays[0], arrays[1], ids, arrays[2], jnp.asarray(mask)), biases


@functools.partial(jax.jit, static_argnames="implementation")
def _attend(operands, biases, implementation):
    return pool_attention(*operands, **biases, return_lse=True, implementation=implementation)


def _exact(operands, biases):
    with jax.default_matmul_precision("highest"):
        return _attend(operands, biases, "xla")


def _check(operands, biases, expected):
    """Within the tolerance of the reference, and the same bits again."""
    out, lse = _run(operands, biases)
    wanted, wanted_lse = (np.asarray(x, np.float64) for x in expected)
    assert np.linalg.norm(np.asarray(out, np.float64) - wanted) <= 5e-3 * np.linalg.norm(wanted)
    np.testing.assert_allclose(lse, wanted_lse, atol=3e-3)
    again = _run(operands, biases)
    np.testing.assert_array_equal(np.asarray(again[0], np.float64), np.asarray(out, np.float64))
    np.testing.assert_array_equal(again[1], lse)


def _run(operands, biases):
    # Freed memory full of NaN: an output element that is not written would show.
    jax.block_until_ready(jnp.full((64, 2**20), jnp.nan)).delete()
    return _attend(operands, biases, "mosaic")


@pytest.mark.parametrize("index", range(len(CASES)))
@pytest.mark.parametrize("biased", [False, True])
def test_equals_reference(index, biased):
    rng = np.random.default_rng(index)
    operands, biases = _operands(rng, **CASES[index])
    biases = biases if biased else {}
    exact = [
        jnp.nan_to_num(x.astype(jnp.float32)) if x.dtype == jnp.bfloat16 else x for x in operands
    ]
    _check(operands, biases, _exact(exact, biases))


@pytest.mark.parametrize("index", [0, 1, 3, 4, 6, 7, 9])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_quantised_slots(index, dtype):
    """Exact products of what is stored: the tolerance is that of bfloat16 slots."""
    operands, biases = _operands(np.random.default_rng(index), **CASES[index])
    q, slots, ids, tail, mask = operands
    wide = jnp.nan_to_num(slots.astype(jnp.float32))
    scales = jnp.abs(wide).max(axis=(4, 5)) / (127 if dtype == "int8" else 448)
    scales = jnp.where(scales > 0, scales, jnp.nan)  # slots that nobody names
    narrow = jnp.nan_to_num(wide / scales[..., None, None])
    narrow = (jnp.rint(narrow) if dtype == "int8" else narrow).astype(dtype)
    biases = {"slot_scales": scales} | (biases if index == 3 else {})
    exact = (q.astype(jnp.float32), narrow, ids, jnp.nan_to_num(tail.astype(jnp.float32)), mask)
    expected = _exact(exact, biases | {"slot_scales": jnp.nan_to_num(scales)})
    _check((q, narrow, ids, tail, mask), biases, expected)


def test_permuted_slots_give_the_same_bits():
    rng = np.random.default_rng(20)
    operands, _ = _operands(rng, **CASES[1])
    q, slots, ids, tail, mask = operands
    order = rng.permutation(slots.shape[2])
    place = jnp.asarray(np.argsort(order), jnp.int32)
    moved = jnp.where(ids >= 0, place[jnp.maximum(ids, 0)], -1)
    straight = _run(operands, {})
    permuted = _run((q, slots[:, :, order], moved, tail, mask), {})
    for got, expected in zip(permuted, straight, strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float64), np.asarray(expected, np.float64))
