"""`from_pretrained` on every reference checkpoint, and NOSA's against its reference."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import sparda_jax
from pallas_kernels.geometry import BlockGeometry
from sparda_jax.config import SparseConfig
from sparda_jax.forecast.files import save_forecast
from sparda_jax.forecast.forward import sparda_forward
from sparda_jax.huggingface_policy import folder_policy, parse_sparse_config
from sparda_jax.models.rope import rope_at
from sparda_jax.sparse.infllm_v2 import sparse_attention
from sparda_jax.sparse.nosa import block_bias, block_importance

NOSA = "sparda/nosa_tiny/b1_S560"
LOGITS = {"atol": 2e-4, "rtol": 1e-4}  # stated with the cases


@pytest.fixture(scope="module")
def nosa(data_dir):
    folder = data_dir / NOSA
    loaded = sparda_jax.from_pretrained(folder, dtype=jnp.float32)
    return loaded, load_file(folder / "data.safetensors")


def cases(root):
    return sorted(path.parent for path in root.rglob("model.safetensors"))


def test_every_reference_checkpoint_loads(data_dir):
    found = cases(data_dir)
    assert len(found) >= 15
    for folder in found:
        loaded = sparda_jax.from_pretrained(folder, dtype=jnp.float32)
        names = load_file(folder / "model.safetensors").keys()
        assert (loaded.forecast is not None) == any("q_future" in name for name in names), folder
        assert loaded.config.kv_importance == any(".delta." in name for name in names), folder
        assert loaded.tokenizer is None
        assert loaded.report.bytes_read > 0


def test_policy_of_the_published_config():
    given = {
        "kernel_size": 32,
        "kernel_stride": 16,
        "init_blocks": 1,
        "block_size": 64,
        "window_size": 1024,
        "select_blocks": 24,
        "topk": 80,
        "dense_len": -1,
        "use_nope": False,
    }
    policy = SparseConfig(BlockGeometry(64, 32, 16), 1, 16, 96, query_blocks=41)
    assert parse_sparse_config({"sparse_config": given}) == policy
    assert parse_sparse_config({}) is None
    assert folder_policy("org/name") is None
    with pytest.raises(NotImplementedError, match="use_nope = True"):
        parse_sparse_config({"sparse_config": given | {"use_nope": True}})
    with pytest.raises(ValueError, match="window_size 1000 is not a multiple of block_size 64"):
        parse_sparse_config({"sparse_config": given | {"window_size": 1000}})
    del given["topk"]
    with pytest.raises(ValueError, match="topk is missing"):
        parse_sparse_config({"sparse_config": given})


@pytest.mark.parametrize("mode", ["sparse", "sparda"])
def test_nosa_equals_the_published_model(nosa, mode, data_dir):
    loaded, expected = nosa
    assert loaded.sparse is not None and loaded.sparse.query_blocks == 4
    assert loaded.sparse == folder_policy(data_dir / NOSA)
    tokens, prompt = jnp.asarray(expected["input_ids"]), 560

    @jax.jit
    def run(model, forecast, tokens):
        if mode == "sparse":
            return model(tokens, sparse=loaded.sparse), None
        # As in the public code a block after the query's own may take a place in the prompt.
        options = {"prompt_lengths": jnp.array([prompt]), "mask_future": False}
        return sparda_forward(model, forecast, tokens, sparse=loaded.sparse, **options)

    with jax.default_matmul_precision("highest"):
        logits, ids = run(loaded.model, loaded.forecast, tokens)
    assert expected[f"{mode}_prefill_margin"].min() > 1e-5  # so every selection must be equal
    if ids is not None:
        chosen = expected["sparda_prefill_selected"]  # [layer, KV head, token, R]
        np.testing.assert_array_equal(ids[:, 0, :, :prompt], chosen)
        decoded = np.asarray(ids[:, 0, :, prompt:]).transpose(2, 0, 1, 3)
        np.testing.assert_array_equal(decoded, expected["sparda_decode_selected"][:, :, :, 0])
    np.testing.assert_allclose(logits[:, :prompt], expected[f"{mode}_prefill_logits"], **LOGITS)
    decoded = expected[f"{mode}_decode_logits"].transpose(1, 0, 2)
    np.testing.assert_allclose(logits[:, prompt:], decoded, **LOGITS)


def test_nosa_importance_equals_the_published_one(nosa):
    loaded, expected = nosa
    tokens = jnp.asarray(expected["input_ids"])[:, :560]
    positions, lengths = jnp.arange(560)[None], jnp.array([560])
    cos, sin = rope_at(loaded.config.rope, positions, 2048)

    @jax.jit
    def run(model, x):
        biases = []
        for layer in model.layers:
            q, k, v = layer.qkv(x, cos, sin)
            biases.append(layer.key_bias(v))
            attention = sparse_attention(q, k, v, positions, lengths, loaded.sparse, biases[-1])
            x = layer.finish(x, attention)
        return jnp.stack(biases)

    with jax.default_matmul_precision("highest"):
        biases = run(loaded.model, loaded.model.embed(tokens))
    np.testing.assert_allclose(biases, expected["sparse_cis"], atol=2e-5)


def test_block_importance_is_the_mean_of_windows():
    rng = np.random.default_rng(0)
    bias = rng.standard_normal((2, 37, 3)).astype(np.float32)
    geometry, lengths = BlockGeometry(8, 4, 2), np.array([37, 20])
    poisoned = np.where(np.arange(37)[:, None] < lengths[:, None, None], bias, np.nan)
    got = block_importance(block_bias(jnp.asarray(poisoned), 8), jnp.asarray(lengths), geometry)
    for row, length in enumerate(lengths):
        windows = [bias[row, s : s + 4].mean(0) for s in range(0, length - 3, 2)]
        for block in range(5):
            parts = windows[max(4 * block - 1, 0) : 4 * block + 4]
            expected = np.max(parts, axis=0) if parts else np.full(3, -np.inf)
            np.testing.assert_allclose(got[row, :, block], expected, atol=1e-6)


def test_dense_nosa_has_the_bias_and_the_published_variant_has_not(nosa, data_dir):
    loaded, expected = nosa
    tokens = jnp.asarray(expected["input_ids"])
    published = sparda_jax.from_pretrained(data_dir / NOSA, dtype=jnp.float32, importance=False)
    with jax.default_matmul_precision("highest"):
        logits = jax.jit(lambda m, t: m(t))(published.model, tokens)
        ours = jax.jit(lambda m, t: m(t))(loaded.model, tokens)
        sparse = loaded.sparse.with_all_blocks(580)
        blocks = jax.jit(lambda m, t: m(t, sparse=sparse))(loaded.model, tokens)
    np.testing.assert_allclose(logits[:, :560], expected["dense_prefill_logits"], **LOGITS)
    decoded = expected["dense_decode_logits"].transpose(1, 0, 2)
    np.testing.assert_allclose(logits[:, 560:], decoded, **LOGITS)
    assert np.abs(ours - logits).max() > 1e-2
    np.testing.assert_allclose(ours, blocks, atol=2e-5)  # all blocks selected is dense


def test_a_policy_with_two_stages_needs_importance(data_dir, nosa):
    plain = sparda_jax.from_pretrained(data_dir / NOSA, dtype=jnp.float32, importance=False)
    with pytest.raises(ValueError, match="query_blocks 4 needs a model with importance"):
        plain.model(jnp.zeros((1, 8), jnp.int32), sparse=nosa[0].sparse)


@pytest.fixture
def folder(tmp_path, data_dir):
    shutil.copytree(data_dir / "sparda/forecast/small_b2", tmp_path / "model")
    return tmp_path / "model"


def fails(error, *messages, **options):
    with pytest.raises(error) as info:
        sparda_jax.from_pretrained(**options)
    text = str(info.value)
    assert "\n" not in text
    for message in messages:
        assert message in text, text


def test_forecast_file_of_another_base(folder, tmp_path, monkeypatch):
    loaded = sparda_jax.from_pretrained(folder, dtype=jnp.float32)
    path = tmp_path / "forecast.safetensors"
    save_forecast(path, loaded.forecast, loaded.model, SparseConfig(init_blocks=2))
    again = sparda_jax.from_pretrained(folder, forecast=path, dtype=jnp.float32)
    assert again.sparse == SparseConfig(init_blocks=2)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    save_file(tensors, folder / "model.safetensors")
    monkeypatch.setattr("sparda_jax.checkpoints.assemble._load", lambda *a: pytest.fail("read"))
    fails(ValueError, f"{path} was trained for another model", model=folder, forecast=path)


def test_incomplete_forecast_in_the_checkpoint(folder, monkeypatch):
    monkeypatch.setattr("sparda_jax.checkpoints.assemble._load", lambda *a: pytest.fail("read"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_future_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    fails(ValueError, "missing model.layers.1.self_attn.q_future_proj.weight", model=folder)


def test_shapes_of_another_model_size(folder):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"intermediate_size": 2 * config["intermediate_size"]}))
    inner, size = config["intermediate_size"], config["hidden_size"]
    name = "model.layers.0.mlp.gate_proj.weight"
    found = f"model.safetensors: {name} has shape [{inner}, {size}], expected [{2 * inner}, {size}]"
    fails(ValueError, found, model=folder)


def test_too_little_memory_is_said_before_anything_is_read(folder, monkeypatch):
    monkeypatch.setattr("sparda_jax.checkpoints.assemble.free_device_bytes", lambda device: 1000)
    monkeypatch.setattr("sparda_jax.checkpoints.assemble._load", lambda *a: pytest.fail("read"))
    fails(ValueError, "the model needs", "but free memory of", "allows 1000 B", model=folder)
