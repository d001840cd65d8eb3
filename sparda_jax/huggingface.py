"""Reads the fields of a Hugging Face `config.json`; refuses, by name, what it does not know."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from sparda_jax.config import DiffusionConfig, Family, ModelConfig, MoeConfig, RopeConfig

_LOG = logging.getLogger("sparda_jax")

_FAMILIES: dict[str, Family] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "minicpm": "minicpm",
    "sdar": "sdar",
    "Fast_dLLM_Qwen": "fast_dllm",
    "llada2_moe": "llada2",
    "llada2_moe_veomni": "llada2",  # the same model, its experts stacked
}


class _DiffusionDefaults(NamedTuple):
    """What a block diffusion family's `config.json` may leave out (spec/herald.md, sec. 2.2).

    Attributes:
        block_field: name of the block size in the file; None: the file has none.
        block_size: where the field is missing.
        mask_token_id: likewise.
        stop_token_ids: besides the file's.
        logit_shift: a property of the family, in no file.
    """

    block_field: str | None
    block_size: int
    mask_token_id: int
    stop_token_ids: tuple[int, ...]
    logit_shift: bool


_DIFFUSION: dict[str, _DiffusionDefaults] = {
    "sdar": _DiffusionDefaults("block_size", 4, 151669, (151645, 151643), False),
    "fast_dllm": _DiffusionDefaults("bd_size", 32, 151665, (151645, 151643), True),
    "llada2": _DiffusionDefaults(None, 32, 156895, (156892,), False),
}

# Fields that say nothing about a forward pass at inference, by reason.
# fmt: off
_IGNORED = frozenset({
    # Who wrote the file, with what, for which classes; how weights are kept and attention is run.
    "_attn_implementation", "_commit_hash", "_name_or_path", "architectures", "auto_map",
    "chunk_size_feed_forward", "dtype", "finetuning_task", "id2label", "is_decoder",
    "is_llama_config", "label2id", "model_type", "mup_denominator", "prefix", "problem_type",
    "return_dict", "task_specific_params", "tokenizer_class", "torch_dtype",
    "transformers.js_config", "transformers_version", "unsloth_fixed", "unsloth_version",
    "use_cache",
    # Training: start values, dropout, losses beside the main one.
    "attention_dropout", "attn_pdrop", "embd_pdrop", "embedding_dropout", "gradient_checkpointing",
    "hidden_dropout", "initializer_range", "output_dropout", "resid_pdrop", "residual_dropout",
    "router_aux_loss_coef",
    # Tokens and defaults of generation, which older releases wrote into every file.
    "bad_words_ids", "begin_suppress_tokens", "cls_token_id", "decoder_start_token_id",
    "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
    "length_penalty", "max_length", "max_new_tokens", "min_length", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_return_sequences", "pad_token_id", "repetition_penalty",
    "sep_token_id", "suppress_tokens", "temperature", "top_k", "top_p", "typical_p", "unk_token_id",
})
# fmt: on
_ORIGINAL = "original_max_position_embeddings"
_LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL)
_YARN_FIELDS = ("factor", "beta_fast", "beta_slow", _ORIGINAL)
_LONGROPE_FIELDS = ("short_factor", "long_factor", _ORIGINAL)
# A selection policy, not a property of the weights: it is `SparseConfig` that decides here.
_POLICY = frozenset({"sparse_config"})
# Fields that would change the computation: only the value that this decoder computes is accepted.
_ONLY = {
    "hidden_act": "silu",
    "is_causal": True,
    "pretraining_tp": 1,
    "pruned_heads": {},
    "use_rope": True,
}
# Fields of one family: read, without effect at inference, or one accepted value.
_FAMILY_READ = {
    "minicpm": {"scale_emb", "scale_depth", "dim_model_base"},
    "sdar": {"block_size", "mask_token_id", "use_regular_causal"},
    "fast_dllm": {"bd_size", "mask_token_id"},
    "llada2": {
        "first_k_dense_replace",
        "mask_token_id",
        "moe_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "n_group",
        "num_experts",
        "num_experts_per_tok",
        "num_shared_experts",
        "partial_rotary_factor",
        "rotary_dim",
        "routed_scaling_factor",
        "topk_group",
    },
}
_FAMILY_IGNORED = {
    "sdar": {"debug", "ep_size", "fuse_cross_entropy", "micro_forward", "skip_checkpoint"},
    "fast_dllm": {"conplemenrary_mask", "complementary_mask"},  # how it was trained
    # The loss of prediction heads for further tokens; that there are none, `_FAMILY_ONLY` checks.
    "llada2": {"mtp_loss_scaling_factor", "output_router_logits"},
}
_FAMILY_ONLY: dict[str, dict[str, Any]] = {
    "llada2": {
        "moe_router_enable_expert_bias": True,
        "norm_head": False,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
        "router_dtype": "fp32",
        "score_function": "sigmoid",
        "use_bias": False,
        "use_qk_norm": True,
        "use_qkv_bias": False,
        "use_rmsnorm": True,
    },
}
_READ = frozenset(
    {
        "attention_bias",
        "bos_token_id",
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
        "sliding_window",
        "tie_word_embeddings",
        "use_sliding_window",
        "vocab_size",
    }
)


def parse_model_config(config: Mapping[str, Any]) -> ModelConfig:
    """The body of `ModelConfig.from_huggingface`, which documents it."""
    family = _FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise NotImplementedError(
            f"model_type {config.get('model_type')!r} is not supported, only {', '.join(_FAMILIES)}"
        )
    _refuse_unknown_fields(config, family)
    _refuse_sliding_window(config, family)
    hidden, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
    layers = _integer(config, "num_hidden_layers")
    head_dim = config.get("head_dim")
    if head_dim is None:
        if hidden % heads:
            raise ValueError(f"hidden_size {hidden} is not a multiple of {heads} attention heads")
        head_dim = hidden // heads
    attention_bias = bool(config.get("attention_bias", False))
    if family == "llama" and attention_bias and _is_nosa(config):
        raise NotImplementedError("model config: attention_bias = True is not supported for NOSA")
    minicpm, qwen2 = family == "minicpm", family in ("qwen2", "fast_dllm")
    return ModelConfig(
        family=family,
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_num_kv_heads(config, family, heads),
        head_dim=head_dim,
        rope=_rope_config(config, family, _rotary_dim(config, head_dim)),
        max_position_embeddings=_integer(config, "max_position_embeddings"),
        rms_norm_eps=_number(config, "rms_norm_eps"),
        tie_word_embeddings=config.get("tie_word_embeddings"),
        # Qwen2 always has q, k, v biases and none on the output; the field is not part of it.
        qkv_bias=attention_bias or qwen2,
        output_bias=attention_bias and not qwen2,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family in ("qwen3", "sdar", "llada2"),
        embedding_scale=_number(config, "scale_emb") if minicpm else 1.0,
        residual_scale=_number(config, "scale_depth") / math.sqrt(layers) if minicpm else 1.0,
        logit_divisor=hidden / _number(config, "dim_model_base") if minicpm else 1.0,
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=_stop_ids(config, family),
        kv_importance=family == "llama" and _is_nosa(config),
        moe=_moe_config(config) if family == "llada2" else None,
        diffusion=_diffusion_config(config, family) if family in _DIFFUSION else None,
    )


def _is_nosa(config: Mapping[str, Any]) -> bool:
    return "SparseLlamaForCausalLM" in (config.get("architectures") or ())


def _moe_config(config: Mapping[str, Any]) -> MoeConfig:
    inner = _integer(config, "moe_intermediate_size")
    shared = inner * _integer(config, "num_shared_experts")
    stated = config.get("moe_shared_expert_intermediate_size")
    if stated is not None and stated != shared:
        raise NotImplementedError(
            f"model config: moe_shared_expert_intermediate_size {stated} is not supported, only "
            f"num_shared_experts times moe_intermediate_size, {shared}"
        )
    return MoeConfig(
        num_experts=_integer(config, "num_experts"),
        experts_per_token=_integer(config, "num_experts_per_tok"),
        intermediate_size=inner,
        shared_intermediate_size=shared,
        num_groups=_integer(config, "n_group"),
        groups_per_token=_integer(config, "topk_group"),
        routed_scale=_number(config, "routed_scaling_factor"),
        dense_layers=_integer(config, "first_k_dense_replace"),
    )


def _diffusion_config(config: Mapping[str, Any], family: str) -> DiffusionConfig:
    defaults = _DIFFUSION[family]

    def value(name: str, default: int) -> int:
        if config.get(name) is not None:
            return _integer(config, name)
        _LOG.warning("%s config names no %s: the family's %d is used", family, name, default)
        return default

    mask: int | None = defaults.mask_token_id
    if config.get("mask_token_id") is None and defaults.mask_token_id >= config["vocab_size"]:
        _LOG.warning("%s config names no mask_token_id: it must be given", family)
        mask = None
    else:
        mask = value("mask_token_id", defaults.mask_token_id)
    return DiffusionConfig(
        block_size=value(defaults.block_field or "block size", defaults.block_size),
        mask_token_id=mask,
        logit_shift=defaults.logit_shift,
        causal_clean=bool(config.get("use_regular_causal", False)),
    )


def _stop_ids(config: Mapping[str, Any], family: str) -> tuple[int, ...]:
    ids = _token_ids(config.get("eos_token_id"))
    if family not in _DIFFUSION:
        return ids
    vocab = _integer(config, "vocab_size")
    extra = _DIFFUSION[family].stop_token_ids
    return ids + tuple(token for token in extra if token < vocab and token not in ids)


def _rotary_dim(config: Mapping[str, Any], head_dim: int) -> int:
    """Rotated channels; given twice where the rotary embedding is partial."""
    factor = config.get("partial_rotary_factor", 1.0)
    size = int(head_dim * factor)
    stated = config.get("rotary_dim", size)
    if stated != size:
        raise ValueError(
            f"model config: rotary_dim {stated} is not partial_rotary_factor {factor} of head_dim "
            f"{head_dim}"
        )
    return size


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


def _refuse_unknown_fields(config: Mapping[str, Any], family: str) -> None:
    only = _ONLY | _FAMILY_ONLY.get(family, {})
    if family != "llada2":
        only["partial_rotary_factor"] = 1.0
    for name, accepted in only.items():
        if config.get(name, accepted) != accepted:
            raise NotImplementedError(
                f"model config: {name} = {config[name]!r} is not supported, only {accepted!r}"
            )
    known = _IGNORED | _POLICY | _READ | only.keys()
    known |= _FAMILY_READ.get(family, set()) | _FAMILY_IGNORED.get(family, set())
    for name, value in config.items():
        # None and False are how configs spell "this option is off".
        if name not in known and value is not None and value is not False:
            raise NotImplementedError(
                f"model config: {name} = {value!r} is not a field this decoder knows for "
                f"{config['model_type']}; it may change the computation"
            )


def _refuse_sliding_window(config: Mapping[str, Any], family: str) -> None:
    for kind in config.get("layer_types") or ():
        if kind != "full_attention":
            raise NotImplementedError(f"model config: layer type {kind!r} is not supported")
    window = config.get("sliding_window")
    # Qwen configs carry a window that only counts with the flag, from max_window_layers on.
    layers = _integer(config, "num_hidden_layers")
    enabled = config.get("use_sliding_window", family in ("llama", "minicpm"))
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
    if kind == "yarn":
        factor = scaling.pop("attention_factor", None)
        if factor is None:  # as published: YaRN, eq. 22
            factor = 0.1 * math.log(_number(scaling, "factor")) + 1
        scaling = {"beta_fast": 32.0, "beta_slow": 1.0} | scaling  # the method's own defaults
        common |= {"kind": kind, "attention_factor": float(factor)}
        return _build_rope(common, scaling, _YARN_FIELDS)
    raise NotImplementedError(
        f"rope type {kind!r} is not supported, only default, llama3, longrope and yarn"
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
