import functools

import pytest
from flax import nnx
from safetensors import safe_open

from sparda_jax.checkpoints.names import checkpoint_name, is_buffer, is_transposed, nnx_path
from sparda_jax.checkpoints.safetensors import read_json
from sparda_jax.config import ModelConfig
from sparda_jax.models import Decoder


@pytest.mark.parametrize(
    "case",
    [
        "block_diffusion/qwen2_tiny",
        "block_diffusion/qwen3_tiny_tied",
        "sparda/minicpm_tiny/untied_short",
    ],
)
def test_table_maps_a_published_checkpoint_onto_the_decoder(case, data_dir):
    config = ModelConfig.from_huggingface(read_json(data_dir / case / "config.json"))
    model = nnx.eval_shape(functools.partial(Decoder.random, config))
    ours = {path for path, _ in nnx.to_flat_state(nnx.state(model))}
    with safe_open(data_dir / case / "model.safetensors", "numpy") as file:
        theirs = set(file.keys())
    assert {nnx_path(name) for name in theirs} == ours
    assert {checkpoint_name(path) for path in ours} == theirs


@pytest.mark.parametrize(
    "name, path, transposed",
    [
        ("model.embed_tokens.weight", ("embedding",), False),
        ("lm_head.weight", ("head", "kernel"), True),
        ("model.layers.11.self_attn.q_proj.weight", ("layers", 11, "q", "kernel"), True),
        ("model.layers.0.self_attn.k_proj.bias", ("layers", 0, "k", "bias"), False),
        ("model.layers.3.mlp.down_proj.weight", ("layers", 3, "mlp", "down", "kernel"), True),
    ],
)
def test_names_and_paths(name, path, transposed):
    assert nnx_path(name) == path
    assert checkpoint_name(path) == name
    assert is_transposed(path) == transposed


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.01.input_layernorm.weight",
        "model.layers.#.input_layernorm.weight",
        "model.layers.0.self_attn.z_proj.weight",
        "transformer.h.0.attn.weight",
        "embedding",
    ],
)
def test_unknown_names(name):
    assert nnx_path(name) is None


def test_buffers_are_passed_over():
    assert is_buffer("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not is_buffer("model.layers.0.self_attn.q_proj.weight")
