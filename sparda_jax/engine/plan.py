"""Shapes and bytes of a batch, known and checked before any work begins."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from host_offload import memory
from sparda_jax.config import EngineConfig, ModelConfig, SamplingParams, SparseConfig
from sparda_jax.engine import placement
from sparda_jax.sparse.forecast import check_lookahead
from sparda_jax.sparse.infllm_v2 import selection_width


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """Static sizes of one batch.

    Attributes:
      batch: B.
      layers: L.
      padded_length: prompt tokens after padding to whole prefill chunks.
      num_blocks: M, KV blocks a sequence can hold; covers prompt and generated tokens.
      selected: blocks that a KV head attends at most, besides the tail block; 0 when dense.
      slots: Z, device slots a KV head has in the other layers; 0 when there are none.
      resident_layers: the first so many layers keep all their KV on the device.
      full_kv_bytes: KV of all M blocks, in every layer: what dense attention keeps on the device.
      device_kv_bytes: what this mode keeps on the device between steps.
      host_kv_bytes: what it keeps in pinned host memory.
      prefill_bytes: most device memory prefill needs besides (one layer's KV twice, since one is
        copied to the host while the next is filled, and the hidden states of all tokens).
    """

    batch: int
    layers: int
    padded_length: int
    num_blocks: int
    selected: int
    slots: int
    resident_layers: int
    full_kv_bytes: int
    device_kv_bytes: int
    host_kv_bytes: int
    prefill_bytes: int


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def check_settings(config: EngineConfig, sparse: SparseConfig) -> None:
    """Refuses settings that contradict the selection rules; needs no model.

    Raises:
      NotImplementedError: dense attention over offloaded KV.
      ValueError: more steps a call than a block has tokens, when offloaded; rules under which mode
        "sparda" would miss blocks.
    """
    if config.mode == "dense" and config.offload != "none":
        raise NotImplementedError(
            f"mode 'dense' with offload {config.offload!r}: every step would read all KV from the "
            "host; use mode 'sparse'"
        )
    size = sparse.geometry.block_size
    if config.offload != "none" and config.steps_per_call > size:
        raise ValueError(
            f"steps_per_call {config.steps_per_call} exceeds the block size {size}: "
            "a filled block is written to the host between calls"
        )
    if config.mode == "sparda":
        check_lookahead(sparse)
    if config.mode == "infinigen" and sparse.query_blocks is not None:
        raise NotImplementedError(
            f"mode 'infinigen' with query_blocks {sparse.query_blocks}: only None is supported"
        )


def plan_batch(
    model: ModelConfig,
    sparse: SparseConfig,
    config: EngineConfig,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
    dtype: jnp.dtype,
    *,
    partial_channels: int = 0,
) -> BatchPlan:
    """Checks a batch against the model's limits and works out its sizes.

    Args:
      model: shape of the model.
      sparse: selection rules.
      config: how batches are run.
      prompts: token ids of each request.
      sampling: settings of each request.
      dtype: of weights and KV.
      partial_channels: InfiniGen's E, in every layer but the first; 0 in other modes.

    Raises:
      ValueError: no prompt, an empty prompt, a token outside the vocabulary, or a length beyond
        the model's or the engine's limit.
    """
    if not prompts:
        raise ValueError("no prompt: the batch is empty")
    limit = config.max_length or model.max_position_embeddings
    needed = 0
    for row, (prompt, request) in enumerate(zip(prompts, sampling, strict=True)):
        check_request(f"prompt {row}", prompt, request, model, limit)
        needed = max(needed, len(prompt) + request.max_new_tokens)
    longest = _round_up(max(len(prompt) for prompt in prompts), config.length_step)
    chunk = min(config.prefill_chunk, longest)
    padded = _round_up(longest, chunk)
    capacity = max(_round_up(needed, config.length_step), padded)
    return plan_sizes(
        model,
        sparse,
        config,
        batch=len(prompts),
        padded_length=padded,
        num_blocks=int(sparse.geometry.num_blocks(capacity)),
        dtype=dtype,
        partial_channels=partial_channels,
    )


def check_prompt(name: str, prompt: Sequence[int], model: ModelConfig) -> None:
    """Raises ValueError for an empty prompt or a token outside the vocabulary, by its name."""
    if len(prompt) == 0:
        raise ValueError(f"{name} is empty: at least one token is needed")
    bad = next((token for token in prompt if not 0 <= token < model.vocab_size), None)
    if bad is not None:
        raise ValueError(f"{name} holds token {bad}, outside the vocabulary of {model.vocab_size}")


def check_request(
    name: str, prompt: Sequence[int], request: SamplingParams, model: ModelConfig, limit: int
) -> None:
    """Checks one request against the model's limits.

    Args:
      name: of the prompt, for the message.
      prompt: token ids.
      request: its settings.
      model: shape of the model.
      limit: tokens that prompt and answer may have together.

    Raises:
      ValueError: an empty prompt, a token outside the vocabulary, or a length beyond the limit.
    """
    check_prompt(name, prompt, model)
    total = len(prompt) + request.max_new_tokens
    if total > limit:
        raise ValueError(
            f"{name} has {len(prompt)} tokens and asks for {request.max_new_tokens} "
            f"more: {total} exceed the limit of {limit} tokens"
        )


def plan_sizes(
    model: ModelConfig,
    sparse: SparseConfig,
    config: EngineConfig,
    *,
    batch: int,
    padded_length: int,
    num_blocks: int,
    dtype: jnp.dtype,
    partial_channels: int = 0,
) -> BatchPlan:
    """Works out the sizes of a batch.

    Args:
      model: shape of the model.
      sparse: selection rules.
      config: how batches are run.
      batch: B.
      padded_length: prompt tokens after padding.
      num_blocks: M, KV blocks a sequence can hold.
      dtype: of weights and KV.
      partial_channels: see `plan_batch`.
    """
    geometry = sparse.geometry
    size = jnp.dtype(dtype).itemsize
    heads, layers = model.num_kv_heads, model.num_layers
    token = heads * model.head_dim * size  # one key or value row of all KV heads
    block = 2 * geometry.block_size * token
    full = layers * batch * num_blocks * block
    selected, slots, host, resident = 0, 0, 0, layers
    if config.mode == "dense":
        device = full
    else:
        common = (
            2 * block
            + geometry.kernel_size * token
            + geometry.num_compressed(num_blocks * geometry.block_size) * token
        )
        if model.kv_importance:
            common += num_blocks * geometry.block_size * heads * 4  # float32
        # The tail block is selected and attended too, but lies in the tail ring.
        width = selection_width(sparse, num_blocks)
        selected = max(min(width, num_blocks) - 1, 1)
        slots = max(min(width + config.spare_slots, num_blocks) - 1, 1)
        stored, scales = (size, 0) if config.host_kv_dtype == "model" else (1, 2 * num_blocks)
        # Slots, their block ids and times of use, the list of misses, scales of the host's blocks.
        offloaded = slots * (block + 8 * heads) + 4 * heads * (2 * selected + scales)
        offloaded = batch * (common + offloaded) + 4
        kept = batch * (common + num_blocks * block)
        resident = placement.resident_layers(config, layers, kept, offloaded)
        device = resident * kept + (layers - resident) * offloaded
        host = (layers - resident) * batch * num_blocks * block // size * stored
        slots = 0 if resident == layers else slots
        partial = num_blocks * geometry.block_size * heads * partial_channels * size
        device += (layers - 1) * batch * partial
    layer = full // layers
    hidden = batch * padded_length * model.hidden_size * size
    if config.mode == "sparda":
        hidden += batch * padded_length * token  # Forecast queries of all tokens
    return BatchPlan(
        batch=batch,
        layers=layers,
        padded_length=padded_length,
        num_blocks=num_blocks,
        selected=selected,
        slots=slots,
        resident_layers=resident,
        full_kv_bytes=full,
        device_kv_bytes=device,
        host_kv_bytes=host,
        prefill_bytes=2 * layer + 2 * hidden,
    )


def check_memory(plan: BatchPlan, config: EngineConfig, device: jax.Device) -> None:
    """Raises if the batch does not fit.

    Raises:
      ValueError: naming what is needed and what there is.
    """
    what = f"the KV of {plan.batch} x {plan.num_blocks} blocks"
    memory.check_device_budget(
        f"{what} on the device", plan.device_kv_bytes, config.device_kv_bytes, device
    )
    memory.check_device_budget(
        f"{what} and prefill on the device", plan.device_kv_bytes + plan.prefill_bytes, None, device
    )
    if plan.host_kv_bytes:
        memory.check_host_budget(
            f"{what} on the host", plan.host_kv_bytes, config.host_kv_bytes, device
        )


def pad_prompts(prompts: Sequence[Sequence[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids padded at the end to ``[B, length]`` and the true lengths, as numpy int32."""
    tokens = np.zeros((len(prompts), length), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    return tokens, np.array([len(prompt) for prompt in prompts], np.int32)
