"""The ways to decode that are compared, and the largest batch each can hold."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from host_offload import memory
from sparda_jax.config import EngineConfig, ModelConfig, SparseConfig
from sparda_jax.engine.capacity import largest
from sparda_jax.engine.plan import BatchPlan, plan_sizes
from sparda_jax.evaluation.decode_traces import Workload

# (name, engine settings)
MODES: dict[str, dict[str, Any]] = {
    "dense_resident": {"mode": "sparse", "offload": "none"},
    "sparse_resident": {"mode": "sparse", "offload": "none"},
    "sparse_offload": {"mode": "sparse", "offload": "host"},
    "infinigen": {"mode": "infinigen", "offload": "host"},
    "sparda_no_prefetch": {"mode": "sparda", "offload": "host", "prefetch": False},
    "sparda": {"mode": "sparda", "offload": "host"},
    "sparda_placed": {"mode": "sparda", "offload": "auto"},
    "sparda_int8": {"mode": "sparda", "offload": "host", "host_kv_dtype": "int8"},
    "sparda_fp8": {"mode": "sparda", "offload": "host", "host_kv_dtype": "float8_e4m3fn"},
}

# No benchmark asks for a larger batch.
MOST_SEQUENCES = 256


def engine_config(workload: Workload, mode: str, device_kv_bytes: int | None) -> EngineConfig:
    """Settings of a mode.

    Args:
      workload: what is decoded.
      mode: a name in `MODES`.
      device_kv_bytes: for a mode that places layers.
    """
    settings = MODES[mode]
    return EngineConfig(
        steps_per_call=workload.steps_per_call,
        max_length=workload.context + workload.steps,
        device_kv_bytes=device_kv_bytes if settings["offload"] == "auto" else None,
        **settings,
    )


def sparse_config(sparse: SparseConfig, workload: Workload, mode: str) -> SparseConfig:
    """Selection rules of a mode: dense decode attends every block with the same kernel."""
    if mode == "dense_resident":
        return sparse.with_all_blocks(workload.context + workload.steps)
    return sparse


def plan_of(
    model: ModelConfig, sparse: SparseConfig, config: EngineConfig, workload: Workload
) -> BatchPlan:
    """Sizes of the batch, which is not checked against the machine's memory.

    Args:
      model: shape of the model.
      sparse: selection rules.
      config: of the engine.
      workload: what is decoded.
    """
    return plan_sizes(
        model,
        sparse,
        config,
        batch=workload.batch,
        padded_length=workload.context,
        num_blocks=int(sparse.geometry.num_blocks(workload.context + workload.steps)),
        dtype=jnp.dtype(jnp.bfloat16),
        partial_channels=model.head_dim // 4 if config.mode == "infinigen" else 0,
    )


def largest_batch(
    model: ModelConfig,
    sparse: SparseConfig,
    workload: Workload,
    mode: str,
    device_kv_bytes: int,
    host_kv_bytes: int,
) -> int:
    """Most sequences whose KV fits.

    Args:
      model: shape of the model.
      sparse: selection rules.
      workload: what is decoded, by any batch.
      mode: a name in `MODES`.
      device_kv_bytes: limit on the device.
      host_kv_bytes: limit on the host.

    Raises:
      ValueError: not even one fits.
    """
    rules = sparse_config(sparse, workload, mode)
    config = engine_config(workload, mode, max(device_kv_bytes, 1))

    def check(batch: int) -> None:
        plan = plan_of(model, rules, config, dataclasses.replace(workload, batch=batch))
        what = f"the KV of {batch} sequences"
        memory.check_budget(what, plan.device_kv_bytes, device_kv_bytes, "the device's limit")
        memory.check_budget(what, plan.host_kv_bytes, host_kv_bytes, "the host's limit")

    fitting = largest(check, MOST_SEQUENCES)
    if not fitting:
        raise ValueError(
            f"{mode}: no sequence of {workload.context} tokens fits in "
            f"{memory.format_bytes(device_kv_bytes)} of device memory"
        )
    return fitting
