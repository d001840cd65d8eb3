import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_sparse_attention import block_sparse_attention, reference


def blocks(k, v, block_size, filler=0.0):
    """[B, S, K, H] keys and values as [B, K, M, 2, P, H], the rest filled."""
    kv = np.stack([k, v], 3).astype(np.float32)  # [B, S, K, 2, H]
    m = -(-kv.shape[1] // block_size)
    pad = [(0, 0), (0, m * block_size - kv.shape[1]), (0, 0), (0, 0), (0, 0)]
    kv = np.pad(kv, pad, constant_values=filler)
    kv = kv.reshape(kv.shape[0], m, block_size, *kv.shape[2:])
    return jnp.asarray(kv.transpose(0, 3, 1, 4, 2, 5))


def oracle(q, kv, ids, positions, bias=None):
    """float64, one query and head at a time."""
    q, kv = np.asarray(q, np.float64), np.asarray(kv, np.float64)
    b, t, n, h = q.shape
    k, m, _, p = kv.shape[1:5]
    out, lse = np.zeros((b, t, n, h)), np.full((b, t, n), -np.inf)
    for i, token, head in np.ndindex(b, t, n):
        kv_head = head // (n // k)
        named = {int(x) for x in ids[i, kv_head, token] if 0 <= x < m}
        s = [x for x in range(m * p) if x // p in named and x <= positions[i, token]]
        if not s:
            continue
        rows = kv[i, kv_head].transpose(1, 0, 2, 3).reshape(2, m * p, h)[:, s]
        scores = rows[0] @ q[i, token, head] / np.sqrt(h)
        if bias is not None:
            scores = scores + np.asarray(bias, np.float64)[i, kv_head].reshape(m * p)[s]
        weights = np.exp(scores - scores.max())
        out[i, token, head] = weights @ rows[1] / weights.sum()
        lse[i, token, head] = scores.max() + np.log(weights.sum())
    return out, lse


@pytest.mark.parametrize(
    "name",
    [
        "prefill_b16_S100",
        "prefill_b64_S300",
        "prefill_b16_S50_mqa_empty_row",
        "prefill_b16_S77_bias",
    ],
)
def test_prefill_cases(load_case, name):
    params, a = load_case(f"sparse_attention/{name}")
    p = params["block_size"]
    # What lies after the sequence in the last block must not matter.
    kv = blocks(a["k"][None], a["v"][None], p, filler=1e4)
    positions = jnp.arange(params["seq_len"], dtype=jnp.int32)[None]
    attend = functools.partial(block_sparse_attention, scale=params["scale"], return_lse=True)
    arguments = (jnp.asarray(a["q"])[None], kv, jnp.asarray(a["selected"])[None], positions)
    with jax.default_matmul_precision("highest"):
        out, lse = jax.jit(attend)(*arguments)
        np.testing.assert_allclose(out[0], a["out"], rtol=1e-5, atol=2e-5)
        np.testing.assert_allclose(lse[0], a["lse"], rtol=1e-5, atol=2e-5)
        if "bias" not in a:
            return
        m = kv.shape[2]
        bias = np.pad(a["bias"], [(0, m * p - len(a["bias"])), (0, 0)])
        bias = jnp.asarray(bias.reshape(m, p, -1).transpose(2, 0, 1))[None]
        biased, _ = jax.jit(attend)(*arguments, key_bias=bias)
        rows = np.isfinite(a["out_biased"]).all((1, 2))
        assert rows.sum() > 70
        np.testing.assert_allclose(biased[0][rows], a["out_biased"][rows], rtol=1e-5, atol=2e-5)


def relative_error(x, exact):
    return np.linalg.norm(np.asarray(x, np.float64) - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("group", "block", "m", "with_bias"), [(1, 16, 7, True), (3, 4, 9, False), (16, 8, 1, True)]
)
def test_against_float64(rng, monkeypatch, group, block, m, with_bias, dtype):
    """Random lists in any order, -1 among them, ragged positions; several tiles and chunks."""
    monkeypatch.setattr(reference, "TILE_TOKENS", 2 * block)
    b, t, k, h, r = 2, 13, 2, 8, 5
    n = k * group
    monkeypatch.setattr(reference, "CHUNK_BYTES", 4 * b * n * 2 * block * 5)
    q = jnp.asarray(rng.normal(size=(b, t, n, h)) * 2, dtype)
    kv = jnp.asarray(rng.normal(size=(b, k, m, 2, block, h)), dtype)
    ids = rng.permuted(np.broadcast_to(np.arange(-2, m + 3), (b, k, t, m + 5)), axis=3)[..., :r]
    ids = np.where(ids < 0, -1, ids).astype(np.int32)
    ids[0, 0, 3] = -1
    positions = np.sort(rng.integers(0, m * block, (b, t)), axis=1).astype(np.int32)
    positions[1, 0] = -1
    bias = jnp.asarray(rng.normal(size=(b, k, m, block)), jnp.float32) if with_bias else None
    attend = jax.jit(functools.partial(block_sparse_attention, return_lse=True))
    with jax.default_matmul_precision("highest"):
        out, lse = attend(q, kv, jnp.asarray(ids), jnp.asarray(positions), key_bias=bias)
    exact, exact_lse = oracle(q, kv, ids, positions, bias)
    assert out.dtype == q.dtype
    assert lse.dtype == jnp.float32
    assert relative_error(out, exact) < (4e-3 if dtype == "bfloat16" else 1e-6)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-5, atol=1e-5)
    assert (np.asarray(out)[~np.isfinite(exact_lse)] == 0).all()
    assert (~np.isfinite(exact_lse[0, 3, :group])).all()
    assert (~np.isfinite(exact_lse[1, 0])).all()


@pytest.mark.parametrize("length", [1, 15, 16, 17])
def test_all_blocks_equal_dense_attention(rng, length):
    b, n, k, h, p, m = 1, 6, 2, 8, 16, 2
    q, key, value = (
        rng.normal(size=(b, length, heads, h)).astype(np.float32) for heads in (n, k, k)
    )
    room = np.zeros((b, m * p - length, k, h))
    kv = blocks(np.concatenate([key, room], 1), np.concatenate([value, room], 1), p)
    ids = jnp.broadcast_to(jnp.arange(m, dtype=jnp.int32), (b, k, length, m))
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (b, length))
    with jax.default_matmul_precision("highest"):
        out = jax.jit(block_sparse_attention)(jnp.asarray(q), kv, ids, positions)
        dense = jax.nn.dot_product_attention(q, key, value, is_causal=True)
    np.testing.assert_allclose(out, dense, rtol=1e-5, atol=1e-6)


