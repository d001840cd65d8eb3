"""Low-rank adapters with a mask embedding, or all weights: what block-diffusion training changes.

A kernel W becomes W + (alpha / rank) A B; the token that stands for "not decided" gets an embedding
of its own. The rest of the model stays as it is.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from sparda_jax.config import DiffusionConfig
from sparda_jax.models.decoder import Decoder
from sparda_jax.typing import Array

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
MASK_EMBEDDING = "mask_embedding"
# Arrays by name: "layers.0.q.a", "layers.0.q.b", ..., "mask_embedding"; or, of a whole model,
# "layers.0.q.kernel" and so on.
Weights = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Shape of an adapter.

    Attributes:
        rank: of A B.
        alpha: A B counts alpha / rank.
        targets: projections of a layer that get one.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"LoRA rank must be at least 1, got {self.rank}")
        unknown = [name for name in self.targets if name not in TARGETS]
        if unknown:
            raise ValueError(f"LoRA targets {unknown}: expected some of {', '.join(TARGETS)}")


def _named(model: Decoder) -> dict[str, tuple[Any, Any]]:
    """Path and parameter of everything in a model, by dotted name."""
    flat = nnx.to_flat_state(nnx.state(model))
    return {".".join(map(str, path)): (path, parameter) for path, parameter in flat}


def _is_target(name: str, config: LoraConfig) -> bool:
    parts = name.split(".")
    return parts[-1] == "kernel" and parts[-2] in config.targets and "experts" not in parts


def lora_weights(model: Decoder, config: LoraConfig, seed: int) -> Weights:
    """An adapter that changes nothing yet: A random, B zero, the mask embedding the mean one."""
    weights: Weights = {}
    rng = np.random.default_rng(seed)
    for name, (_, parameter) in _named(model).items():
        if _is_target(name, config):
            size, out = parameter.get_value().shape
            stem = name.removesuffix(".kernel")
            a = rng.standard_normal((size, config.rank), np.float32) / np.sqrt(size)
            weights[f"{stem}.a"] = jnp.asarray(a)
            weights[f"{stem}.b"] = jnp.zeros((config.rank, out), jnp.float32)
    mean = jnp.mean(model.embedding[...].astype(jnp.float32), axis=0)
    weights[MASK_EMBEDDING] = mean
    return weights


def full_weights(model: Decoder) -> Weights:
    """Every parameter, float32."""
    return {n: p.get_value().astype(jnp.float32) for n, (_, p) in _named(model).items()}


def adapted(
    model: Decoder,
    weights: Weights,
    config: LoraConfig | None,
    diffusion: DiffusionConfig,
) -> Decoder:
    """The model with an adapter merged in, or (`config` None) with other weights.

    No gradient reaches the frozen weights, nor the mask embedding through the head.

    Raises:
        ValueError: names that do not belong to this model, all in one message.
    """
    named = _named(model)
    expected = set(named)
    if config is not None:
        stems = [n.removesuffix(".kernel") for n in named if _is_target(n, config)]
        expected = {f"{stem}.{part}" for stem in stems for part in "ab"} | {MASK_EMBEDDING}
    if set(weights) != expected:
        raise ValueError(
            f"weights do not fit the model: missing {sorted(expected - set(weights))}, "
            f"unexpected {sorted(set(weights) - expected)}"
        )
    flat = []
    for name, (path, parameter) in named.items():
        value = parameter.get_value()
        stem = name.removesuffix(".kernel")
        if config is None:
            value = weights[name].astype(value.dtype)
        else:
            value = lax.stop_gradient(value)
            if f"{stem}.a" in weights:
                scale = config.alpha / config.rank
                change = weights[f"{stem}.a"] @ weights[f"{stem}.b"]
                value = (value.astype(jnp.float32) + scale * change).astype(value.dtype)
            if name == "embedding":
                row = lax.stop_gradient(weights[MASK_EMBEDDING]).astype(value.dtype)
                value = value.at[diffusion.mask_token_id].set(row)
        flat.append((path, parameter.replace(value)))
    graph, _ = nnx.split(model)
    merged: Decoder = nnx.merge(graph, nnx.from_flat_state(flat))
    merged.config = dataclasses.replace(model.config, diffusion=diffusion)
    return merged
