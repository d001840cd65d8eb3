import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_sparse_attention import block_sparse_attention
from pallas_kernels.pool_attention import pool_attention, reference

IMPLEMENTATIONS = {
    "looped": reference.attend_looped,
    "gathered": reference.attend_gathered,
}


def run(
    which, q, slots, slot_ids, tail, tail_mask, slot_bias=None, tail_bias=None, scale=None,
    slot_scales=None,
):  # fmt: skip
    """Output and log-sum-exp of one of the two reference paths."""
    function = functools.partial(
        IMPLEMENTATIONS[which], scale=q.shape[3] ** -0.5 if scale is None else scale
    )
    with jax.default_matmul_precision("highest"):
        return jax.jit(function)(
            q, slots, slot_ids, tail, tail_mask, slot_bias, tail_bias, slot_scales
        )


def oracle(q, slots, slot_ids, tail, tail_mask, slot_bias=None, tail_bias=None):
    """float64, one query and head at a time."""
    q, slots, tail = (np.asarray(x, np.float64) for x in (q, slots, tail))
    b, t, n, h = q.shape
    k, p = slots.shape[1], slots.shape[4]
    out, lse = np.zeros((b, t, n, h)), np.full((b, t, n), -np.inf)
    for i, token, head in np.ndindex(b, t, n):
        kv_head = head // (n // k)
        named = [z for z in slot_ids[i, kv_head] if z >= 0]
        seen = np.flatnonzero(tail_mask[i, token])
        rows = np.concatenate(
            [slots[i, kv_head, z] for z in named] + [tail[i, kv_head][:, seen]], axis=1
        )
        if not rows.shape[1]:
            continue
        scores = rows[0] @ q[i, token, head] / np.sqrt(h)
        if slot_bias is not None:
            biases = [slot_bias[i, kv_head, z] for z in named] + [tail_bias[i, kv_head, seen]]
            scores = scores + np.concatenate(biases).astype(np.float64)
        assert len(scores) == len(named) * p + len(seen)
        weights = np.exp(scores - scores.max())
        out[i, token, head] = weights @ rows[1] / weights.sum()
        lse[i, token, head] = scores.max() + np.log(weights.sum())
    return out, lse


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["decode_b16", "decode_b64_gqa16"])
def test_decode_cases(load_case, name, which):
    """Whole blocks in shuffled slots and the last as tail; the same as prefill of one token."""
    params, a = load_case(f"sparse_attention/{name}")
    p, k, lens = params["block_size"], params["num_kv_heads"], params["lens"]
    b, h = len(lens), params["head_dim"]
    m = max(-(-n // p) for n in lens)
    kv = np.full((b, k, m, 2, p, h), 1e4, np.float32)
    for i, (start, n) in enumerate(zip(a["cu_seqlens_k"], lens, strict=False)):
        for s in range(n):
            kv[i, :, s // p, 0, s % p] = a["k"][start + s]
            kv[i, :, s // p, 1, s % p] = a["v"][start + s]
    selected = a["selected"].swapaxes(0, 1)  # [B, K, R]
    q = jnp.asarray(a["q"])[:, None]

    position = jnp.asarray(lens, jnp.int32)[:, None] - 1
    attend = functools.partial(block_sparse_attention, scale=params["scale"], return_lse=True)
    with jax.default_matmul_precision("highest"):
        out, lse = jax.jit(attend)(q, kv, jnp.asarray(selected)[:, :, None], position)
    np.testing.assert_allclose(out[:, 0], a["out"], rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(lse[:, 0], a["lse"], rtol=1e-5, atol=2e-5)

    last = (np.asarray(lens) - 1) // p
    # The tail goes by sequence, not by head: it needs the last block in every head's list.
    assert (selected == last[:, None, None]).any(-1).all()
    order = np.random.default_rng(0).permutation(m)
    slot_of = np.argsort(order)
    whole = (selected >= 0) & (selected != last[:, None, None])
    slot_ids = np.where(whole, slot_of[np.maximum(selected, 0)], -1)
    tail = kv[np.arange(b), :, last]
    tail_mask = np.arange(p) <= (np.asarray(lens) - 1 - last * p)[:, None, None]
    out, lse = run(
        which, q, jnp.asarray(kv[:, :, order]), jnp.asarray(slot_ids, jnp.int32),
        jnp.asarray(tail), jnp.asarray(tail_mask), scale=params["scale"],
    )  # fmt: skip
    np.testing.assert_allclose(out[:, 0], a["out"], rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(lse[:, 0], a["lse"], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("group", "t", "r", "e", "with_bias"),
    [(1, 1, 6, 4, True), (3, 4, 4, 0, False), (16, 1, 1, 9, True)],
)
def test_against_float64(rng, which, dtype, group, t, r, e, with_bias):
    b, k, h, z, p = 3, 2, 8, 7, 4
    q = jnp.asarray(rng.normal(size=(b, t, k * group, h)) * 2, dtype)
    slots = rng.normal(size=(b, k, z, 2, p, h)).astype(np.float32)
    slot_ids = rng.permuted(np.broadcast_to(np.arange(-2, z), (b, k, z + 2)), axis=2)[..., :r]
    slot_ids = np.maximum(slot_ids, -1).astype(np.int32)
    slot_ids[0] = -1
    # Slots that nobody names may hold anything finite.
    named = (slot_ids[..., None] == np.arange(z)).any(2)
    slots[~named] = 1e4
    tail = rng.normal(size=(b, k, 2, e, h)).astype(np.float32)
    tail_mask = rng.random((b, t, e)) < 0.6
    tail_mask[0] = False
    slots, tail = jnp.asarray(slots, dtype), jnp.asarray(tail, dtype)
    bias = {}
    if with_bias:
        bias = {
            "slot_bias": rng.normal(size=(b, k, z, p)).astype(np.float32),
            "tail_bias": rng.normal(size=(b, k, e)).astype(np.float32),
        }
    out, lse = run(which, q, slots, slot_ids, tail, tail_mask, **bias)
    exact, exact_lse = oracle(q, slots, slot_ids, tail, tail_mask, **bias)
    assert out.dtype == q.dtype
    assert lse.dtype == jnp.float32
    error = np.linalg.norm(np.asarray(out, np.float64) - exact) / np.linalg.norm(exact)
    assert error < (4e-3 if dtype == "bfloat16" else 1e-6)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-5, atol=1e-5)
    # Request 0 sees nothing at all.
    assert (np.asarray(out)[0] == 0).all()
    assert (np.asarray(lse)[0] == -np.inf).all()


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_quantised_slots_stand_for_themselves_times_their_scale(rng, which, dtype):
    b, k, h, z, p = 2, 2, 8, 5, 4
    q = jnp.asarray(rng.normal(size=(b, 1, 6, h)), jnp.float32)
    slots = jnp.asarray(rng.integers(-127, 128, (b, k, z, 2, p, h)), jnp.float32).astype(dtype)
    scales = jnp.asarray(rng.uniform(0.01, 0.03, (b, k, z, 2)), jnp.float32)
    slot_ids = np.array([[[0, 4, -1], [3, 2, 1]], [[1, -1, -1], [2, 0, 4]]], np.int32)
    tail = rng.normal(size=(b, k, 2, 3, h)).astype(np.float32)
    mask = np.ones((b, 1, 3), bool)
    wide = np.asarray(slots, np.float64) * np.asarray(scales, np.float64)[..., None, None]
    out, lse = run(which, q, slots, slot_ids, tail, mask, slot_scales=scales)
    exact, exact_lse = oracle(q, wide, slot_ids, tail, mask)
    np.testing.assert_allclose(out, exact, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_the_place_of_a_block_changes_no_bit(rng, which):
    """The same blocks in other slots, of a larger pool: bit-identical."""
    b, k, h, z, p = 2, 2, 8, 6, 4
    q = jnp.asarray(rng.normal(size=(b, 1, 6, h)), jnp.float32)
    slots = rng.normal(size=(b, k, z, 2, p, h)).astype(np.float32)
    tail = jnp.asarray(rng.normal(size=(b, k, 2, p, h)), jnp.float32)
    mask = jnp.ones((b, 1, p), bool)
    slot_ids = np.broadcast_to(np.array([4, 1, 3, -1, 0], np.int32), (b, k, 5))
    first = run(which, q, jnp.asarray(slots), slot_ids, tail, mask)
    order = rng.permutation(10)
    moved = rng.normal(size=(b, k, 10, 2, p, h)).astype(np.float32)
    moved[:, :, order[:z]] = slots
    moved_ids = np.where(slot_ids >= 0, order[np.maximum(slot_ids, 0)], -1).astype(np.int32)
    second = run(which, q, jnp.asarray(moved), moved_ids, tail, mask)
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(x, y)


def test_public_function_and_its_errors(rng):
    q = jnp.asarray(rng.normal(size=(1, 1, 4, 8)), jnp.float32)
    slots = jnp.asarray(rng.normal(size=(1, 2, 3, 2, 4, 8)), jnp.float32)
    slot_ids = jnp.array([[[0, 2], [1, -1]]], jnp.int32)
    tail, mask = jnp.zeros((1, 2, 2, 0, 8)), jnp.ones((1, 1, 0), bool)
    out = jax.jit(pool_attention)(q, slots, slot_ids, tail, mask)
    exact, exact_lse = oracle(q, slots, slot_ids, tail, mask)
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-6)
    _, lse = jax.jit(functools.partial(pool_attention, return_lse=True))(
        q, slots, slot_ids, tail, mask
    )
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-5)
    with pytest.raises(ValueError, match="5 query heads are not a multiple of 2 KV heads"):
        pool_attention(jnp.ones((1, 1, 5, 8)), slots, slot_ids, tail, mask)
    with pytest.raises(ValueError, match=r"tail_mask has shape \(1, 1, 3\), expected \[B, T, E\]"):
        pool_attention(q, slots, slot_ids, tail, jnp.ones((1, 1, 3), bool))
    with pytest.raises(ValueError, match="slots of int8 without slot_scales"):
        pool_attention(q, slots.astype(jnp.int8), slot_ids, tail, mask)
    with pytest.raises(ValueError, match="slots of float32 with slot_scales"):
        pool_attention(q, slots, slot_ids, tail, mask, slot_scales=jnp.ones((1, 2, 3, 2)))
