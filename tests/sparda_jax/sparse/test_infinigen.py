"""InfiniGen: the skew is what it claims to be, and selection is what numpy says it is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.geometry import BlockGeometry
from sparda_jax.config import ModelConfig, RopeConfig, SparseConfig
from sparda_jax.models import Decoder
from sparda_jax.models.rope import rope_at
from sparda_jax.sparse import infinigen
from sparda_jax.sparse.infinigen import (
    calibrate,
    orthogonal_skew,
    partial_keys,
    select_infinigen,
    speculate,
)

CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=40,
    hidden_size=24,
    intermediate_size=32,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    rope=RopeConfig(head_dim=8),
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    qkv_bias=True,
    qk_norm=True,
)
SPARSE = SparseConfig(BlockGeometry(4, 2, 2), init_blocks=1, local_blocks=1, budget_blocks=5)


@pytest.fixture(scope="module")
def model():
    model = Decoder.random(CONFIG)
    rng = np.random.default_rng(0)
    for layer in model.layers:  # the constructors' zeros and ones would hide a missing term
        for leaf in (layer.q.bias, layer.k.bias, layer.q_norm.scale, layer.attention_norm.scale):
            leaf.set_value(jnp.asarray(rng.uniform(0.5, 1.5, leaf.shape), jnp.float32))
    return model


def queries_and_keys(model, tokens):
    """(normed, q, k) of every layer of a dense forward over one row; softmax by hand."""
    positions = jnp.arange(tokens.shape[1])[None]
    cos, sin = rope_at(CONFIG.rope, positions, 256)
    x, out = model.embed(tokens), []
    for layer in model.layers:
        q, k, v = layer.qkv(x, cos, sin)
        out.append((layer.attention_norm(x), np.asarray(q[0]), np.asarray(k[0])))
        wide_k, wide_v = (jnp.repeat(a, CONFIG.group_size, axis=2)[0] for a in (k, v))
        scores = jnp.einsum("tnh,snh->nts", q[0], wide_k) * CONFIG.head_dim**-0.5
        scores = jnp.where(np.tri(scores.shape[1], dtype=bool), scores, -jnp.inf)
        x = layer.finish(x, jnp.einsum("nts,snh->tnh", jax.nn.softmax(scores), wide_v)[None])
    return out, (cos, sin)


def test_skews_are_the_singular_vectors_of_stacked_rows():
    rng = np.random.default_rng(1)
    rows = lambda scale: rng.normal(size=(2, 200, 8)) * scale @ rng.normal(size=(2, 8, 8))
    q, k = rows(2.0 ** -np.arange(8)), 50 * rows(1.5 ** -np.arange(8))
    moments = (np.einsum("kth,kti->khi", x, x) / 200 for x in (q, k))
    skew = np.asarray(orthogonal_skew(*moments, 3))
    for head in range(2):
        # Long keys count no more than queries.
        stack = np.concatenate([x[head] / np.linalg.norm(x[head]) for x in (q, k)])
        expected = np.linalg.svd(stack)[2][:3].T
        np.testing.assert_allclose(np.abs((expected * skew[head]).sum(0)), 1, atol=1e-5)
        np.testing.assert_allclose(skew[head].T @ skew[head], np.eye(3), atol=1e-5)


def test_calibration_takes_the_moments_of_all_tokens(model):
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 40, (2, 60))
    got = calibrate(model, jnp.asarray(tokens), channels=4)
    assert len(got.layers) == 3 and got.channels == 4
    rows = [queries_and_keys(model, jnp.asarray(row[None]))[0] for row in tokens]
    for layer in range(3):
        q = np.concatenate([row[layer][1] for row in rows]).reshape(120, 2, 3, 8).sum(2)
        k = np.concatenate([row[layer][2] for row in rows])
        x = np.stack([q[:, head].T @ q[:, head] / 120 for head in range(2)])
        z = np.stack([np.cov(k[:, head].T, bias=True) for head in range(2)])
        expected = orthogonal_skew(x, z, 4)
        # The product does not depend on the signs of singular vectors.
        for ours, theirs in zip(
            *(np.einsum("khe,kie->khi", s, s) for s in (got.layers[layer], expected)),
            strict=True,
        ):
            assert np.linalg.norm(ours - theirs) < 2e-3 * np.linalg.norm(theirs)


def selected_by_numpy(scores, positions, visible, sparse):
    """Loops over everything; scores [K, T, S] of one sequence."""
    size = sparse.geometry.block_size
    chosen = np.full((*scores.shape[:2], sparse.budget_blocks), -1)
    for head, t in np.ndindex(*scores.shape[:2]):
        own = positions[t] // size
        rank = []
        for block in range(own + 1):
            seen = scores[head, t, block * size : min((block + 1) * size, visible[t])]
            forced = block < sparse.init_blocks or block >= own - sparse.local_blocks
            best = np.inf if forced else max(seen, default=-np.inf)
            rank.append((-best, block))
        ids = sorted(block for _, block in sorted(rank)[: sparse.budget_blocks])
        chosen[head, t, : len(ids)] = ids
    return chosen


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 4 * 2 * 2 * 43 * 7])
def test_selection_by_numpy(monkeypatch, chunk_bytes):
    monkeypatch.setattr(infinigen, "CHUNK_BYTES", chunk_bytes)
    rng = np.random.default_rng(3)
    query = rng.normal(size=(2, 43, 6, 5)).astype(np.float32)
    cache = rng.normal(size=(2, 2, 43, 5)).astype(np.float32)
    positions = np.stack([np.arange(43), rng.permutation(43)]).astype(np.int32)
    visible = np.where([[True], [False]], positions + 1, positions)
    got = select_infinigen(*map(jnp.asarray, (query, cache, positions, visible)), SPARSE, 11)
    for b in range(2):
        scores = np.einsum("tgke,kse->kts", query[b].reshape(43, 2, 3, 5).swapaxes(1, 2), cache[b])
        expected = selected_by_numpy(scores, positions[b], visible[b], SPARSE)
        np.testing.assert_array_equal(got.ids[b], expected)
        np.testing.assert_array_equal(got.count[b], (expected >= 0).sum(-1))


def test_rows_below_dense_len_and_spare_blocks():
    rng = np.random.default_rng(4)
    sparse = dataclasses.replace(SPARSE, dense_len=33)
    query, cache = rng.normal(size=(2, 1, 6, 5)), rng.normal(size=(2, 2, 40, 5))
    positions = jnp.asarray([[31], [39]])
    got = select_infinigen(
        *(jnp.asarray(query), jnp.asarray(cache), positions, positions, sparse, 13),
        dense=jnp.asarray([True, False]),
    )
    assert got.ids.shape == (2, 2, 1, 8)
    np.testing.assert_array_equal(got.ids[0, :, 0], [range(8)] * 2)
    assert got.ids[1].max() == 9 and (got.count[1] == 5).all()


def test_all_channels_are_the_exact_scores(model):
    """At E = H nothing is lost: with a layer's own input, selection is that of q.k itself."""
    tokens = jnp.asarray(np.random.default_rng(5).integers(0, 40, (1, 96)))
    skews = calibrate(model, tokens, channels=8)
    layers, (cos, sin) = queries_and_keys(model, tokens)
    positions = jnp.arange(96, dtype=jnp.int32)[None]
    for layer, skew, (normed, q, k) in zip(model.layers, skews.layers, layers, strict=True):
        query = speculate(layer, skew, normed, cos, sin)
        cache = partial_keys(jnp.asarray(k.swapaxes(0, 1))[None], skew)
        got = select_infinigen(query, cache, positions, positions + 1, SPARSE, 24)
        exact = np.einsum("tkh,skh->kts", q.reshape(96, 2, 3, 8).sum(2), k)
        expected = selected_by_numpy(exact, np.arange(96), np.arange(96) + 1, SPARSE)
        assert (np.asarray(got.ids[0]) != expected).mean() < 0.005  # rounding at near ties


