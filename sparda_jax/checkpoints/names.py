"""One table of tensor names for all families: where each parameter lies in a checkpoint.

Checkpoints store projections `[out, in]`, the decoder `[in, out]`: leaves called `kernel` are
transposed, and nothing else is. LLaDA2 names some tensors otherwise, stores q, k and v as one, and
its experts one by one or stacked.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sparda_jax.config import ModelConfig

# flax's own spelling of a path is not typed more closely.
Path = tuple[Any, ...]

# Path in the decoder -> tensor; `#` stands for the layer number, `@` for that of the expert.
_TABLE = {
    "embedding": "model.embed_tokens.weight",
    "final_norm.scale": "model.norm.weight",
    "head.kernel": "lm_head.weight",
    "layers.#.attention_norm.scale": "model.layers.#.input_layernorm.weight",
    "layers.#.q_norm.scale": "model.layers.#.self_attn.q_norm.weight",
    "layers.#.k_norm.scale": "model.layers.#.self_attn.k_norm.weight",
    "layers.#.mlp_norm.scale": "model.layers.#.post_attention_layernorm.weight",
    "layers.#.importance.scale": "model.layers.#.self_attn.A",
    "layers.#.importance.delta.kernel": "model.layers.#.self_attn.delta.weight",
}
for _group, _target, _projections in (
    ("self_attn", "", "qkvo"),
    ("mlp", "mlp.", ("gate", "up", "down")),
):
    for _name in _projections:
        _ours, _theirs = f"layers.#.{_target}{_name}", f"model.layers.#.{_group}.{_name}_proj"
        _TABLE[f"{_ours}.kernel"] = f"{_theirs}.weight"
        _TABLE[f"{_ours}.bias"] = f"{_theirs}.bias"
_FUSED = "model.layers.#.attention.query_key_value.weight"
_LLADA2 = {
    "embedding": "model.word_embeddings.weight",
    "layers.#.q.kernel": _FUSED,
    "layers.#.k.kernel": _FUSED,
    "layers.#.v.kernel": _FUSED,
    "layers.#.o.kernel": "model.layers.#.attention.dense.weight",
    "layers.#.q_norm.scale": "model.layers.#.attention.query_layernorm.weight",
    "layers.#.k_norm.scale": "model.layers.#.attention.key_layernorm.weight",
    "layers.#.mlp.router.kernel": "model.layers.#.mlp.gate.weight",
    "layers.#.mlp.router.bias": "model.layers.#.mlp.gate.expert_bias",
}
for _name in ("gate", "up", "down"):
    _shared, _expert = f"mlp.shared_experts.{_name}_proj", f"mlp.experts.@.{_name}_proj"
    _LLADA2[f"layers.#.mlp.shared.{_name}.kernel"] = f"model.layers.#.{_shared}.weight"
    _LLADA2[f"layers.#.mlp.experts.{_name}.kernel"] = f"model.layers.#.{_expert}.weight"

# Tensors of one feature or another that a decoder can do without.
IMPORTANCE = re.compile(r"model\.layers\.\d+\.self_attn\.(A|delta\.weight)$")
FORECAST = re.compile(r"model\.layers\.\d+\.self_attn\.q_(future|curr)_proj\.weight$")
# Buffers that old checkpoints carry along; they are recomputed from the config.
_BUFFERS = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")


@dataclass(frozen=True)
class Stored:
    """Where one parameter lies in a checkpoint.

    Attributes:
        names: of the tensor, or of one tensor an expert, in their order.
        shape: of each as stored.
        rows: which of its rows are this parameter's, where several share the tensor.
        transposed: the last two axes are stored the other way round.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    rows: tuple[int, int] | None
    transposed: bool


def layout(
    config: ModelConfig, shapes: Mapping[Path, tuple[int, ...]], found: Collection[str] = ()
) -> dict[Path, Stored]:
    """Where every parameter of a model lies.

    Args:
        config: of the model.
        shapes: the parameters, `[in, out]`.
        found: names in the checkpoint, which say whether experts are stacked; none: they are not.
    """
    return {path: _stored(config, path, shape, found) for path, shape in shapes.items()}


def _stored(
    config: ModelConfig, path: Path, shape: tuple[int, ...], found: Collection[str]
) -> Stored:
    name = published_name(config, path)
    transposed = is_transposed(path)
    if transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
    if "@" in name:
        stacked = [n for n in (name.replace("@.", ""), _bare(name)) if n in found]
        if stacked:
            return Stored((stacked[0],), shape, None, transposed)
        experts = tuple(name.replace("@", str(i)) for i in range(shape[0]))
        return Stored(experts, shape[1:], None, transposed)
    if ".query_key_value." not in name:
        return Stored((name,), shape, None, transposed)
    wide, narrow = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    start = {"q": 0, "k": wide, "v": wide + narrow}[path[2]]
    rows = (start, start + shape[0])
    return Stored((name,), (wide + 2 * narrow, *shape[1:]), rows, transposed)


def _bare(name: str) -> str:
    """Stacked experts are also stored without the suffix, as bare parameters."""
    return name.replace("@.", "").removesuffix(".weight")


def published_name(config: ModelConfig, path: Path) -> str:
    """Checkpoint tensor of a path in the decoder, `@` for the number of an expert.

    Raises:
        KeyError: no such parameter.
    """
    table = _TABLE | _LLADA2 if config.family == "llada2" else _TABLE
    name = table[".".join("#" if isinstance(part, int) else part for part in path)]
    number = next((str(part) for part in path if isinstance(part, int)), "#")
    return name.replace("#", number)


def is_transposed(path: Path) -> bool:
    """Whether the checkpoint holds the transpose of this parameter."""
    return bool(path[-1] == "kernel")


def is_buffer(name: str) -> bool:
    """Whether a checkpoint tensor is a recomputable buffer, to be passed over."""
    return _BUFFERS.search(name) is not None
