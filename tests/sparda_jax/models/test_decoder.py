"""Logits equal the published models'; padding is inert; nothing looks ahead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from sparda_jax.checkpoints.safetensors import load_safetensors
from sparda_jax.config import ModelConfig, RopeConfig
from sparda_jax.models import Decoder
from sparda_jax.models.rope import rope_at

FAMILIES = ["llama_tiny", "llama_tiny_tied", "qwen2_tiny", "qwen3_tiny"]
# The table length that each case's reference used: max_position_embeddings, or the sequence where
# that is longer (the case called "grow").
MINICPM = {"tied_long": 512, "untied_grow": 100, "untied_short": 2048}
ATOL, RTOL = 2e-4, 1e-4  # stated with the cases; dense logits and hidden states in float32


def tiny(**changes):
    fields = {
        "family": "llama",
        "vocab_size": 40,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rope": RopeConfig(head_dim=8),
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    return ModelConfig(**fields | changes)


@jax.jit
def forward(model, tokens, lengths=None):
    with jax.default_matmul_precision("highest"):
        return model(tokens, lengths=lengths)


def hidden_states(model, tokens, length):
    """Embeddings, every layer's output but the last, and the final norm's; keys and values."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    cos, sin = rope_at(model.config.rope, positions, length)
    x = model.embed(tokens)
    states, keys, values = [x], [], []
    for layer in model.layers:
        q, k, v = layer.qkv(x, cos, sin)
        x = layer.finish(x, jax.nn.dot_product_attention(q, k, v, is_causal=True))
        states.append(x)
        keys.append(k.transpose(0, 2, 1, 3))
        values.append(v.transpose(0, 2, 1, 3))
    states[-1] = model.final_norm(x)
    return jnp.stack(states), jnp.stack(keys), jnp.stack(values)


@pytest.mark.parametrize("case", FAMILIES)
def test_equals_published_model(case, data_dir):
    folder = data_dir / "block_diffusion" / case
    model = load_safetensors(folder)
    with np.load(folder / "causal.npz") as file:
        expected = dict(file)
    tokens = jnp.asarray(expected["input_ids"])
    logits = forward(model, tokens)
    np.testing.assert_allclose(logits, expected["logits"], atol=ATOL, rtol=RTOL)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], -1)
    np.testing.assert_allclose(-picked.mean(), expected["ntp_loss"][0], rtol=1e-5)
    with jax.default_matmul_precision("highest"):
        states, keys, values = hidden_states(model, tokens, 512)
    np.testing.assert_allclose(states, expected["hidden_states"], atol=ATOL, rtol=RTOL)
    np.testing.assert_allclose(keys, expected["k_cache"], atol=ATOL, rtol=RTOL)
    np.testing.assert_allclose(values, expected["v_cache"], atol=ATOL, rtol=RTOL)


@pytest.mark.parametrize("case", FAMILIES)
def test_greedy_continuation_of_published_model(case, data_dir):
    folder = data_dir / "block_diffusion" / case
    model = load_safetensors(folder)
    with np.load(folder / "causal.npz") as file:
        expected, margin = file["greedy_ids"], file["greedy_margin"]
    assert margin.min() > 1e-4  # ten times our logit error: exactness may be asked for
    prompt = expected.shape[1] - margin.size
    tokens = jnp.zeros_like(expected).at[:, :prompt].set(expected[:, :prompt])
    for end in range(prompt, expected.shape[1]):
        logits = forward(model, tokens, jnp.array([end], jnp.int32))
        tokens = tokens.at[0, end].set(logits[0, end - 1].argmax())
    np.testing.assert_array_equal(tokens, expected)


@pytest.mark.parametrize("case, length", MINICPM.items())
def test_equals_published_minicpm(case, length, data_dir):
    folder = data_dir / "sparda" / "minicpm_tiny" / case
    model = load_safetensors(folder)
    expected = load_file(folder / "data.safetensors")
    tokens = jnp.asarray(expected["input_ids"])
    with jax.default_matmul_precision("highest"):
        logits = jax.jit(lambda m, t: m(t, max_length=length))(model, tokens)
        states, _, _ = hidden_states(model, tokens, length)
    np.testing.assert_allclose(logits, expected["logits"], atol=ATOL, rtol=RTOL)
    if case != "untied_short":  # its hidden states are not kept
        np.testing.assert_allclose(states, expected["hidden_states"], atol=ATOL, rtol=RTOL)


