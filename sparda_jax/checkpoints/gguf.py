"""Reads a llama-type GGUF file as Hugging Face names, layouts and configuration.

Two conventions differ. GGUF names its tensors ``blk.3.attn_q.weight``; and for the llama
architecture it stores the rows of the q and k projections permuted, so that RoPE acts on the
neighbouring channels (2i, 2i+1). Our RoPE, like Hugging Face's, rotates the halves (i, i + H/2);
`unpermute_rows` puts the rows back.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sparda_jax.checkpoints.assemble import Index, TensorHeader

__all__ = ["GGUFCheckpoint", "read_gguf", "unpermute_rows"]

ARCHITECTURE = "llama"
QUANTISATIONS = frozenset(
    ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
    + ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
)
# Tables that other programs store and every decoder can compute from the hyper-parameters.
_DERIVED_TENSORS = re.compile(r"blk\.\d+\.attn_rot_embd(\.weight)?$")
_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.weight$")


@dataclass(frozen=True)
class GGUFCheckpoint:
    """One opened GGUF file; the tensor data stays on disk (memory-mapped) until asked for.

    Attributes:
        path: The file.
        config: The hyper-parameters under the names of a Hugging Face ``config.json``.
        tokenizer: The ``tokenizer.*`` metadata without that prefix, e.g. ``ggml.tokens``; for
            `sparda_jax.tokenization.Tokenizer.from_gguf`.
        shapes: Hugging Face tensor name -> shape, ``[out, in]`` for matrices.
    """

    path: Path
    config: dict[str, Any]
    tokenizer: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    _tensors: dict[str, Any] = field(repr=False)

    @property
    def chat_template(self) -> str | None:
        """The Jinja chat template, None where the file has none."""
        return self.tokenizer.get("chat_template")

    @property
    def headers(self) -> dict[str, TensorHeader]:
        """What `read` yields: always float32."""
        return {n: TensorHeader(s, "float32", self.path.name) for n, s in self.shapes.items()}

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """Part of a tensor by its Hugging Face name, `[out, in]`; the whole is dequantised for it.

        The rows of q and k are in the half-split RoPE order.
        """
        values = self._dequantise(self._tensors[name]).reshape(self.shapes[name])
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        for projection, count in heads.items():
            if projection in name:
                values = unpermute_rows(values, self.config[count])
        return values[index]

    def _dequantise(self, tensor: Any) -> np.ndarray:
        from gguf import dequantize

        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if not np.isfinite(values).all():
            raise ValueError(f"{self.path}: tensor {tensor.name} holds values that are not finite")
        return values


def unpermute_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a q or k projection from interleaved to half-split RoPE order.

    Within a head, row ``2i + j`` of the argument becomes row ``j * H/2 + i`` (i < H/2, j in 0, 1).

    Args:
        weight: ``[num_heads * H, in]``.
        num_heads: N for q, K for k.
    """
    rows = weight.shape[0]
    if rows % (2 * num_heads):
        raise ValueError(f"{rows} rows do not split into {num_heads} heads of even width")
    split = weight.reshape(num_heads, rows // num_heads // 2, 2, *weight.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(weight.shape)


def read_gguf(path: str | Path) -> GGUFCheckpoint:
    """Opens a GGUF file and checks all of it but the values of the tensors.

    Raises:
        ImportError: The ``gguf`` package is missing.
        FileNotFoundError: No such file.
        ValueError: Not a GGUF, damaged or cut short, a key is missing, an unexpected tensor.
        NotImplementedError: An architecture, quantisation type or feature that is not supported.
    """
    path = Path(path)
    fields, tensors = _open(path)
    architecture = fields.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise NotImplementedError(
            f"{path}: architecture {architecture!r} is not supported, expected {ARCHITECTURE!r}"
        )
    named = {}
    for tensor in tensors:
        if _DERIVED_TENSORS.match(tensor.name):
            continue
        quantisation = tensor.tensor_type.name
        if quantisation not in QUANTISATIONS:
            raise NotImplementedError(
                f"{path}: tensor {tensor.name} has quantisation type {quantisation}, "
                f"expected one of {', '.join(sorted(QUANTISATIONS))}"
            )
        named[_huggingface_name(path, tensor.name)] = tensor
    # GGUF lists dimensions fastest first.
    shapes = {n: tuple(int(d) for d in reversed(t.shape)) for n, t in named.items()}
    config = _config(path, fields, shapes)
    prefix = "tokenizer."
    tokenizer = {k.removeprefix(prefix): v for k, v in fields.items() if k.startswith(prefix)}
    return GGUFCheckpoint(path, config, tokenizer, shapes, named)


def _open(path: Path) -> tuple[dict[str, Any], list[Any]]:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ImportError(
            f"reading {path} needs the gguf package: pip install 'sparda_jax[gguf]'"
        ) from error
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ValueError(f"{path}: not a GGUF file: it begins with {magic!r}, expected b'GGUF'")
    size = path.stat().st_size
    try:
        reader = GGUFReader(path)
        fields = {name: value.contents() for name, value in reader.fields.items()}
    except Exception as error:  # whatever numpy raises on the cut array; all mean the same here
        raise ValueError(
            f"{path}: damaged or cut short: found {size:,} bytes, "
            f"expected more or other ones ({type(error).__name__}: {error})"
        ) from error
    for tensor in reader.tensors:
        end = int(tensor.data_offset) + int(tensor.n_bytes)
        if end > size:
            raise ValueError(
                f"{path}: cut short in tensor {tensor.name}: found {size:,} bytes, "
                f"expected at least {end:,}"
            )
    return fields, reader.tensors


def _huggingface_name(path: Path, name: str) -> str:
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    if name == "rope_freqs.weight":
        raise NotImplementedError(
            f"{path}: tensor {name} (frequencies of a scaled RoPE) is not supported, "
            "expected a plain RoPE"
        )
    match = _LAYER_TENSOR.match(name)
    if match is None or match[2] not in _IN_LAYER:
        expected = ", ".join([*_TOP_LEVEL, "blk.<layer>.{" + ",".join(_IN_LAYER) + "}.weight"])
        raise ValueError(f"{path}: unexpected tensor {name}, expected {expected}")
    return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.weight"


def _config(
    path: Path, fields: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> dict[str, Any]:
    def get(key: str, default: Any = None) -> Any:
        value = fields.get(f"{ARCHITECTURE}.{key}", default)
        if value is None:
            raise ValueError(f"{path}: metadata key {ARCHITECTURE}.{key} is missing")
        return value

    heads, hidden = get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length", hidden // heads)
    only = {
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "rope.scaling.type": "none",
        "expert_count": 0,
    }
    for key, supported in only.items():
        found = get(key, supported)
        if found != supported:
            raise NotImplementedError(
                f"{path}: {ARCHITECTURE}.{key} is {found!r}, only {supported!r} is supported"
            )
    embedding = "model.embed_tokens.weight"
    if embedding not in shapes:
        raise ValueError(f"{path}: tensor token_embd.weight is missing")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shapes[embedding][0],
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": get("context_length"),
        "rope_theta": get("rope.freq_base", 10000.0),
        # Stored as float32: seven digits are what was meant (9.999999747e-06 is 1e-05).
        "rms_norm_eps": float(f"{get('attention.layer_norm_rms_epsilon'):.7g}"),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
    }
