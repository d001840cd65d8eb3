"""Rows chosen on the device, where the whole KV still lies: MAGE, and the first block of HERALD."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from host_offload.cpu_selection import SelectionRule, row_scores
from sparda_jax.diffusion.state import LayerKV
from sparda_jax.herald.layout import as_slots, by_row
from sparda_jax.herald.state import Pool
from sparda_jax.typing import Array, Float, Int


def select_on_device(
    cache: LayerKV,
    queries: Float[Array, "B K Q H"],
    first: Int[Array, " B"],
    end: Int[Array, " B"],
    count: Int[Array, " B"],
    *,
    rule: SelectionRule,
    slots: int,
) -> tuple[Pool, Int[Array, "B K X"]]:
    """The rows that the CPU would choose, chosen and gathered where the cache lies; and which.

    Ids ascend; those past the count are S.

    Args:
        cache: whole.
        queries: of each KV head.
        first: scanned from here.
        end: up to here.
        count: rows to choose, a multiple of the rule's run.
        rule: how.
        slots: Z.
    """
    batch, heads, _, _, size, width = cache.shape
    rows, run = by_row(cache), rule.run
    length = rows.shape[3]
    scores = row_scores(
        rows[:, :, 0], queries, first, end, scale=width**-0.5, aggregate=rule.aggregate
    )
    units = scores.reshape(batch, heads, length // run, run).sum(-1)
    best, ids = lax.top_k(units, min(slots * size, length) // run)
    if rule.coverage is not None:
        held = jnp.cumsum(jnp.where(best > 0, best, 0.0), axis=-1)
        whole = jnp.where(units > 0, units, 0.0).sum(-1, keepdims=True)
        needed = (held < rule.coverage * whole).sum(-1).max(-1) + 1
        count = jnp.minimum(needed.astype(jnp.int32) * run, count)
    taken = jnp.arange(best.shape[-1]) < (count // run)[:, None, None]
    ids = jnp.sort(jnp.where(taken, ids, length))
    ids = (ids[..., None] * run + jnp.arange(run)).reshape(batch, heads, -1)
    index = jnp.minimum(ids, length - 1)[:, :, None, :, None]
    chosen = jnp.take_along_axis(rows, index, axis=3)
    chosen = jnp.where((ids < length)[:, :, None, :, None], chosen, 0)
    missing = slots * size - chosen.shape[3]
    chosen = jnp.pad(chosen, ((0, 0), (0, 0), (0, 0), (0, missing), (0, 0)))
    return Pool(as_slots(chosen, size=size), count), ids


def near_rows(
    caches: tuple[LayerKV, ...], aligned: Int[Array, " B"], *, leading: int, width: int
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """The init rows and the block before `aligned` of every layer, from whole caches."""
    init, previous = [], []
    for cache in caches:
        rows = by_row(cache)
        missing = max(leading - rows.shape[3], 0)
        first = jnp.pad(rows[:, :, :, :leading], ((0, 0),) * 3 + ((0, missing), (0, 0)))
        place = jnp.maximum(aligned - width, 0)[:, None] + jnp.arange(width)
        init.append(first)
        previous.append(jnp.take_along_axis(rows, place[:, None, None, :, None], axis=3))
    return tuple(init), tuple(previous)
