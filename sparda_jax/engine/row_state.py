"""A decode state without requests, and how one request's caches get into it and out again."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sparda_jax.config import ModelConfig, SparseConfig
from sparda_jax.engine import prefill
from sparda_jax.engine.plan import BatchPlan
from sparda_jax.engine.state import DecodeState, DenseCache, LayerCache, SparseCache
from sparda_jax.engine.units import LayerRow


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
