"""What a model is: shape and arithmetic, read from its checkpoint or from a preset.

Import these from `sparda_jax.config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sparda_jax.validation import require, require_at_least, require_choice

RopeKind = Literal["default", "llama3", "longrope", "yarn"]
Family = Literal["llama", "qwen2", "qwen3", "minicpm", "sdar", "fast_dllm", "llada2"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of one model; see `sparda_jax.models.rope` for the formulas.

    Attributes:
        head_dim: rotated channels, the first of each head; H but for partial rotary embedding.
        theta: base of the geometric frequency series.
        kind: "default", "llama3" (frequencies divided by `factor` where the wavelength is long),
            "longrope" (frequencies divided by one of two factor lists) or "yarn" (as llama3, with a
            ramp over the channels).
        original_max_position_embeddings: context length before scaling, tokens.
        factor: llama3 and yarn.
        low_freq_factor: llama3 only.
        high_freq_factor: llama3 only.
        short_factor: longrope only, H/2 values, used up to the original context length.
        long_factor: longrope only, H/2 values, used beyond it.
        beta_fast: yarn only: channels that turn more often in the original context stay.
        beta_slow: yarn only: channels that turn less often are slowed by `factor`.
        attention_factor: both cos and sin are multiplied by this.
    """

    head_dim: int
    theta: float = 10000.0
    kind: RopeKind = "default"
    original_max_position_embeddings: int = 0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        require_choice("rope type", self.kind, RopeKind)
        require(
            self.head_dim > 0 and self.head_dim % 2 == 0,
            f"RoPE needs an even, positive head_dim, got {self.head_dim}",
        )
        require(self.theta > 0, f"rope_theta must be positive, got {self.theta}")
        if self.kind != "default":
            require_at_least(
                "original_max_position_embeddings", self.original_max_position_embeddings, 2
            )
        if self.kind == "llama3":
            require(self.factor > 0, f"llama3 rope factor must be positive, got {self.factor}")
            require(
                self.high_freq_factor > self.low_freq_factor,
                f"llama3 rope high_freq_factor {self.high_freq_factor} must exceed "
                f"low_freq_factor {self.low_freq_factor}",
            )
        if self.kind == "yarn":
            require_at_least("yarn rope factor", self.factor, 1)
            require(
                self.beta_fast > self.beta_slow > 0,
                f"yarn rope needs beta_fast > beta_slow > 0, got {self.beta_fast}, "
                f"{self.beta_slow}",
            )
        if self.kind == "longrope":
            for name in ("short_factor", "long_factor"):
                got = len(getattr(self, name))
                require(
                    got == self.head_dim // 2,
                    f"longrope {name} has {got} values, head_dim {self.head_dim} needs "
                    f"{self.head_dim // 2}",
                )


