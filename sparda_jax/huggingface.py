"""Reads the fields of a Hugging Face `config.json`; refuses, by name, what it does not know."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sparda_jax.config import ModelConfig, RopeConfig

_FAMILIES = ("llama", "qwen2", "qwen3", "minicpm")

# Fields that say nothing about a forward pass at inference.
_IGNORED = frozenset(
    {
        "_attn_implementation",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "dtype",
        "initializer_range",
        "is_decoder",
        "is_llama_config",
        "model_type",
        "mup_denominator",
        "pad_token_id",
        "return_dict",
        "tokenizer_class",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)
_ORIGINAL = "original_max_position_embeddings"
_LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL)
_LONGROPE_FIELDS = ("short_factor", "long_factor", _ORIGINAL)
# A selection policy, not a property of the weights: it is `SparseConfig` that decides here.
_POLICY = frozenset({"sparse_config"})
# Fields that would change the computation: only the value that this decoder computes is accepted.
_ONLY = {
    "hidden_act": "silu",
    "is_causal": True,
    "partial_rotary_factor": 1.0,
    "pretraining_tp": 1,
    "use_rope": True,
}
_READ = frozenset(
    {
        "attention_bias",
        "bos_token_id",
        "dim_model_base",
        "eos_token_id",
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "max_window_layers",
        "mlp_bias",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "scale_depth",
        "scale_emb",
        "sliding_window",
        "tie_word_embeddings",
        "use_sliding_window",
        "vocab_size",
    }
)


def parse_model_config(config: Mapping[str, Any]) -> ModelConfig:
    """The body of `ModelConfig.from_huggingface`, which documents it."""
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise NotImplementedError(
            f"model_type {family!r} is not supported, only {', '.join(_FAMILIES)}"
        )
    _refuse_unknown_fields(config)
    _refuse_sliding_window(config)
    hidden, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
    layers = _integer(config, "num_hidden_layers")
    head_dim = config.get("head_dim")
    if head_dim is None:
        if hidden % heads:
            raise ValueError(f"hidden_size {hidden} is not a multiple of {heads} attention heads")
        head_dim = hidden // heads
    attention_bias = bool(config.get("attention_bias", False))
    minicpm = family == "minicpm"
    return ModelConfig(
        family=family,
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_num_kv_heads(config, family, heads),
        head_dim=head_dim,
        rope=_rope_config(config, family, head_dim),
        max_position_embeddings=_integer(config, "max_position_embeddings"),
        rms_norm_eps=_number(config, "rms_norm_eps"),
        tie_word_embeddings=config.get("tie_word_embeddings"),
        # Qwen2 always has q, k, v biases and none on the output; the field is not part of it.
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias and family != "qwen2",
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        embedding_scale=_number(config, "scale_emb") if minicpm else 1.0,
        residual_scale=_number(config, "scale_depth") / math.sqrt(layers) if minicpm else 1.0,
        logit_divisor=hidden / _number(config, "dim_model_base") if minicpm else 1.0,
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=_token_ids(config.get("eos_token_id")),
    )


def _required(config: Mapping[str, Any], name: str) -> Any:
    if config.get(name) is None:
        raise ValueError(f"model config: {name} is missing")
    return config[name]


def _integer(config: Mapping[str, Any], name: str) -> int:
    value = _required(config, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"model config: {name} must be an integer, got {value!r}")
    return value


def _number(config: Mapping[str, Any], name: str) -> float:
    value = _required(config, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"model config: {name} must be a number, got {value!r}")
    return float(value)


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _refuse_unknown_fields(config: Mapping[str, Any]) -> None:
    for name, accepted in _ONLY.items():
        if config.get(name, accepted) != accepted:
            raise NotImplementedError(
                f"model config: {name} = {config[name]!r} is not supported, only {accepted!r}"
            )
    minicpm_only = {"scale_emb", "scale_depth", "dim_model_base"}
    known = _IGNORED | _POLICY | _READ | _ONLY.keys()
    if config["model_type"] != "minicpm":
        known = known - minicpm_only
    for name, value in config.items():
        # None and False are how configs spell "this option is off".
        if name not in known and value is not None and value is not False:
            raise NotImplementedError(
                f"model config: {name} = {value!r} is not a field this decoder knows for "
                f"{config['model_type']}; it may change the computation"
            )


def _refuse_sliding_window(config: Mapping[str, Any]) -> None:
    for kind in config.get("layer_types") or ():
        if kind != "full_attention":
            raise NotImplementedError(f"model config: layer type {kind!r} is not supported")
    window = config.get("sliding_window")
    # Qwen configs carry a window that only counts with the flag, from max_window_layers on.
    layers = _integer(config, "num_hidden_layers")
    enabled = config.get("use_sliding_window", config["model_type"] not in ("qwen2", "qwen3"))
    if window is not None and enabled and config.get("max_window_layers", 0) < layers:
        raise NotImplementedError(f"model config: sliding_window = {window} is not supported")


def _num_kv_heads(config: Mapping[str, Any], family: str, heads: int) -> int:
    # Llama files from before grouped-query attention leave the field out; then K = N.
    if family == "llama" and config.get("num_key_value_heads") is None:
        return heads
    return _integer(config, "num_key_value_heads")


def _rope_config(config: Mapping[str, Any], family: str, head_dim: int) -> RopeConfig:
    scaling: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):  # the latter is the name of newer releases
        scaling.update(config.get(name) or {})
    theta = scaling.pop("rope_theta", config.get("rope_theta"))
    if theta is None:
        if family not in ("llama", "minicpm"):
            raise ValueError("model config: rope_theta is missing")
        theta = 10000.0  # the documented default of the two families; old files leave it out
    kind = scaling.pop("rope_type", None)
    kind = scaling.pop("type", None) if kind is None else kind
    scaling.pop("type", None)
    if kind is None and scaling:
        raise ValueError(f"model config: rope scaling without a rope_type: {scaling}")
    common: dict[str, Any] = {"head_dim": head_dim, "theta": float(theta)}
    if kind in (None, "default"):
        return _build_rope(common, scaling, ())
    if kind == "llama3":
        common |= {"kind": kind}
        return _build_rope(common, scaling, _LLAMA3_FIELDS)
    if kind == "longrope":
        factor = scaling.pop("attention_factor", None)
        # `factor` restates max_position_embeddings / original_max_position_embeddings.
        stated = scaling.pop("factor", None)
        original = _integer(scaling, _ORIGINAL)
        ratio = _integer(config, "max_position_embeddings") / original
        if factor is None:
            factor = _longrope_attention_factor(ratio if stated is None else stated, original)
        common |= {"kind": kind, "attention_factor": float(factor)}
        return _build_rope(common, scaling, _LONGROPE_FIELDS)
    raise NotImplementedError(
        f"rope type {kind!r} is not supported, only default, llama3 and longrope"
    )


def _longrope_attention_factor(ratio: float, original: int) -> float:
    """sqrt(1 + ln(ratio) / ln(original)), spec/sparda.md sec. 1.3; 1 where nothing is extended."""
    return math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0


def _build_rope(
    common: dict[str, Any], scaling: dict[str, Any], names: tuple[str, ...]
) -> RopeConfig:
    for name in names:
        if scaling.get(name) is None:
            raise ValueError(f"model config: rope {name} is missing")
    for name, value in scaling.items():
        if name not in names and value is not None:
            raise NotImplementedError(f"model config: rope {name} = {value!r} is not supported")
    for name in names:
        value = scaling[name]
        common[name] = tuple(value) if isinstance(value, list) else value
    return RopeConfig(**common)