def test_padding_is_inert():
    model = Decoder.random(tiny())
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 40, (3, 12)), jnp.int32)
    lengths = jnp.array([12, 7, 1], jnp.int32)
    valid = np.arange(12) < np.asarray(lengths)[:, None]
    logits = forward(model, tokens, lengths)
    # Other padding in one row, and other neighbours: bit for bit the same in the same program.
    again = forward(model, jnp.where(valid, tokens, 39 - tokens), lengths)
    np.testing.assert_array_equal(logits[valid], again[valid])
    # Alone and unpadded: another program, so only to rounding.
    for row, length in enumerate([12, 7, 1]):
        alone = forward(model, tokens[row : row + 1, :length])
        np.testing.assert_allclose(logits[row, :length], alone[0], atol=1e-5)


def test_gradients_are_causal():
    model = Decoder.random(tiny(qk_norm=True, qkv_bias=True))
    graph, state = nnx.split(model)

    def scores(embedding, at):
        flat = dict(nnx.to_flat_state(state))
        flat[("embedding",)] = flat[("embedding",)].replace(embedding)
        rebuilt = nnx.merge(graph, nnx.from_flat_state(list(flat.items())))
        # Token t stands at position t only: the gradient of embedding row t is position t's.
        return rebuilt(jnp.arange(9)[None])[0, at].sum()

    gradient_of = jax.jit(jax.grad(scores))
    for at in (0, 4, 8):
        gradient = np.asarray(gradient_of(model.embedding[...], at))
        size = np.abs(gradient[:9]).max(-1)
        assert (size[: at + 1] > 0).all()
        assert (size[at + 1 :] == 0).all()


def test_gradients_of_every_parameter_are_finite_and_used():
    config = tiny(qk_norm=True, qkv_bias=True, output_bias=True, mlp_bias=True)
    model = Decoder.random(config)

    def loss(model):
        return jnp.square(model(jnp.arange(9)[None])).mean()

    gradients = nnx.grad(loss)(model)
    for path, gradient in nnx.to_flat_state(nnx.state(gradients)):
        values = np.asarray(gradient[...])
        assert np.isfinite(values).all(), path
        assert np.abs(values).max() > 0, path


def test_bfloat16_is_close_to_float32():
    config = tiny(hidden_size=64, num_layers=3)
    wide, narrow = (Decoder.random(config, dtype=d) for d in (jnp.float32, jnp.bfloat16))
    # The same weights in both: bfloat16 values.
    values = jax.tree.map(lambda x: x.astype(jnp.float32), nnx.state(narrow))
    nnx.update(wide, values)
    assert narrow.dtype == jnp.bfloat16 and wide.dtype == jnp.float32
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 40, (2, 24)), jnp.int32)
    expected, logits = forward(wide, tokens), forward(narrow, tokens)
    assert logits.dtype == jnp.float32
    error = jnp.linalg.norm(logits - expected) / jnp.linalg.norm(expected)
    assert 0 < error < 2e-2


def test_head_tied_equals_head_copied():
    tied = Decoder.random(tiny(tie_word_embeddings=True))
    copied = Decoder.random(tiny())
    flat = dict(nnx.to_flat_state(nnx.state(tied)))
    flat[("head", "kernel")] = flat[("embedding",)].replace(tied.embedding[...].T)
    nnx.update(copied, nnx.from_flat_state(list(flat.items())))
    tokens = jnp.arange(10)[None]
    np.testing.assert_allclose(forward(tied, tokens), forward(copied, tokens), atol=1e-5)


def test_too_many_tokens():
    with pytest.raises(ValueError, match="65 tokens exceed the maximum length of 64"):
        Decoder.random(tiny())(jnp.zeros((1, 65), jnp.int32))


def test_untold_tying_is_refused():
    with pytest.raises(ValueError, match="tie_word_embeddings is not stated"):
        Decoder.random(tiny(tie_word_embeddings=None))


def test_one_program_for_all_weights():
    models = [Decoder.random(tiny(), seed=seed) for seed in (0, 1)]
    compiled = jax.jit(lambda model, tokens: model(tokens))
    outputs = [compiled(model, jnp.zeros((1, 4), jnp.int32)) for model in models]
    assert compiled._cache_size() == 1
    assert np.abs(outputs[0] - outputs[1]).max() > 1e-3