def test_a_list_may_name_a_block_twice(rng):
    q = jnp.asarray(rng.normal(size=(1, 2, 2, 8)), jnp.float32)
    kv = jnp.asarray(rng.normal(size=(1, 1, 4, 2, 8, 8)), jnp.float32)
    positions = jnp.array([[30, 31]], jnp.int32)
    attend = jax.jit(block_sparse_attention)
    once = attend(q, kv, jnp.broadcast_to(jnp.array([1, 3, -1]), (1, 1, 2, 3)), positions)
    twice = attend(q, kv, jnp.broadcast_to(jnp.array([3, 1, 3]), (1, 1, 2, 3)), positions)
    np.testing.assert_array_equal(once, twice)


def test_nothing_of_size_t_by_s_is_made(rng):
    """Temporary memory of 2,048 x 8,192 tokens stays far below the 0.6 GB of their scores."""
    t, n, k, h, p, m = 2048, 9, 3, 16, 64, 128
    shapes = [
        jax.ShapeDtypeStruct((1, t, n, h), jnp.float32),
        jax.ShapeDtypeStruct((1, k, m, 2, p, h), jnp.float32),
        jax.ShapeDtypeStruct((1, k, t, 24), jnp.int32),
        jax.ShapeDtypeStruct((1, t), jnp.int32),
    ]
    compiled = jax.jit(block_sparse_attention).lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 160 << 20


def test_gradients_are_finite(rng):
    """A user's training loop may differentiate through it, rows that see nothing included."""
    q = jnp.asarray(rng.normal(size=(1, 3, 2, 8)), jnp.float32)
    kv = jnp.asarray(rng.normal(size=(1, 1, 2, 2, 8, 8)), jnp.float32)
    ids = jnp.array([[[[0, 1], [-1, -1], [1, -1]]]], jnp.int32)
    positions = jnp.array([[12, 13, 14]], jnp.int32)

    def loss(q, kv):
        return (block_sparse_attention(q, kv, ids, positions) ** 2).sum()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(q, kv)
    assert all(np.isfinite(x).all() for x in gradients)
    assert (np.asarray(gradients[0])[0, [0, 2]] != 0).all()
    assert (np.asarray(gradients[0])[0, 1] == 0).all()


def test_bad_shapes():
    q, kv = jnp.ones((1, 2, 4, 8)), jnp.ones((1, 2, 3, 2, 16, 8))
    ids, positions = jnp.zeros((1, 2, 2, 3), jnp.int32), jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(ValueError, match=r"kv has shape .* expected \[B, K, M, 2, P, H\]"):
        block_sparse_attention(q, jnp.moveaxis(kv, 3, 2), ids, positions)
    with pytest.raises(ValueError, match="5 query heads are not a multiple of 2 KV heads"):
        block_sparse_attention(jnp.ones((1, 2, 5, 8)), kv, ids, positions)
    with pytest.raises(ValueError, match=r"ids has shape .* with B=1, K=2, T=2"):
        block_sparse_attention(q, kv, ids[:, :, :1], positions)
