"""Configuration dataclasses: frozen, validated when built, errors name the value and the limit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from pallas_kernels.geometry import BlockGeometry

RopeKind = Literal["default", "llama3", "longrope"]
Family = Literal["llama", "qwen2", "qwen3", "minicpm"]
Mode = Literal["dense", "sparse", "sparda", "infinigen"]
Offload = Literal["none", "host"]
Fetch = Literal["program", "eager"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _require_choice(name: str, value: object, choices: object) -> None:
    allowed = get_args(choices)
    _require(value in allowed, f"unknown {name} {value!r}, expected one of {', '.join(allowed)}")


def _require_at_least(name: str, value: float, least: float) -> None:
    _require(value >= least, f"{name} must be at least {least}, got {value}")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of one model; see `sparda_jax.models.rope` for the formulas.

    Attributes:
        head_dim: H, number of rotated channels (all of them).
        theta: base of the geometric frequency series.
        kind: "default", "llama3" (frequencies divided by `factor` where the wavelength is long) or
            "longrope" (frequencies divided by one of two factor lists).
        original_max_position_embeddings: context length before scaling, tokens.
        factor: llama3 only.
        low_freq_factor: llama3 only.
        high_freq_factor: llama3 only.
        short_factor: longrope only, H/2 values, used up to the original context length.
        long_factor: longrope only, H/2 values, used beyond it.
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
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        _require_choice("rope type", self.kind, RopeKind)
        _require(
            self.head_dim > 0 and self.head_dim % 2 == 0,
            f"RoPE needs an even, positive head_dim, got {self.head_dim}",
        )
        _require(self.theta > 0, f"rope_theta must be positive, got {self.theta}")
        if self.kind != "default":
            _require_at_least(
                "original_max_position_embeddings", self.original_max_position_embeddings, 2
            )
        if self.kind == "llama3":
            _require(self.factor > 0, f"llama3 rope factor must be positive, got {self.factor}")
            _require(
                self.high_freq_factor > self.low_freq_factor,
                f"llama3 rope high_freq_factor {self.high_freq_factor} must exceed "
                f"low_freq_factor {self.low_freq_factor}",
            )
        if self.kind == "longrope":
            for name in ("short_factor", "long_factor"):
                got = len(getattr(self, name))
                _require(
                    got == self.head_dim // 2,
                    f"longrope {name} has {got} values, head_dim {self.head_dim} needs "
                    f"{self.head_dim // 2}",
                )


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

    def __post_init__(self) -> None:
        _require_choice("model family", self.family, Family)
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
            _require_at_least(name, getattr(self, name), 1)
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"{self.num_heads} query heads are not a multiple of {self.num_kv_heads} KV heads",
        )
        _require(
            self.rope.head_dim == self.head_dim,
            f"rope head_dim {self.rope.head_dim} differs from head_dim {self.head_dim}",
        )
        _require(self.rms_norm_eps > 0, f"rms_norm_eps must be positive, got {self.rms_norm_eps}")

    @property
    def group_size(self) -> int:
        """G, query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_huggingface(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads a Hugging Face `config.json`; nothing is guessed.

        Args:
            config: the parsed file. Model types llama, qwen2, qwen3 and minicpm.

        Raises:
            NotImplementedError: a model type, rope type or field this decoder does not compute.
            ValueError: a missing or impossible value.
        """
        from sparda_jax.huggingface import parse_model_config

        return parse_model_config(config)

    @classmethod
    def minicpm4_1_8b(cls, *, tie_word_embeddings: bool = False) -> ModelConfig:
        """Shapes of MiniCPM4.1-8B for benchmarks, taken from our specification.

        Source: spec/sparda.md, sec. 1.1 and 1.3 (read there from the public SparDA code, not from
        the checkpoint). For real weights read the checkpoint's own config.json instead.
        """
        layers, hidden = 32, 4096
        return cls(
            family="minicpm",
            vocab_size=73448,
            hidden_size=hidden,
            intermediate_size=16384,
            num_layers=layers,
            num_heads=32,
            num_kv_heads=2,
            head_dim=128,
            rope=RopeConfig(
                head_dim=128,
                kind="longrope",
                original_max_position_embeddings=65536,
                short_factor=_MINICPM4_1_FACTORS,
                long_factor=_MINICPM4_1_FACTORS,
            ),
            max_position_embeddings=65536,
            rms_norm_eps=1e-6,
            tie_word_embeddings=tie_word_embeddings,
            embedding_scale=12.0,
            residual_scale=1.4 / math.sqrt(layers),
            logit_divisor=hidden / 256,
            bos_token_id=1,
            eos_token_ids=(2, 73440),
        )


@dataclass(frozen=True)
class SparseConfig:
    """InfLLM-V2 block selection. The budget counts the forced blocks.

    Attributes:
        geometry: block size P, window and stride of the compressed keys, tokens.
        init_blocks: leading blocks that are always selected.
        local_blocks: blocks before the query's own that are always selected; the own block is
            forced besides, so `local_blocks + 1` recent blocks are.
        budget_blocks: R, blocks selected per query and KV head; R*P tokens.
        dense_len: a sequence with fewer tokens than this is attended densely; 0 never.
    """

    geometry: BlockGeometry = field(default_factory=lambda: BlockGeometry(64, 32, 16))
    init_blocks: int = 1
    local_blocks: int = 8
    budget_blocks: int = 24
    dense_len: int = 0

    def __post_init__(self) -> None:
        for name in ("init_blocks", "local_blocks", "dense_len"):
            _require_at_least(name, getattr(self, name), 0)
        _require(
            self.budget_blocks >= self.forced_blocks,
            f"budget of {self.budget_blocks} blocks is smaller than the {self.forced_blocks} forced"
            f" blocks (init {self.init_blocks} + local {self.local_blocks} + the query's own)",
        )

    @property
    def forced_blocks(self) -> int:
        """Blocks that every query selects: init, local and its own."""
        return self.init_blocks + self.local_blocks + 1

    @property
    def budget_tokens(self) -> int:
        """R*P, tokens attended per query and KV head."""
        return self.budget_blocks * self.geometry.block_size

    def with_all_blocks(self, length: int) -> SparseConfig:
        """The same rules with a budget that covers `length` tokens: dense attention by blocks."""
        blocks = max(int(self.geometry.num_blocks(length)), self.forced_blocks)
        return dataclasses.replace(self, budget_blocks=blocks)


@dataclass(frozen=True)
class SamplingParams:
    """How one request picks tokens and when it stops.

    Attributes:
        max_new_tokens: tokens to generate at most.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the fewest likeliest tokens whose probability reaches this; 1 keeps all.
        seed: of this request's own random stream.
        stop_token_ids: generation ends when one is drawn.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _require_at_least("max_new_tokens", self.max_new_tokens, 1)
        _require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            f"temperature must be finite and at least 0, got {self.temperature}",
        )
        _require_at_least("top_k", self.top_k, 0)
        _require(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}")
        _require(0 <= self.seed < 2**32, f"seed must be in [0, 2**32), got {self.seed}")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            _require_at_least("stop token id", token, 0)


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs a batch.

    Attributes:
        mode: "dense" attends everything; "sparse" the blocks that each layer's own queries select;
            "sparda" the blocks that the Forecast of the layer before selects; "infinigen" as
            "sparse" in the prompt, then the blocks that the layer before guesses.
        offload: "host" keeps the KV pool in host memory, "none" on the device.
        fetch: "program" copies missed blocks inside the compiled step, "eager" between steps.
        prefetch: copy blocks that were chosen a layer ahead behind the layer before ("sparda",
            "infinigen", offloaded, fetch "program", on a GPU; elsewhere there is nothing to do).
        spare_slots: device slots per KV head beyond the budget: blocks that are no longer selected
            stay there, the last used ones longest, and need no copy when they are selected again.
        prefill_chunk: prompt tokens per prefill call.
        length_step: prompts are padded and KV is allotted in multiples of so many tokens, so that
            batches of like length share compiled programs; 1: as little as fits.
        steps_per_call: tokens per compiled decode call; at most the block size when offloaded,
            which the engine checks, since the block size is the selection's.
        max_length: prompt plus generated tokens; None: what the model declares. It also fixes
            the RoPE table.
        device_kv_bytes: limit for KV on the device; None: no limit.
        host_kv_bytes: limit for KV in host memory; None: no limit.
    """

    mode: Mode = "sparse"
    offload: Offload = "none"
    fetch: Fetch = "program"
    prefetch: bool = True
    spare_slots: int = 0
    prefill_chunk: int = 512
    length_step: int = 1
    steps_per_call: int = 8
    max_length: int | None = None
    device_kv_bytes: int | None = None
    host_kv_bytes: int | None = None

    def __post_init__(self) -> None:
        _require_choice("mode", self.mode, Mode)
        _require_choice("offload", self.offload, Offload)
        _require_choice("fetch", self.fetch, Fetch)
        _require_at_least("spare_slots", self.spare_slots, 0)
        _require_at_least("prefill_chunk", self.prefill_chunk, 1)
        _require_at_least("length_step", self.length_step, 1)
        _require_at_least("steps_per_call", self.steps_per_call, 1)
        for name in ("max_length", "device_kv_bytes", "host_kv_bytes"):
            value = getattr(self, name)
            if value is not None:
                _require_at_least(name, value, 1)


# LongRoPE divisors of MiniCPM4.1-8B, spec/sparda.md sec. 1.3.
# fmt: off
_MINICPM4_1_FACTORS = (
    0.9982316082870437, 1.033048153422584, 1.0749920956484724, 1.1255096879436193,
    1.1863348602111476, 1.259543828902579, 1.3476188888731149, 1.4535223827776373,
    1.5807816745852985, 1.7335856049489526, 1.9168922912975785, 2.1365471404135326,
    2.3994084200118646, 2.713475511863602, 3.0880118452194134, 3.533650295140154,
    4.062463396503134, 4.687974098908333, 5.425075306704039, 6.289818967956352,
    7.29902962722721, 8.6357018163639, 10.210822723989212, 12.053807765671676,
    14.193944598909404, 16.65780676784363, 19.463620727694074, 22.628311203524586,
    26.150106147261315, 30.02526691405111, 34.23183327975347, 38.73811934094828,
    43.502489489729555, 48.47627117965394, 53.61139491762471, 58.857366522037935,
    64.16798299215064, 69.51359464319125, 74.86555458220285, 80.21497790341579,
    85.55322183307433, 90.89611806932027, 96.26245306514224, 101.68269304046481,
    107.18619510219668, 112.82253283014026, 118.63764063163615, 119.88866203644656,
    120.9462882391725, 121.837565139014, 122.58663780572562, 123.2147719894291,
    123.74049454862576, 124.17980424685767, 124.54641761955492, 124.85202548028222,
    125.10654406389756, 125.31835105170659, 125.49450117164764, 125.64091910903052,
    125.76256945356558, 125.86360463815589, 125.94749252260765, 126.01712561287873,
)
# fmt: on
