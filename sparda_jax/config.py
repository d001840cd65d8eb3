"""Configuration dataclasses: frozen, validated when built, errors name the value and the limit."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Literal

from pallas_kernels.geometry import BlockGeometry
from sparda_jax.model_config import DiffusionConfig, Family, ModelConfig, MoeConfig, RopeConfig
from sparda_jax.validation import require, require_at_least, require_choice

__all__ = [
    "DiffusionConfig",
    "EngineConfig",
    "Family",
    "Fetch",
    "Mode",
    "ModelConfig",
    "MoeConfig",
    "Offload",
    "RopeConfig",
    "SamplingParams",
    "SparseConfig",
]

Mode = Literal["dense", "sparse", "sparda", "infinigen"]
Offload = Literal["none", "host", "auto"]
Fetch = Literal["program", "eager"]
HostKV = Literal["model", "int8", "float8_e4m3fn"]


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
        query_blocks: of the budget, the blocks that the query chooses; the rest of it goes to the
            most important ones whatever the query (NOSA). None: the query chooses all.
    """

    geometry: BlockGeometry = field(default_factory=lambda: BlockGeometry(64, 32, 16))
    init_blocks: int = 1
    local_blocks: int = 8
    budget_blocks: int = 24
    dense_len: int = 0
    query_blocks: int | None = None

    def __post_init__(self) -> None:
        for name in ("init_blocks", "local_blocks", "dense_len"):
            require_at_least(name, getattr(self, name), 0)
        if self.query_blocks is not None:
            require(
                self.forced_blocks <= self.query_blocks <= self.budget_blocks,
                f"query_blocks {self.query_blocks} must be in [{self.forced_blocks}, "
                f"{self.budget_blocks}], from the forced blocks to the budget",
            )
        require(
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
        return dataclasses.replace(self, budget_blocks=blocks, query_blocks=None)


@dataclass(frozen=True)
class SamplingParams:
    """How one request picks tokens and when it stops.

    Attributes:
        max_new_tokens: tokens to generate at most.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the fewest likeliest tokens whose probability reaches this; 1 keeps all.
        min_p: drop tokens less likely than this share of the likeliest one; 0 keeps all.
        seed: of this request's own random stream.
        stop_token_ids: generation ends when one is drawn.
        logprobs: report the log-probability of each token drawn, and of so many likeliest ones;
            None: no log-probabilities. They are the model's, before temperature and filters.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        require_at_least("max_new_tokens", self.max_new_tokens, 1)
        require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            f"temperature must be finite and at least 0, got {self.temperature}",
        )
        require_at_least("top_k", self.top_k, 0)
        require(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}")
        require(0 <= self.min_p <= 1, f"min_p must be in [0, 1], got {self.min_p}")
        require(0 <= self.seed < 2**32, f"seed must be in [0, 2**32), got {self.seed}")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            require_at_least("stop token id", token, 0)
        if self.logprobs is not None:
            require_at_least("logprobs", self.logprobs, 0)


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs a batch.

    Attributes:
        mode: "dense" attends everything; "sparse" the blocks that each layer's own queries select;
            "sparda" the blocks that the Forecast of the layer before selects; "infinigen" as
            "sparse" in the prompt, then the blocks that the layer before guesses.
        offload: "host" keeps the KV pool in host memory, "none" on the device; "auto" on the
            device in as many layers as `device_kv_bytes` allows, first ones first, and the other
            layers' in host memory (`sparda_jax.engine.placement`).
        host_kv_dtype: "model" keeps host KV as it is; "int8" and "float8_e4m3fn" in 8 bits, with
            one scale a block and KV head for the keys and one for the values.
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
        top_logprobs: likeliest tokens whose log-probabilities a request may ask for; part of the
            compiled step.
        max_length: prompt plus generated tokens; None: what the model declares. It also fixes
            the RoPE table.
        device_kv_bytes: limit for KV on the device; None: no limit.
        host_kv_bytes: limit for KV in host memory; None: no limit.
    """

    mode: Mode = "sparse"
    offload: Offload = "none"
    host_kv_dtype: HostKV = "model"
    fetch: Fetch = "program"
    prefetch: bool = True
    spare_slots: int = 0
    prefill_chunk: int = 512
    length_step: int = 1
    steps_per_call: int = 8
    top_logprobs: int = 0
    max_length: int | None = None
    device_kv_bytes: int | None = None
    host_kv_bytes: int | None = None

    def __post_init__(self) -> None:
        require_choice("mode", self.mode, Mode)
        require_choice("offload", self.offload, Offload)
        require_choice("host_kv_dtype", self.host_kv_dtype, HostKV)
        require_choice("fetch", self.fetch, Fetch)
        require_at_least("spare_slots", self.spare_slots, 0)
        require_at_least("prefill_chunk", self.prefill_chunk, 1)
        require_at_least("length_step", self.length_step, 1)
        require_at_least("steps_per_call", self.steps_per_call, 1)
        require_at_least("top_logprobs", self.top_logprobs, 0)
        for name in ("max_length", "device_kv_bytes", "host_kv_bytes"):
            value = getattr(self, name)
            if value is not None:
                require_at_least(name, value, 1)
        require(
            self.offload != "auto" or self.device_kv_bytes is not None,
            "offload 'auto' needs device_kv_bytes: what KV may take on the device",
        )
