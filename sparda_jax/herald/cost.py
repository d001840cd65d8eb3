"""What a block costs, from a model's shape and a machine's rates, and which mode that speaks for.

One turn gives B requests W tokens each. The device runs U denoising forwards and a commit; the host
scans the keys of every request once, gathers the chosen rows and sends them over PCIe. In `herald`
all of that runs side by side and the slowest of the three sets the pace; without lookahead it adds
up. Rates are those a machine reaches, not its data sheet's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from host_offload.memory import format_bytes
from sparda_jax.diffusion.config import diffusion_of
from sparda_jax.herald.config import HeraldConfig, Mode
from sparda_jax.model_config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a machine reaches, bytes (or operations) per second, and what it holds.

    Attributes:
        device_bytes: for weights, KV and pools.
        host_bytes: for committed KV.
        device_rate: device memory.
        operations: bfloat16 matrix products.
        scan_rate: keys scanned by the CPU, bytes of bfloat16.
        quantised_rate: bytes of int8 likewise.
        gather_rate: rows gathered by the CPU.
        copy_rate: host to device.
    """

    device_bytes: float
    host_bytes: float
    device_rate: float
    operations: float
    scan_rate: float
    quantised_rate: float
    gather_rate: float
    copy_rate: float


# Measured on the host of two H200s, one used (2026-11-30, jax 0.11.2). Scan (int8 keys: the choice
# and the second look included) and gather: compiled code, 16 threads on 18 of its 32 cores, before
# its inner loops took half the time (results/h200/herald.json). DMA 52 GB/s. Device memory and
# products: with these, dense forwards of SDAR-8B at 1K to 32K tokens come within 6 % of what was
# measured at batch 12 and 24; at batch 1 these took a fifth to a third longer (that file and
# block_diffusion.json).
H200 = Machine(
    device_bytes=139 * 2**30,
    host_bytes=220 * 2**30,
    device_rate=3.2e12,
    operations=500e12,
    scan_rate=38e9,
    quantised_rate=22e9,
    gather_rate=36e9,
    copy_rate=52e9,
)


# A scan with all queries of a block computes more than it reads: about eight times the time of one
# query for 32 (HERALD, as summarised; not measured here).
ALL_QUERIES = 8.0


