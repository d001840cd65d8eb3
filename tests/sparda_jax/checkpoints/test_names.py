import pytest

from sparda_jax.checkpoints.assemble import abstract_parameters, check_headers
from sparda_jax.checkpoints.names import is_buffer, is_transposed, layout, published_name
from sparda_jax.checkpoints.safetensors import read_headers, read_json
from sparda_jax.config import ModelConfig


@pytest.fixture
def llama(data_dir):
    folder = data_dir / "block_diffusion" / "llama_tiny"
    return ModelConfig.from_huggingface(read_json(folder / "config.json"))


@pytest.mark.parametrize(
    "case",
    [
        "block_diffusion/llama_tiny_tied",
        "block_diffusion/qwen2_tiny",
        "block_diffusion/qwen3_tiny",
        "block_diffusion/sdar_tiny",
        "block_diffusion/fast_dllm_v2_tiny",
        "block_diffusion/llada2_tiny",
        "sparda/minicpm_tiny/untied_short",
    ],
)
def test_every_published_tensor_is_used_whole_and_once(case, data_dir):
    config = ModelConfig.from_huggingface(read_json(data_dir / case / "config.json"))
    headers = read_headers(data_dir / case / "model.safetensors")
    rows: dict[str, list[tuple[int, int]]] = {}
    for stored in check_headers(config, headers).values():
        for name in stored.names:
            rows.setdefault(name, []).append(stored.rows or (0, stored.shape[0]))
    assert rows.keys() == headers.keys()
    for name, parts in rows.items():
        ends = [0, *(end for _, end in sorted(parts))]
        assert sorted(start for start, _ in parts) == ends[:-1]
        assert ends[-1] == headers[name].shape[0], name


@pytest.mark.parametrize(
    "path, name, transposed",
    [
        (("embedding",), "model.embed_tokens.weight", False),
        (("head", "kernel"), "lm_head.weight", True),
        (("layers", 11, "q", "kernel"), "model.layers.11.self_attn.q_proj.weight", True),
        (("layers", 0, "k", "bias"), "model.layers.0.self_attn.k_proj.bias", False),
        (("layers", 3, "mlp", "down", "kernel"), "model.layers.3.mlp.down_proj.weight", True),
    ],
)
def test_names_and_paths(llama, path, name, transposed):
    assert published_name(llama, path) == name
    assert is_transposed(path) == transposed


def test_no_such_parameter(llama):
    with pytest.raises(KeyError):
        published_name(llama, ("layers", 0, "z", "kernel"))


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_stacked_experts(data_dir, suffix):
    config = ModelConfig.from_huggingface(
        read_json(data_dir / "block_diffusion" / "llada2_tiny" / "config.json")
    )
    shapes = {path: p.shape for path, p in abstract_parameters(config).items()}
    path = ("layers", 2, "mlp", "experts", "down", "kernel")
    single = layout(config, shapes)[path]
    assert single.names[3] == "model.layers.2.mlp.experts.3.down_proj.weight"
    name = f"model.layers.2.mlp.experts.down_proj{suffix}"
    stacked = layout(config, shapes, {name})[path]
    assert stacked.names == (name,)
    assert stacked.shape == (len(single.names), *single.shape)


def test_buffers_are_passed_over():
    assert is_buffer("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not is_buffer("model.layers.0.self_attn.q_proj.weight")
