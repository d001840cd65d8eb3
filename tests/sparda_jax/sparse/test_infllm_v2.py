"""The policy on whole models: equal to the published sparse one, and to dense where it must be."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from pallas_kernels.compressed_keys import compress_keys
from pallas_kernels.geometry import BlockGeometry
from sparda_jax.checkpoints.assemble import ArraySource, assemble
from sparda_jax.checkpoints.safetensors import read_json
from sparda_jax.config import ModelConfig, RopeConfig, SparseConfig
from sparda_jax.models import Decoder
from sparda_jax.models.rope import rope_at
from sparda_jax.sparse.infllm_v2 import (
    select_decode,
    select_prefill,
    selection_width,
    sparse_attention,
    to_blocks,
)

GEOMETRY = BlockGeometry(block_size=16, kernel_size=8, kernel_stride=4)
SPARSE = SparseConfig(GEOMETRY, init_blocks=1, local_blocks=1, budget_blocks=4)
CONFIG = ModelConfig(
    family="llama",
    vocab_size=40,
    hidden_size=24,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope=RopeConfig(head_dim=8),
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)


def load_case(folder):
    """Model, policy and arrays of a SparDA case; its Forecast weights are not ours to load."""
    tensors = load_file(folder / "model.safetensors")
    plain = {n: t for n, t in tensors.items() if "q_future" not in n and "q_curr" not in n}
    config = read_json(folder / "config.json")
    case = read_json(folder / "case.json")["params"]
    sparse = SparseConfig(
        BlockGeometry(case["block_size"], case["kernel_size"], case["kernel_stride"]),
        init_blocks=case["init_blocks"],
        local_blocks=case["local_blocks"],
        budget_blocks=case["total_selected"],
    )
    model = assemble(ModelConfig.from_huggingface(config), ArraySource(plain))
    return model, sparse, case["prefill_len"], load_file(folder / "data.safetensors")


@partial(jax.jit, static_argnames="sparse")
def forward(model, tokens, lengths=None, sparse=None):
    with jax.default_matmul_precision("highest"):
        return model(tokens, lengths=lengths, sparse=sparse)


@partial(jax.jit, static_argnames="sparse")
def selections(model, tokens, sparse):
    """Chosen blocks of every layer, `[L, B, K, T, R]`."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    lengths = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
    cos, sin = rope_at(model.config.rope, positions, model.config.max_position_embeddings)
    x = model.embed(tokens)
    ids = []
    for layer in model.layers:
        q, k, v = layer.qkv(x, cos, sin)
        compressed = compress_keys(k.transpose(0, 2, 1, 3), sparse.geometry)
        blocks = int(sparse.geometry.num_blocks(tokens.shape[1]))
        ids.append(select_prefill(q, compressed, positions, lengths, sparse, blocks).ids)
        x = layer.finish(x, sparse_attention(q, k, v, positions, lengths, sparse))
    return jnp.stack(ids)


@pytest.mark.parametrize("case", ["small_b2", "real_grid_b1"])
def test_equals_published_sparse_model(case, data_dir):
    model, sparse, prefill, expected = load_case(data_dir / "sparda" / "forecast" / case)
    tokens = jnp.asarray(expected["input_ids"])
    with jax.default_matmul_precision("highest"):
        ids = selections(model, tokens, sparse)
    logits = forward(model, tokens, sparse=sparse)
    batch, layers = len(tokens), len(ids)
    # Published rows are packed: [layer, KV head, batch * token, R].
    packed = ids[:, :, :, :prefill].transpose(0, 2, 1, 3, 4)
    packed = np.asarray(packed).reshape(*packed.shape[:2], batch * prefill, -1)
    clear = expected["sparse_prefill_margin"] > 1e-5  # stated with the cases
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(packed[clear], expected["sparse_prefill_selected"][clear])
    # Every later layer sees an earlier one's flip, so logits need all selections to agree.
    same = (packed == expected["sparse_prefill_selected"]).all()
    assert same, "a selection inside its margin flipped: compare the logits of the other rows"
    np.testing.assert_allclose(
        logits[:, :prefill], expected["sparse_prefill_logits"], atol=2e-4, rtol=1e-4
    )
    # Decode steps see what the whole sequence sees at their position.
    decoded = expected["sparse_decode_logits"].transpose(1, 0, 2)
    np.testing.assert_allclose(logits[:, prefill:], decoded, atol=2e-4, rtol=1e-4)
    chosen = expected["sparse_decode_selected"]  # [step, layer, KV head, batch, R]
    ours = np.asarray(ids[:, :, :, prefill:]).transpose(3, 0, 2, 1, 4)
    assert layers == chosen.shape[1]
    np.testing.assert_array_equal(ours[..., : chosen.shape[-1]], chosen)