@dataclasses.dataclass(frozen=True)
class Estimate:
    """One turn of a batch.

    Attributes:
        mode: of the engine.
        batch: B.
        device: seconds of the device's forwards.
        scan: seconds of scan and gather on the CPU.
        copy: seconds on PCIe.
        seconds: of the turn.
        tokens_per_second: of the batch.
        limit: what sets the pace: "GPU", "scan" or "PCIe"; "GPU" where all is resident.
    """

    mode: Mode
    batch: int
    device: float
    scan: float
    copy: float
    seconds: float
    tokens_per_second: float
    limit: str

    def line(self) -> str:
        """As text."""
        return (
            f"{self.mode:<14} batch {self.batch:4d}  GPU {1e3 * self.device:8.1f} ms  scan and "
            f"gather {1e3 * self.scan:8.1f} ms  PCIe {1e3 * self.copy:7.1f} ms a block  "
            f"{self.tokens_per_second:8.0f} tok/s, limited by {self.limit}"
        )


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is run.

    Attributes:
        model: its shape.
        config: budget, key type, dense layers.
        context: tokens before the block.
        steps: U.
        machine: its rates.
    """

    model: ModelConfig
    config: HeraldConfig
    context: int
    steps: int
    machine: Machine = H200

    @property
    def _row_bytes(self) -> int:
        """Keys and values of a token in one layer, bfloat16."""
        return 2 * self.model.num_kv_heads * self.model.head_dim * 2

    @property
    def _rows(self) -> int:
        """Chosen rows of a layer."""
        return self.config.budget.count(self.context)

    def _parameters(self, tokens: float) -> tuple[float, float]:
        """Of all layers: parameters that a forward of so many tokens reads, and uses per token."""
        model = self.model
        size, heads = model.hidden_size, model.num_heads * model.head_dim
        narrow = model.num_kv_heads * model.head_dim
        attention = model.num_layers * (2 * size * heads + 2 * size * narrow)
        head = model.vocab_size * size
        if model.moe is None:
            mlp = model.num_layers * 3 * size * model.intermediate_size
            return attention + mlp + head, attention + mlp + head
        moe = model.moe
        one = 3 * size * moe.intermediate_size
        shared = 3 * size * moe.shared_intermediate_size
        plain = moe.dense_layers * 3 * size * model.intermediate_size
        routed = model.num_layers - moe.dense_layers
        touched = moe.num_experts * (1 - (1 - moe.experts_per_token / moe.num_experts) ** tokens)
        fixed = attention + plain + routed * shared + head
        return fixed + routed * touched * one, fixed + routed * moe.experts_per_token * one

    def weight_bytes(self) -> float:
        """Of all parameters, bfloat16."""
        embedding = 0 if self.model.tie_word_embeddings else self.model.vocab_size
        return 2 * (self._parameters(float("inf"))[0] + embedding * self.model.hidden_size)

    def _forward(self, batch: int, rows: int, attended: float) -> float:
        """Seconds of one forward of `rows` rows a request over so many prefix rows a layer."""
        model, machine = self.model, self.machine
        read, used = self._parameters(batch * rows)
        products = max(2 * read / machine.device_rate, 2 * used * batch * rows / machine.operations)
        kv = model.num_layers * batch * attended
        work = 4 * model.num_heads * model.head_dim * rows * kv
        return products + max(kv * self._row_bytes / machine.device_rate, work / machine.operations)

    def estimate(self, mode: Mode, batch: int) -> Estimate:
        """One turn of a mode at a batch size."""
        config = dataclasses.replace(self.config, mode=mode, quantised_keys=False)
        policy, model, machine = config.policy, self.model, self.machine
        width = diffusion_of(model)[0].block_size
        share = config.num_dense_layers / model.num_layers
        near = self._rows + config.init_rows + width
        sparse = near if policy.when != "never" else self.context
        attended = share * self.context + (1 - share) * sparse
        forwards = self.steps + 1
        device = forwards * self._forward(batch, width, attended)
        if policy.when == "ahead":
            device += self._forward(batch, 3 * width, attended) - self._forward(
                batch, width, attended
            )
        if policy.when == "block" and not policy.offload:
            device += self._forward(batch, width, self.context) - self._forward(
                batch, width, attended
            )
        if not policy.offload:
            speed = batch * width / device
            return Estimate(mode, batch, device, 0.0, 0.0, device, speed, "GPU")
        layers = batch * (model.num_layers - config.num_dense_layers)
        times = forwards if policy.when == "step" else 1
        keys = layers * self.context * self._row_bytes / 2 / machine.scan_rate
        if self.config.quantised_keys:
            keys = layers * self.context * self._row_bytes / 4 / machine.quantised_rate
        if config.queries_used == "all":
            keys *= ALL_QUERIES
        moved = layers * self._rows * self._row_bytes
        scan = times * (keys + moved / machine.gather_rate)
        copy = times * moved / machine.copy_rate
        parts = {"GPU": device, "scan": scan, "PCIe": copy}
        seconds = max(parts.values()) if policy.when == "ahead" else sum(parts.values())
        limit = max(parts, key=lambda name: parts[name])
        return Estimate(mode, batch, device, scan, copy, seconds, batch * width / seconds, limit)

    def largest_batch(self, mode: Mode) -> int:
        """Requests that fit in the device's and the host's memory; 0 where not one does."""
        config = dataclasses.replace(self.config, mode=mode, quantised_keys=False, queries=None)
        model, machine, policy = self.model, self.machine, config.policy
        width = diffusion_of(model)[0].block_size
        length = self.context + width
        free = machine.device_bytes - self.weight_bytes()
        dense = model.num_layers if not policy.offload else config.num_dense_layers
        sparse = 0 if policy.when == "never" else model.num_layers - config.num_dense_layers
        each = dense * length + sparse * (2 * self._rows + config.init_rows + width)
        batch = free / (each * self._row_bytes)
        if policy.offload:
            own = sparse * length * self._row_bytes * (1.25 if self.config.quantised_keys else 1)
            batch = min(batch, machine.host_bytes / own)
        return max(int(batch), 0)

    def best(self, mode: Mode) -> Estimate | None:
        """The fastest batch that fits; None where not one request does."""
        sizes = range(1, self.largest_batch(mode) + 1)
        found = (self.estimate(mode, size) for size in sizes)
        return max(found, key=lambda estimate: estimate.tokens_per_second, default=None)


def choose_mode(
    workload: Workload, batch: int, modes: Sequence[Mode] = ("dense", "mage", "herald")
) -> tuple[Mode, list[str]]:
    """The mode for a batch, and the figures that speak for it, as text.

    Where several hold the batch, the fastest; a mode that leaves rows out must gain a tenth to be
    chosen before dense attention, and HERALD as much before a resident mode.

    Raises:
        ValueError: no mode holds the batch.
    """

    def fitting() -> Iterator[Estimate]:
        for mode in modes:
            if workload.largest_batch(mode) >= batch:
                yield workload.estimate(mode, batch)

    lines, chosen = [], None
    for estimate in fitting():
        lines.append(estimate.line())
        if chosen is None or estimate.tokens_per_second > 1.1 * chosen.tokens_per_second:
            chosen = estimate
    if chosen is None:
        each = workload.model.num_layers * workload.context * workload._row_bytes
        raise ValueError(
            f"{batch} requests of {workload.context} tokens ({format_bytes(each)} of KV each) "
            "fit in no mode: device and host memory are too small"
        )
    lines.append(f"mode {chosen.mode}: limited by {chosen.limit}")
    return chosen.mode, lines
