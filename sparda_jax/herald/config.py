"""Settings of a HERALD engine: modes, budget, where things lie; checked when built."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from host_offload.cpu_selection import SelectionRule
from host_offload.native_rows import Implementation
from sparda_jax.config import ModelConfig
from sparda_jax.diffusion.config import diffusion_of
from sparda_jax.validation import require, require_at_least, require_choice

Mode = Literal["dense", "mage", "mage_offload", "infinigen", "herald_serial", "herald"]
Queries = Literal["centre", "all"]
When = Literal["never", "block", "step", "ahead"]


@dataclasses.dataclass(frozen=True)
class Policy:
    """What a mode is made of.

    Attributes:
        when: rows are chosen never (all are attended); in a block's first forward, by its own
            queries; in every forward, by the layer before; or a block ahead, by the draft.
        queries: the centre [MASK] alone, or all of a block.
        offload: the KV lies in host memory and the CPU chooses; else all on the device.
    """

    when: When
    queries: Queries
    offload: bool


MODES: dict[str, Policy] = {
    "dense": Policy("never", "all", offload=False),
    "mage": Policy("block", "all", offload=False),
    "mage_offload": Policy("block", "all", offload=True),
    "infinigen": Policy("step", "all", offload=True),
    "herald_serial": Policy("block", "centre", offload=True),
    "herald": Policy("ahead", "centre", offload=True),
}


@dataclasses.dataclass(frozen=True)
class Budget:
    """How many scanned rows a KV head gets in one layer; init rows and previous block on top.

    Attributes:
        share: of the scanned rows, rounded up.
        rows: so many instead, where not None.
    """

    share: float = 0.05
    rows: int | None = None

    def __post_init__(self) -> None:
        require(0 < self.share <= 1, f"budget share must be in (0, 1], got {self.share}")
        if self.rows is not None:
            require_at_least("budget rows", self.rows, 1)

    def count(self, scanned: int, run: int = 1) -> int:
        """k of a number of scanned rows, in whole runs.

        Args:
            scanned: rows, a multiple of `run`.
            run: rows chosen together.
        """
        wanted = math.ceil(self.share * scanned - 1e-9) if self.rows is None else self.rows
        return min(-(-wanted // run) * run, scanned)


@dataclasses.dataclass(frozen=True)
class HeraldConfig:
    """How a batch is run.

    Attributes:
        mode: who chooses the rows of the prefix, when, and where the KV lies; see `MODES`.
        budget: rows a KV head gets.
        rule: how they are chosen.
        queries: which queries choose, in place of the mode's.
        init_rows: leading rows that are always attended, kept on the device.
        num_dense_layers: leading layers that attend the whole prefix; their KV stays on the device.
        quantised_keys: scan int8 keys, and a short list again in full precision.
        batch: requests at a time; None: all that are given.
        kv_block: P, tokens of a KV block and rows of a slot, a multiple of the diffusion block.
        prefill_chunk: prompt tokens per prefill call.
        workers: threads that scan and gather.
        selection: rows are chosen by compiled code ("native") or by numpy and XLA ("portable");
            "auto": the former where it can be.
        patience: seconds to wait for a selection before its requests are given up.
        max_length: prompt plus generated tokens; None: what the model declares.
        device_kv_bytes: limit for KV and pools on the device; None: no limit.
        host_kv_bytes: limit for the host's; None: no limit.
    """

    mode: Mode = "herald"
    budget: Budget = dataclasses.field(default_factory=Budget)
    rule: SelectionRule = dataclasses.field(default_factory=SelectionRule)
    queries: Queries | None = None
    init_rows: int = 16
    num_dense_layers: int = 0
    quantised_keys: bool = False
    batch: int | None = None
    kv_block: int = 64
    prefill_chunk: int = 512
    workers: int = 4
    selection: Implementation = "auto"
    patience: float = 60.0
    max_length: int | None = None
    device_kv_bytes: int | None = None
    host_kv_bytes: int | None = None

    def __post_init__(self) -> None:
        require_choice("mode", self.mode, Mode)
        require_choice("selection", self.selection, Implementation)
        if self.queries is not None:
            require_choice("queries", self.queries, Queries)
        for name in ("init_rows", "num_dense_layers"):
            require_at_least(name, getattr(self, name), 0)
        for name in ("kv_block", "prefill_chunk", "workers"):
            require_at_least(name, getattr(self, name), 1)
        if self.batch is not None:
            require_at_least("batch", self.batch, 1)
        require(self.patience > 0, f"patience must be positive, got {self.patience} s")
        require(
            self.init_rows % self.rule.run == 0,
            f"init_rows {self.init_rows} is not a multiple of runs of {self.rule.run} rows",
        )
        if self.quantised_keys and not self.policy.offload:
            raise ValueError(f"int8 keys are for the CPU's scan: mode {self.mode} has none")
        if self.quantised_keys and self.queries_used == "all":
            raise NotImplementedError("int8 keys with all queries of a block are not supported")

    @property
    def policy(self) -> Policy:
        """What the mode is made of."""
        return MODES[self.mode]

    @property
    def queries_used(self) -> Queries:
        """Which queries choose."""
        return self.queries or self.policy.queries

    def check(self, model: ModelConfig) -> None:
        """Compares the settings with a model.

        Raises:
            ValueError: no block diffusion, or more dense layers than layers.
            NotImplementedError: block sizes that do not fit together.
        """
        facts, _ = diffusion_of(model)
        if self.kv_block % facts.block_size:
            raise NotImplementedError(
                f"diffusion blocks of {facts.block_size} do not divide KV blocks of {self.kv_block}"
            )
        if facts.block_size % self.rule.run:
            raise NotImplementedError(
                f"runs of {self.rule.run} rows do not divide diffusion blocks of {facts.block_size}"
            )
        require(
            self.num_dense_layers <= model.num_layers,
            f"num_dense_layers {self.num_dense_layers} exceeds the {model.num_layers} layers",
        )