def test_the_next_layer_is_asked(model):
    rng = np.random.default_rng(6)
    normed = jnp.asarray(rng.normal(size=(1, 5, 24)), jnp.float32)
    skew = jnp.asarray(rng.normal(size=(2, 8, 3)), jnp.float32)
    layer, other = model.layers[1], model.layers[2]
    cos, sin = rope_at(CONFIG.rope, jnp.arange(5)[None], 256)
    got = speculate(layer, skew, normed, cos, sin)
    q = np.asarray(layer.query(normed, cos, sin))
    expected = np.einsum("tkgh,khe->tkge", q[0].reshape(5, 2, 3, 8), skew).reshape(5, 6, 3)
    np.testing.assert_allclose(got[0], expected, rtol=1e-4, atol=1e-4)
    assert not np.allclose(got, speculate(other, skew, normed, cos, sin), atol=1e-2)


def test_too_little_text_and_too_many_channels(model):
    tokens = jnp.zeros((1, 63), jnp.int32)
    with pytest.raises(ValueError, match=r"63 tokens of calibration text: at least 64"):
        calibrate(model, tokens)
    with pytest.raises(ValueError, match=r"channels must be in 1 \.\. 8 \(the head dim\), got 9"):
        calibrate(model, tokens, channels=9)
    with pytest.raises(ValueError, match="257 tokens exceed the maximum length of 256"):
        calibrate(model, jnp.zeros((1, 257), jnp.int32))
