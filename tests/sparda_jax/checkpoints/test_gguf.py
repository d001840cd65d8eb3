"""GGUF reading: a tiny llama written with the gguf package, and the default model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparda_jax.checkpoints import gguf as reader
from sparda_jax.checkpoints.gguf import read_gguf, unpermute_rows

gguf = pytest.importorskip("gguf")

N, K, H, D, F, V, L = 4, 2, 8, 32, 64, 96, 2
Types = gguf.GGMLQuantizationType


def permute_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Half-split to interleaved order, written out row by row: row j*H/2 + i becomes 2i + j."""
    out = np.empty_like(weight)
    width = weight.shape[0] // num_heads
    for head in range(num_heads):
        for j in range(2):
            for i in range(width // 2):
                out[head * width + 2 * i + j] = weight[head * width + j * (width // 2) + i]
    return out


def tiny_weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"token_embd": (V, D), "output_norm": (D,)}
    for layer in range(L):
        shapes |= {
            f"blk.{layer}.{name}": shape
            for name, shape in {
                "attn_norm": (D,),
                "attn_q": (N * H, D),
                "attn_k": (K * H, D),
                "attn_v": (K * H, D),
                "attn_output": (D, N * H),
                "ffn_norm": (D,),
                "ffn_gate": (F, D),
                "ffn_up": (F, D),
                "ffn_down": (D, F),
            }.items()
        }
    return {f"{n}.weight": rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


def write(
    path: Path,
    weights: dict[str, np.ndarray],
    quantisation: Any = Types.F32,
    architecture: str = "llama",
    edit: Callable[[Any], None] = lambda writer: None,
    epsilon: bool = True,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(L)
    writer.add_context_length(128)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(F)
    writer.add_head_count(N)
    writer.add_head_count_kv(K)
    writer.add_rope_freq_base(50_000.0)
    if epsilon:
        writer.add_layer_norm_rms_eps(1e-5)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    edit(writer)
    for name, weight in weights.items():
        if weight.ndim == 1 or quantisation == Types.F32:
            writer.add_tensor(name, weight)
        else:
            packed = gguf.quantize(weight, quantisation)
            writer.add_tensor(name, packed, raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_reads_back_a_tiny_llama(tmp_path: Path) -> None:
    weights = tiny_weights()
    stored = {
        name: permute_rows(w, N if "attn_q" in name else K)
        if "attn_q" in name or "attn_k" in name
        else w
        for name, w in weights.items()
    }
    checkpoint = read_gguf(write(tmp_path / "tiny.gguf", stored))
    read = {name: checkpoint.read(name) for name in checkpoint.headers}
    assert len(read) == 2 + 9 * L
    assert {name: w.shape for name, w in read.items()} == checkpoint.shapes
    layer = "model.layers.1."
    expected = {
        "model.embed_tokens.weight": "token_embd",
        "model.norm.weight": "output_norm",
        layer + "input_layernorm.weight": "blk.1.attn_norm",
        layer + "self_attn.q_proj.weight": "blk.1.attn_q",
        layer + "self_attn.k_proj.weight": "blk.1.attn_k",
        layer + "self_attn.v_proj.weight": "blk.1.attn_v",
        layer + "self_attn.o_proj.weight": "blk.1.attn_output",
        layer + "post_attention_layernorm.weight": "blk.1.ffn_norm",
        layer + "mlp.gate_proj.weight": "blk.1.ffn_gate",
        layer + "mlp.up_proj.weight": "blk.1.ffn_up",
        layer + "mlp.down_proj.weight": "blk.1.ffn_down",
    }
    for ours, theirs in expected.items():
        assert read[ours].dtype == np.float32
        np.testing.assert_array_equal(read[ours], weights[theirs + ".weight"], err_msg=ours)


def test_config(tmp_path: Path) -> None:
    config = read_gguf(write(tmp_path / "tiny.gguf", tiny_weights())).config
    expected = {
        "model_type": "llama",
        "vocab_size": V,
        "hidden_size": D,
        "intermediate_size": F,
        "num_hidden_layers": L,
        "num_attention_heads": N,
        "num_key_value_heads": K,
        "head_dim": H,
        "max_position_embeddings": 128,
        "rope_theta": 50_000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {name: config[name] for name in expected} == expected


def test_head_and_template(tmp_path: Path) -> None:
    weights = tiny_weights()
    weights["output.weight"] = weights["token_embd.weight"] + 1
    checkpoint = read_gguf(write(tmp_path / "tiny.gguf", weights))
    assert not checkpoint.config["tie_word_embeddings"]
    np.testing.assert_array_equal(checkpoint.read("lm_head.weight"), weights["output.weight"])
    assert checkpoint.chat_template == "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("quantisation", "tolerance"),
    [("F16", 1e-3), ("BF16", 5e-3), ("Q8_0", 1e-2), ("Q5_1", 6e-2), ("Q4_1", 0.12), ("Q4_0", 0.15)],
)
def test_quantised(tmp_path: Path, quantisation: str, tolerance: float) -> None:
    weights = tiny_weights(seed=3)
    checkpoint = read_gguf(write(tmp_path / "tiny.gguf", weights, Types[quantisation]))
    read = {name: checkpoint.read(name) for name in checkpoint.headers}
    for ours, theirs in [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
    ]:
        error = np.linalg.norm(read[ours] - weights[theirs]) / np.linalg.norm(weights[theirs])
        assert 0 < error < tolerance


def test_every_listed_quantisation_is_known_to_gguf() -> None:
    for name in reader.QUANTISATIONS:
        block, size = gguf.GGML_QUANT_SIZES[Types[name]]
        dtype = {"F32": np.float32, "F16": np.float16}.get(name, np.uint8)
        packed = np.zeros((2, 256 // block * size), np.uint8).view(dtype)
        assert gguf.dequantize(packed, Types[name]).shape == (2, 256)


def rotate(x: np.ndarray, angles: np.ndarray, interleaved: bool) -> np.ndarray:
    """RoPE of x [T, heads, H] by angles [T, H/2], in float64."""
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    half = x.shape[-1] // 2
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    parts = [a * cos - b * sin, a * sin + b * cos]
    return np.stack(parts, -1).reshape(x.shape) if interleaved else np.concatenate(parts, -1)


def test_unpermuted_rows_with_half_split_rope_give_the_interleaved_scores() -> None:
    rng = np.random.default_rng(5)
    query, key = rng.standard_normal((N * H, D)), rng.standard_normal((N * H, D))
    x = rng.standard_normal((6, D))
    angles = np.arange(6)[:, None] * 10_000.0 ** (-np.arange(0, H, 2) / H)

    def scores(interleaved: bool, wq: np.ndarray, wk: np.ndarray) -> np.ndarray:
        q = rotate((x @ wq.T).reshape(6, N, H), angles, interleaved)
        k = rotate((x @ wk.T).reshape(6, N, H), angles, interleaved)
        return np.einsum("tnh,snh->nts", q, k)

    stored = scores(True, query, key)
    ours = scores(False, unpermute_rows(query, N), unpermute_rows(key, N))
    np.testing.assert_allclose(ours, stored, rtol=1e-12, atol=1e-12)
    # The rows as stored would not do.
    assert np.abs(scores(False, query, key) - stored).max() > 0.1


def test_unpermute_refuses_what_does_not_split() -> None:
    with pytest.raises(ValueError, match="33 rows do not split into 4 heads"):
        unpermute_rows(np.zeros((33, 2)), 4)


def test_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "tiny.gguf", tiny_weights())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install 'sparda_jax\[gguf\]'"):
        read_gguf(path)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.gguf"):
        read_gguf(tmp_path / "absent.gguf")


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 and so on", bytes(100)])
def test_not_a_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.gguf: not a GGUF file.*expected b'GGUF'"):
        read_gguf(path)


@pytest.mark.parametrize("keep", [4, 10, 100, 700, 0.5, 0.999])
def test_truncated(tmp_path: Path, keep: float) -> None:
    path = write(tmp_path / "tiny.gguf", tiny_weights())
    content = path.read_bytes()
    path.write_bytes(content[: int(keep if keep >= 1 else keep * len(content))])
    with pytest.raises(ValueError, match=r"tiny\.gguf: .*cut short.*found .* bytes, expected") as e:
        read_gguf(path)
    assert "\n" not in str(e.value)


def test_other_architecture(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", tiny_weights(), architecture="gemma3")
    with pytest.raises(NotImplementedError, match=r"tiny\.gguf: .*'gemma3'.*expected 'llama'"):
        read_gguf(path)


def test_other_quantisation(tmp_path: Path) -> None:
    weights = tiny_weights()

    def add(writer: Any) -> None:
        packed = np.zeros((4, 66), np.uint8)
        writer.add_tensor("blk.9.ffn_up.weight", packed, raw_dtype=Types.IQ2_XXS)

    path = write(tmp_path / "tiny.gguf", weights, edit=add)
    with pytest.raises(NotImplementedError, match=r"blk\.9\.ffn_up\.weight.*IQ2_XXS.*Q4_1"):
        read_gguf(path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: w.add_expert_count(8), "llama.expert_count is 8, only 0"),
        (lambda w: w.add_rope_dimension_count(4), "llama.rope.dimension_count is 4, only 8"),
        (
            lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
            "rope.scaling.type is 'yarn'",
        ),
        (lambda w: w.add_tensor("rope_freqs.weight", np.ones(4, np.float32)), "rope_freqs.weight"),
    ],
)
def test_unsupported_features(tmp_path: Path, edit: Callable[[Any], None], message: str) -> None:
    path = write(tmp_path / "tiny.gguf", tiny_weights(), edit=edit)
    with pytest.raises(NotImplementedError, match=message):
        read_gguf(path)


def test_unexpected_tensor(tmp_path: Path) -> None:
    weights = tiny_weights() | {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    with pytest.raises(ValueError, match=r"unexpected tensor blk\.0\.attn_sinks\.weight, expected"):
        read_gguf(write(tmp_path / "tiny.gguf", weights))


def test_missing_metadata_and_embedding(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", tiny_weights(), epsilon=False)
    with pytest.raises(ValueError, match=r"llama\.attention\.layer_norm_rms_epsilon is missing"):
        read_gguf(path)
    weights = tiny_weights()
    del weights["token_embd.weight"]
    with pytest.raises(ValueError, match=r"token_embd\.weight is missing"):
        read_gguf(write(tmp_path / "no_embedding.gguf", weights))


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    weights = tiny_weights()
    weights["blk.0.ffn_up.weight"][3, 3] = np.nan
    checkpoint = read_gguf(write(tmp_path / "tiny.gguf", weights))
    with pytest.raises(
        ValueError, match=r"blk\.0\.ffn_up\.weight holds values that are not finite"
    ):
        for name in checkpoint.headers:
            checkpoint.read(name)


@pytest.mark.smoke
def test_default_model(default_checkpoint: reader.GGUFCheckpoint) -> None:
    config = default_checkpoint.config
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    assert [config[name] for name in names] == [576, 9, 3, 64, 49152]
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 100_000.0
    assert len(default_checkpoint.shapes) == 2 + 9 * 30
    sizes = [default_checkpoint.read(name).size for name in default_checkpoint.headers]
    assert sum(sizes) == 134_515_008
