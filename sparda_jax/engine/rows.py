"""The rows of one fixed-shape decode program as places for requests that come and go."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from host_offload import memory
from sparda_jax.config import EngineConfig, ModelConfig, SamplingParams, SparseConfig
from sparda_jax.engine import prefill
from sparda_jax.engine.batch import Batch, Gain
from sparda_jax.engine.plan import BatchPlan, plan_sizes
from sparda_jax.engine.report import Report
from sparda_jax.engine.state import (
    DecodeState,
    DenseCache,
    LayerCache,
    SamplingState,
    SparseCache,
    sampling_fields,
)
from sparda_jax.engine.units import LayerKV, LayerRow, Prompt, capacities, run_prompt

if TYPE_CHECKING:
    from sparda_jax.engine.generate import Engine


def empty_layer(
    *,
    model: ModelConfig,
    sparse: SparseConfig,
    dense: bool,
    plan: BatchPlan,
    partial: int,
    dtype: jnp.dtype,
) -> LayerCache:
    """One layer's cache of rows that hold nothing.

    Args:
      model: shape of the model.
      sparse: selection rules.
      dense: for dense attention.
      plan: sizes of the batch.
      partial: channels of InfiniGen's keys in this layer; 0: none.
      dtype: of the KV.
    """
    heads, width, size = model.num_kv_heads, model.head_dim, sparse.geometry.block_size
    length = plan.num_blocks * size
    if dense:
        shape = (plan.batch, length, heads, width)
        return DenseCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
    lead = (plan.batch, heads)
    block = (2, size, width)
    blocks, slot_blocks, last_used, misses = prefill.empty_slots(
        shape=(*lead, plan.slots or plan.num_blocks, *block), dtype=dtype, selected=plan.selected
    )
    return SparseCache(
        blocks=blocks,
        slot_blocks=slot_blocks if plan.slots else None,
        last_used=last_used if plan.slots else None,
        misses=misses if plan.slots else None,
        tail=jnp.zeros((*lead, 2, *block), dtype),
        window=jnp.zeros((*lead, sparse.geometry.kernel_size, width), dtype),
        compressed=jnp.zeros((*lead, sparse.geometry.num_compressed(length), width), dtype),
        partial=jnp.zeros((*lead, length, partial), dtype) if partial else None,
    )


def _put(rows: Array, one: Array, row: Array) -> Array:
    """`one[0]` in place of the first elements of `rows[row]`."""
    return jax.lax.dynamic_update_slice(rows, one, (row, *(0,) * (rows.ndim - 1)))


def _insert_layer(cache: LayerCache, new: LayerRow, row: Array) -> LayerCache:
    if isinstance(cache, DenseCache):
        assert isinstance(new, DenseCache)
        return DenseCache(_put(cache.k, new.k, row), _put(cache.v, new.v, row))
    assert not isinstance(new, DenseCache)
    names = ["tail", "window", "compressed"]
    names += ["blocks"] if new.blocks is not None else []
    names += ["partial"] if new.partial is not None else []
    fields: dict[str, Any] = {
        name: _put(getattr(cache, name), getattr(new, name), row) for name in names
    }
    if cache.slot_blocks is not None:
        # Whatever the row's slots hold is the last request's.
        none = jnp.full((1, *cache.slot_blocks.shape[1:]), -1, jnp.int32)
        assert cache.last_used is not None
        fields["slot_blocks"] = _put(cache.slot_blocks, none, row)
        fields["last_used"] = _put(cache.last_used, none, row)
    return dataclasses.replace(cache, **fields)


def insert_row(
    state: DecodeState, one: DecodeState, layers: tuple[LayerRow, ...], row: Int[Array, ""]
) -> DecodeState:
    """The state with a prefilled request in one row; the other rows stay as they are.

    Args:
      state: of all rows; donate it.
      one: of batch 1, without caches.
      layers: its caches, no longer than those of the state.
      row: where it goes.
    """
    put = functools.partial(_put, row=row)
    rest = jax.tree.map(put, dataclasses.replace(state, layers=()), one)
    caches = (
        _insert_layer(cache, new, row) for cache, new in zip(state.layers, layers, strict=True)
    )
    return dataclasses.replace(rest, layers=tuple(caches))


def read_blocks(
    blocks: Float[Array, "B K M 2 P H"], row: Int[Array, ""], *, count: int
) -> Float[Array, "1 K Q 2 P H"]:
    """The first blocks of one row."""
    size = (1, blocks.shape[1], count, *blocks.shape[3:])
    return jax.lax.dynamic_slice(blocks, (row, 0, 0, 0, 0, 0), size)


def read_tokens(cache: DenseCache, row: Int[Array, ""], *, count: int) -> DenseCache:
    """The first keys and values of one row, for dense attention."""
    size = (1, count, *cache.k.shape[2:])
    read = functools.partial(jax.lax.dynamic_slice, start_indices=(row, 0, 0, 0), slice_sizes=size)
    return DenseCache(read(cache.k), read(cache.v))


class Rows(Batch):
    """B rows of one decode state, and of the host pool, in which requests are run.

    A request is prefilled alone, in units between which the others decode, and then takes a row.
    A row that has none computes along idle. Which row is free is the caller's business.

    Attributes:
      max_length: tokens that a prompt and its answer may have together.
      chunk: tokens of a prefill chunk, whole blocks.

    Raises:
      ValueError: rows that do not fit in memory; says how many would.
    """

    def __init__(self, engine: Engine, batch: int, max_length: int, *, stop_width: int = 8):
        size = engine.sparse.geometry.block_size
        self._engine, self._stop_width = engine, stop_width
        self.max_length = max_length
        self.chunk = -(-min(engine.config.prefill_chunk, max_length) // size) * size
        self._capacities = capacities(self.chunk, max_length)
        plan = self._plan(batch)
        check_rows(plan, self._plan(1), engine.config, engine.device)
        state, pool = self._empty_state(plan), None
        if plan.slots:
            pool = engine.host_pool(plan)
            for index in range(plan.resident_layers, len(engine.layers)):
                pool.store_layer(index, self._empty_blocks(plan))
        scales = 0 if pool is None else pool.scale_bytes
        report = Report(
            device_kv_bytes=memory.tree_bytes(state.layers) + scales,
            host_kv_bytes=0 if pool is None else pool.nbytes,
            full_kv_bytes=plan.full_kv_bytes,
            run_bytes=engine.run_bytes,
        )
        super().__init__(engine, plan, state, pool, report)

    def _plan(self, batch: int) -> BatchPlan:
        engine, length = self._engine, self._capacities[-1]
        return plan_sizes(
            engine.model.config,
            engine.sparse,
            engine.config,
            batch=batch,
            padded_length=length,
            num_blocks=length // engine.sparse.geometry.block_size,
            dtype=engine.model.dtype,
            partial_channels=engine.partial_channels,
        )

    def _empty_state(self, plan: BatchPlan) -> DecodeState:
        engine, batch = self._engine, plan.batch
        nobody = [SamplingParams(max_new_tokens=1)] * batch
        fields = {
            "lengths": np.zeros(batch, np.int32),
            "last_token": np.zeros(batch, np.int32),
            "active": np.zeros(batch, bool),
            "failed": np.zeros(batch, bool),
            "remaining": np.zeros(batch, np.int32),
        }
        layers, resident = [], dataclasses.replace(plan, slots=0)
        for index in range(len(engine.layers)):
            make = engine.programs.plain(
                empty_layer,
                model=engine.model.config,
                sparse=engine.sparse,
                dense=engine.config.mode == "dense",
                plan=plan if index >= plan.resident_layers else resident,
                partial=engine.partial_channels if index else 0,
                dtype=engine.model.dtype,
            )
            layers.append(make())
        sampling = SamplingState(**engine.put(sampling_fields(nobody, width=self._stop_width)))
        return DecodeState(sampling=sampling, layers=tuple(layers), **engine.put(fields))

    def _empty_blocks(self, plan: BatchPlan) -> jax.Array:
        engine = self._engine
        config, size = engine.model.config, engine.sparse.geometry.block_size
        shape = (plan.batch, config.num_kv_heads, plan.num_blocks, 2, size, config.head_dim)
        make = engine.programs.plain(jnp.zeros, shape=shape, dtype=engine.model.dtype)
        blocks: jax.Array = make()
        return blocks

    def capacity(self, length: int) -> int:
        """Tokens of the bucket that a prompt of `length` tokens is prefilled in."""
        return next(size for size in self._capacities if size >= length)

    def prefill(
        self,
        row: int,
        tokens: Sequence[int],
        request: SamplingParams,
        *,
        known: int = 0,
        source: int | None = None,
    ) -> Generator[jax.Array, None, Gain]:
        """Runs a prompt and puts the request into a row, which decodes from then on.

        Args:
          row: idle; its blocks are overwritten from the first unit on.
          tokens: the prompt.
          request: how to sample.
          known: leading tokens of the prompt whose KV `source` holds, whole chunks.
          source: a row, this one or another; None: `known` is 0.

        Yields:
          After each unit of work an array to wait for.

        Returns:
          The first token, or none if its logits were not finite.
        """
        engine = self._engine
        capacity = self.capacity(len(tokens))
        at = engine.put(np.int32(row))
        past = None
        if source is not None:
            past = functools.partial(self._read, engine.put(np.int32(source)), capacity)
        prompt = Prompt(tokens, known, past, capacity, functools.partial(self._store, at))
        x, lengths, layers = yield from run_prompt(engine, prompt, self.chunk)
        fields = {
            "last_token": np.zeros(1, np.int32),
            "active": np.ones(1, bool),
            "failed": np.zeros(1, bool),
            "remaining": np.array([request.max_new_tokens], np.int32),
        }
        fields = engine.put(fields)
        sampling = SamplingState(**engine.put(sampling_fields([request], width=self._stop_width)))
        one = DecodeState(lengths=lengths, sampling=sampling, layers=(), **fields)
        first = engine.programs.on_model(
            prefill.first_token, top_logprobs=engine.config.top_logprobs
        )
        one, *drawn = first(engine.parameters.arrays, x, one)
        insert = engine.programs.plain(insert_row, donate=(0,))
        self.state = insert(self.state, one, layers, at)
        drawn, active, failed = jax.device_get((drawn, one.active, one.failed))
        self.alternatives[row] = request.logprobs
        self.lengths[row] = len(tokens)
        self.active[row], self.failed[row] = active[0], failed[0]
        self.report.prefill_tokens += len(tokens) - known
        # As the outputs of a call of one step.
        return self.gain(row, *jax.tree.map(lambda leaf: leaf[None], drawn), column=0)

    def _read(self, row: jax.Array, capacity: int, index: int) -> LayerKV:
        """KV of a layer of a row, from wherever it is."""
        cache, plain = self.state.layers[index], self._engine.programs.plain
        count = capacity // self._engine.sparse.geometry.block_size
        kv: LayerKV
        if isinstance(cache, DenseCache):
            kv = plain(read_tokens, count=capacity)(cache, row)
        elif cache.slot_blocks is None:
            kv = plain(read_blocks, count=count)(cache.blocks, row)
        else:
            assert self.pool is not None
            kv = self.pool.read_row(index, row, count)
        return kv

    def _store(self, row: jax.Array, index: int, kv: jax.Array) -> bool:
        """Writes a prompt's blocks of a layer to the host pool, if that layer is there."""
        cache = self.state.layers[index]
        if self.pool is None or not isinstance(cache, SparseCache) or cache.slot_blocks is None:
            return False
        self.pool.write_row(index, kv, row, self._engine.put(np.int32(0)))
        return True


