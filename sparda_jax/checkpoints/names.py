"""One table of tensor names for all families: Hugging Face checkpoint <-> nnx path.

Checkpoints store projections `[out, in]`, the decoder `[in, out]`: leaves called `kernel` are
transposed, and nothing else is.
"""

from __future__ import annotations

import re
from typing import Any

# `#` stands for the layer number.
_TABLE = {
    "model.embed_tokens.weight": "embedding",
    "model.norm.weight": "final_norm.scale",
    "lm_head.weight": "head.kernel",
    "model.layers.#.input_layernorm.weight": "layers.#.attention_norm.scale",
    "model.layers.#.self_attn.q_norm.weight": "layers.#.q_norm.scale",
    "model.layers.#.self_attn.k_norm.weight": "layers.#.k_norm.scale",
    "model.layers.#.post_attention_layernorm.weight": "layers.#.mlp_norm.scale",
}
for _group, _target, _projections in (
    ("self_attn", "", "qkvo"),
    ("mlp", "mlp.", ("gate", "up", "down")),
):
    for _name in _projections:
        _theirs, _ours = f"model.layers.#.{_group}.{_name}_proj", f"layers.#.{_target}{_name}"
        _TABLE[f"{_theirs}.weight"] = f"{_ours}.kernel"
        _TABLE[f"{_theirs}.bias"] = f"{_ours}.bias"
_INVERSE = {ours: theirs for theirs, ours in _TABLE.items()}

# Buffers that old checkpoints carry along; they are recomputed from the config.
_BUFFERS = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")

# flax's own spelling of a path is not typed more closely.
Path = tuple[Any, ...]


def nnx_path(name: str) -> Path | None:
    """Path in the decoder of a checkpoint tensor; None where the table has no such name."""
    number = re.match(r"model\.layers\.(0|[1-9]\d*)\.", name)
    generic = name if number is None else name.replace(f".{number[1]}.", ".#.", 1)
    ours = _TABLE.get(generic) if (number is None) == ("#" not in generic) else None
    if ours is None:
        return None
    return tuple(int(number[1]) if number and part == "#" else part for part in ours.split("."))


def checkpoint_name(path: Path) -> str:
    """Checkpoint tensor of a path in the decoder.

    Raises:
        KeyError: no such parameter.
    """
    generic = ".".join("#" if isinstance(part, int) else part for part in path)
    name = _INVERSE[generic]
    for part in path:
        if isinstance(part, int):
            name = name.replace("#", str(part))
    return name


def is_transposed(path: Path) -> bool:
    """Whether the checkpoint holds the transpose of this parameter."""
    return path[-1] == "kernel"


def is_buffer(name: str) -> bool:
    """Whether a checkpoint tensor is a recomputable buffer, to be passed over."""
    return _BUFFERS.search(name) is not None