@dataclass(frozen=True)
class MoeConfig:
    """Mixture of experts in place of the MLP (LLaDA2); formulas: `sparda_jax.models.moe`.

    Attributes:
        num_experts: routed experts.
        experts_per_token: routed experts that each token passes.
        intermediate_size: inner width of one routed expert.
        shared_intermediate_size: inner width of the expert that every token passes; 0: none.
        num_groups: experts are chosen within groups of equal size.
        groups_per_token: groups that a token may choose from.
        routed_scale: multiplies the normalised weights of the chosen experts.
        dense_layers: leading layers that have a plain MLP.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    num_groups: int = 1
    groups_per_token: int = 1
    routed_scale: float = 1.0
    dense_layers: int = 0

    def __post_init__(self) -> None:
        for name in ("num_experts", "experts_per_token", "intermediate_size", "num_groups"):
            require_at_least(name, getattr(self, name), 1)
        for name in ("shared_intermediate_size", "dense_layers"):
            require_at_least(name, getattr(self, name), 0)
        size, rest = divmod(self.num_experts, self.num_groups)
        # A group is judged by its two best experts.
        require(
            rest == 0 and size >= 2,
            f"{self.num_experts} experts do not split into {self.num_groups} groups of 2 or more",
        )
        require(
            1 <= self.groups_per_token <= self.num_groups,
            f"groups_per_token must be in [1, {self.num_groups}], got {self.groups_per_token}",
        )
        allowed = self.groups_per_token * size
        require(
            self.experts_per_token <= allowed,
            f"{self.experts_per_token} experts per token exceed the {allowed} of "
            f"{self.groups_per_token} groups",
        )


@dataclass(frozen=True)
class DiffusionConfig:
    """What block diffusion needs to know of a checkpoint (spec/herald.md, sec. 2.2).

    Attributes:
        block_size: W, tokens that are denoised together.
        mask_token_id: stands for a token that is not decided yet; None: the checkpoint names none
            and the family's usual id lies outside the vocabulary, so the caller must say.
        logit_shift: the logits of row i-1 predict token i (Fast-dLLM v2), not those of row i.
        causal_clean: clean tokens (prompt, finished blocks) were trained token-causal.
    """

    block_size: int
    mask_token_id: int | None
    logit_shift: bool = False
    causal_clean: bool = False

    def __post_init__(self) -> None:
        require_at_least("diffusion block_size", self.block_size, 1)


@dataclass(frozen=True)
class ModelConfig:
    """Shape and arithmetic of a decoder; everything a forward pass depends on but the weights.

    Attributes:
        family: for messages and file names only; the flags below decide the arithmetic.
        vocab_size: V.
        hidden_size: D.
        intermediate_size: F.
        num_layers: L.
        num_heads: N query heads.
        num_kv_heads: K key/value heads, a divisor of N.
        head_dim: H.
        rope: rotary embedding.
        max_position_embeddings: tokens the checkpoint declares; also the default table length.
        rms_norm_eps: added to the variance in every RMSNorm.
        tie_word_embeddings: True: the head is the embedding; None: not stated, the loader
            decides by the presence of `lm_head.weight`.
        qkv_bias: q, k and v projections have a bias.
        output_bias: the attention output projection has a bias.
        mlp_bias: the MLP projections have a bias.
        qk_norm: RMSNorm over H of every q and k head before RoPE (Qwen3).
        embedding_scale: multiplies the embeddings (MiniCPM scale_emb).
        residual_scale: multiplies each branch before it is added (MiniCPM scale_depth/sqrt(L)).
        logit_divisor: the normed hidden state is divided by it (MiniCPM D/dim_model_base).
        bos_token_id: None where the checkpoint names none.
        eos_token_ids: every id that ends a generation.
        kv_importance: values say how important their token is, a bias of attention and the second
            stage of selection (NOSA; `sparda_jax.sparse.nosa`). The loader also sets it where the
            weights are there.
        moe: mixture of experts in place of the MLP; None: a plain MLP in every layer.
        diffusion: for block diffusion checkpoints; None: autoregressive.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    kv_importance: bool = False
    moe: MoeConfig | None = None
    diffusion: DiffusionConfig | None = None

    def __post_init__(self) -> None:
        require_choice("model family", self.family, Family)
        if self.diffusion is not None and self.diffusion.mask_token_id is not None:
            mask = self.diffusion.mask_token_id
            require(
                0 <= mask < self.vocab_size,
                f"mask_token_id {mask} lies outside the vocabulary of {self.vocab_size}",
            )
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            require_at_least(name, getattr(self, name), 1)
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"{self.num_heads} query heads are not a multiple of {self.num_kv_heads} KV heads",
        )
        require(
            self.rope.head_dim <= self.head_dim,
            f"rope head_dim {self.rope.head_dim} exceeds head_dim {self.head_dim}",
        )
        require(self.rms_norm_eps > 0, f"rms_norm_eps must be positive, got {self.rms_norm_eps}")

    @property
    def group_size(self) -> int:
        """G, query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_huggingface(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads a Hugging Face `config.json`; nothing is guessed.

        Args:
            config: the parsed file. A value that a diffusion family's file may leave out has a
                documented default, which is logged (logger `sparda_jax`, warning).

        Raises:
            NotImplementedError: a model type, rope type or field this decoder does not compute.
            ValueError: a missing or impossible value.
        """
        from sparda_jax.huggingface import parse_model_config

        return parse_model_config(config)

    @classmethod
    def preset(cls, name: str) -> ModelConfig:
        """Shape of a published model, for benchmarks and synthetic weights.

        Args:
            name: one of `sparda_jax.presets.PRESETS`.

        Raises:
            ValueError: no such name.
        """
        from sparda_jax.presets import PRESETS

        if name not in PRESETS:
            raise ValueError(f"unknown model {name!r}, expected one of {', '.join(PRESETS)}")
        return cls.from_huggingface(PRESETS[name])