def tokens_of(count, batch=2):
    return jnp.asarray(np.random.default_rng(3).integers(0, 40, (batch, count)), jnp.int32)


@pytest.mark.parametrize("count", [5, 16, 100])
def test_all_blocks_selected_is_dense(count):
    model = Decoder.random(CONFIG)
    tokens, lengths = tokens_of(count), jnp.array([count, max(count - 3, 1)], jnp.int32)
    valid = np.arange(count) < np.asarray(lengths)[:, None]
    dense = forward(model, tokens, lengths)
    everything = forward(model, tokens, lengths, SPARSE.with_all_blocks(count))
    sparse = forward(model, tokens, lengths, SPARSE)
    np.testing.assert_allclose(everything[valid], dense[valid], atol=2e-5)
    differs = np.abs(np.asarray(sparse - dense))[valid].max() > 1e-3
    assert differs == (count > SPARSE.budget_tokens)


def test_dense_len_is_a_property_of_each_row():
    model = Decoder.random(CONFIG)
    tokens, lengths = tokens_of(112), jnp.array([112, 95], jnp.int32)
    sparse = dataclasses.replace(SPARSE, dense_len=96)
    assert selection_width(sparse, 7) == 6 < sparse.geometry.num_blocks(112)
    dense, always, mixed = (forward(model, tokens, lengths, s) for s in (None, SPARSE, sparse))
    np.testing.assert_allclose(mixed[1, :95], dense[1, :95], atol=2e-5)
    np.testing.assert_allclose(mixed[0], always[0], atol=2e-5)
    assert np.abs(dense - always)[:, :95].max(axis=(1, 2)).min() > 1e-3


def test_decode_selects_as_prefill_does_for_its_position():
    rng = np.random.default_rng(4)
    q, keys = (
        jnp.asarray(rng.standard_normal(shape, dtype=np.float32))
        for shape in ((2, 112, 4, 8), (2, 2, 112, 8))
    )
    compressed = compress_keys(keys, GEOMETRY)
    positions = jnp.broadcast_to(jnp.arange(112, dtype=jnp.int32), (2, 112))
    sparse = dataclasses.replace(SPARSE, dense_len=90)
    whole = select_prefill(q, compressed, positions, jnp.array([112, 112]), sparse, 7)
    for lengths in ([112, 96], [97, 95], [64, 89]):
        lengths = jnp.array(lengths, jnp.int32)
        newest = jnp.take_along_axis(q, lengths[:, None, None, None] - 1, axis=1)
        one = select_decode(newest, compressed, lengths, sparse, 7)
        for row, length in enumerate(lengths):
            ids = np.asarray(one.ids[row, :, 0])
            if length < 90:
                blocks = -(-int(length) // 16)
                expected = [*range(blocks)] + [-1] * (ids.shape[-1] - blocks)
                np.testing.assert_array_equal(ids, [expected] * 2)
            else:
                np.testing.assert_array_equal(ids, whole.ids[row, :, length - 1])
            np.testing.assert_array_equal(one.count[row, :, 0], (ids >= 0).sum(-1))


def test_to_blocks():
    rng = np.random.default_rng(5)
    k, v = (rng.standard_normal((2, 21, 3, 4), dtype=np.float32) for _ in range(2))
    blocks = np.asarray(to_blocks(jnp.asarray(k), jnp.asarray(v), 8))
    assert blocks.shape == (2, 3, 3, 2, 8, 4)
    np.testing.assert_array_equal(blocks[1, 2, 1, 0, 5], k[1, 13, 2])
    np.testing.assert_array_equal(blocks[0, 1, 2, 1, 4], v[0, 20, 1])
    assert (blocks[:, :, 2, :, 5:] == 0).all()


def test_values_past_the_length_do_not_leak():
    model = Decoder.random(CONFIG)
    tokens, lengths = tokens_of(100), jnp.array([100, 61], jnp.int32)
    other = tokens.at[1, 61:].set(39 - tokens[1, 61:])
    ours, theirs = (forward(model, t, lengths, SPARSE)[1, :61] for t in (tokens, other))
    np.testing.assert_array_equal(ours, theirs)