def check_rows(plan: BatchPlan, one: BatchPlan, config: EngineConfig, device: jax.Device) -> None:
    """Raises if the rows do not fit; says how many would.

    Args:
      plan: of all rows.
      one: of one row; its prefill is that of any, since prompts run one at a time.
      config: limits.
      device: where.

    Raises:
      ValueError: naming what is needed, what there is and what would fit.
    """
    # Resident, a prompt's KV exists twice while it goes into its row.
    prompt = one.prefill_bytes + (0 if plan.slots else one.full_kv_bytes)
    what = f"{plan.batch} rows of {plan.num_blocks} blocks"
    checks = [
        (memory.check_device_budget, "device", one.device_kv_bytes, 0, config.device_kv_bytes),
        (memory.check_device_budget, "device, with prefill,", one.device_kv_bytes, prompt, None),
    ]
    if plan.host_kv_bytes:
        checks.append(
            (memory.check_host_budget, "host", one.host_kv_bytes, 0, config.host_kv_bytes)
        )
    for check, place, each, besides, limit in checks:
        try:
            check(f"the KV of {what} on the {place}", plan.batch * each + besides, limit, device)
        except ValueError as error:
            fit = 0
            for count in range(plan.batch - 1, 0, -1):
                try:
                    check("", count * each + besides, limit, device)
                except ValueError:
                    continue
                fit = count
                break
            raise ValueError(f"{error}; {fit} such rows would fit") from None
