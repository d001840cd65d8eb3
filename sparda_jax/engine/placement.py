"""Where each layer's KV lies, and the cost model that the choice is printed with.

A step reads weights, attended blocks and scored keys from the device's memory, and fetches misses
over the host link. Selection inside the layer puts the two one after the other; selection a layer
ahead puts them side by side, but for the first layer, which nothing runs in front of:

    sparse:  compute + fetch
    ahead:   max(compute, fetch of later layers) + fetch of layer 0

A layer whose KV stays on the device fetches nothing and costs the same compute, so the first
layers stay as long as the budget lasts, layer 0 before all others; when all fit, nothing is
offloaded. The step never gets longer with a layer more that stays.
"""

from __future__ import annotations

import dataclasses

from host_offload.memory import format_bytes
from sparda_jax.config import EngineConfig, ModelConfig, SparseConfig


@dataclasses.dataclass(frozen=True)
class Rates:
    """What the machine moves, bytes a second.

    Attributes:
      device: of device memory.
      host: of the link to host memory.
    """

    device: float
    host: float


# One H200 on PCIe 5 x16: a large copy on the device, and the fetch kernel (docs/decode_kernels.md).
H200 = Rates(4.1e12, 50e9)


def resident_layers(
    config: EngineConfig, layers: int, resident_bytes: int, offloaded_bytes: int
) -> int:
    """How many of the first layers keep their KV on the device.

    Args:
      config: where KV may lie, and the device budget.
      layers: L.
      resident_bytes: what a layer keeps on the device when its KV stays there.
      offloaded_bytes: what it keeps there otherwise.
    """
    if config.offload != "auto":
        return layers if config.offload == "none" else 0
    assert config.device_kv_bytes is not None
    saved = resident_bytes - offloaded_bytes
    if layers * resident_bytes <= config.device_kv_bytes or saved <= 0:
        return layers
    return max(0, (config.device_kv_bytes - layers * offloaded_bytes) // saved)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Predicted milliseconds of a decode step.

    Attributes:
      compute: reading device memory.
      fetch: misses over the host link.
      step: both together.
    """

    compute: float
    fetch: float
    step: float


def estimate(
    model: ModelConfig,
    sparse: SparseConfig,
    config: EngineConfig,
    *,
    batch: int,
    context: int,
    resident: int,
    weight_bytes: int,
    itemsize: int,
    hit_rate: float,
    rates: Rates = H200,
) -> Estimate:
    """The cost model of one decode step in a mode other than dense.

    Args:
      model: shape of the model.
      sparse: selection rules.
      config: how batches are run.
      batch: B.
      context: tokens of a sequence.
      resident: layers whose KV is on the device.
      weight_bytes: all weights.
      itemsize: bytes of a number of the KV.
      hit_rate: share of the free blocks that are in slots.
      rates: of the machine.
    """
    pairs, row = batch * model.num_kv_heads, model.head_dim * itemsize
    blocks = min(sparse.budget_blocks, int(sparse.geometry.num_blocks(context)))
    attended = 2 * blocks * sparse.geometry.block_size * row
    scored = int(sparse.geometry.num_compressed(context)) * row
    compute = weight_bytes + model.num_layers * pairs * (attended + scored)
    stored = itemsize if config.host_kv_dtype == "model" else 1
    missed = max(blocks - sparse.forced_blocks, 0) * (1 - hit_rate)
    layer = pairs * missed * 2 * sparse.geometry.block_size * model.head_dim * stored
    fetch = (model.num_layers - resident) * layer
    times = [1e3 * compute / rates.device, 1e3 * fetch / rates.host, 1e3 * layer / rates.host]
    if config.mode == "sparse" or not config.prefetch:
        return Estimate(times[0], times[1], times[0] + times[1])
    first = times[2] if resident == 0 else 0.0
    return Estimate(times[0], times[1], max(times[0], times[1] - first) + first)


def describe(
    config: EngineConfig, layers: int, resident: int, device_bytes: int, predicted: Estimate
) -> str:
    """One line: what stays where, and what a step should take."""
    limit = "no limit"
    if config.device_kv_bytes is not None:
        limit = f"limit {format_bytes(config.device_kv_bytes)}"
    return (
        f"KV of {resident} of {layers} layers stays on the device ({format_bytes(device_bytes)}, "
        f"{limit}); predicted step {predicted.step:.2f} ms: compute {predicted.compute:.2f}, "
        f"fetch {predicted.fetch:.2f}"
    )
