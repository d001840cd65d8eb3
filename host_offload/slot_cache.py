"""Which block lies in which device slot, and what a new selection has to fetch."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotPlan:
    """How a selection is served from the device slots.

    Attributes:
        slot_blocks: new map, block id in every slot, -1 for none.
        slot_ids: slot of every wanted block, -1 where nothing is wanted.
        miss: wanted blocks that must be fetched into their slot.
    """

    slot_blocks: Int32[Array, "B K Z"]
    slot_ids: Int32[Array, "B K R"]
    miss: Bool[Array, "B K R"]


def assign_slots(
    slot_blocks: Int32[Array, "B K Z"],
    wanted: Int32[Array, "B K R"],
    *,
    retention: Literal["none", "spare"] = "none",
    last_used: Int32[Array, "B K Z"] | None = None,
) -> SlotPlan:
    """Slots for the wanted blocks: hits stay where they are, misses fill the other slots.

    Misses take, in the order in which they are wanted, the slots that hold no wanted block:
    in ascending slot order (as SparDA does), or, with ``last_used``,
    empty slots first and then those used longest ago.

    Args:
        slot_blocks: block id in every slot, -1 for none; no id twice.
        wanted: block ids, distinct; -1 wants nothing.
        retention: what becomes of a slot that is neither hit nor filled: "none" empties it (the
            original's pool holds exactly one selection), "spare" keeps its block for later hits.
        last_used: step in which each slot was last wanted, for the choice of victims.

    Returns:
        The plan.

    Raises:
        ValueError: more wanted blocks than slots; unknown retention.
    """
    num_slots, num_wanted = slot_blocks.shape[2], wanted.shape[2]
    if num_wanted > num_slots:
        raise ValueError(f"{num_wanted} wanted blocks do not fit {num_slots} slots")
    if retention not in ("none", "spare"):
        raise ValueError(f"retention must be 'none' or 'spare', got {retention!r}")
    # All comparisons are [B, K, R, Z] or smaller: below 10,000 elements per KV head.
    hit = (wanted[..., :, None] == slot_blocks[..., None, :]) & (wanted >= 0)[..., None]
    free = ~hit.any(axis=2)
    miss = (wanted >= 0) & ~hit.any(axis=3)
    turn = _rank(miss, None)
    victim = _rank(free, None if last_used is None else _age(slot_blocks, last_used))
    fill = miss[..., :, None] & free[..., None, :] & (turn[..., :, None] == victim[..., None, :])
    slot = lax.broadcasted_iota(jnp.int32, fill.shape, 3)
    slot_ids = jnp.where(hit | fill, slot, -1).max(axis=3)
    filled = jnp.where(fill, wanted[..., :, None], -1).max(axis=2)
    kept = slot_blocks if retention == "spare" else jnp.where(free, -1, slot_blocks)
    return SlotPlan(slot_blocks=jnp.where(filled >= 0, filled, kept), slot_ids=slot_ids, miss=miss)


def _age(slot_blocks: Array, last_used: Array) -> Array:
    """Sort key of the victims: an empty slot is older than any used one."""
    return jnp.where(slot_blocks < 0, jnp.iinfo(jnp.int32).min, last_used)


def _rank(flags: Bool[Array, "B K A"], key: Int32[Array, "B K A"] | None) -> Int32[Array, "B K A"]:
    """Place of each flagged element among the flagged ones, by key, then by index."""
    size = flags.shape[2]
    shape = (1, 1, size, size)
    before = lax.broadcasted_iota(jnp.int32, shape, 3) < lax.broadcasted_iota(jnp.int32, shape, 2)
    if key is not None:
        mine, other = key[..., :, None], key[..., None, :]
        before = (other < mine) | ((other == mine) & before)
    return (flags[..., None, :] & before).sum(axis=3, dtype=jnp.int32)


def compact_misses(
    plan: SlotPlan,
    wanted: Int32[Array, "B K R"],
    *,
    num_blocks: int,
    pages: Int32[Array, "B M"] | None = None,
) -> tuple[Int32[Array, " A"], Int32[Array, " A"], Int32[Array, ""]]:
    """The misses as a list of copies for ``pallas_kernels.block_fetch.fetch_blocks``.

    Run ``(b*K + k)*M + block`` of the pool goes to run ``(b*K + k)*Z + slot``, in the order of
    (b, k, place in ``wanted``).

    Args:
        plan: from ``assign_slots``.
        wanted: the same as there.
        num_blocks: M, blocks per sequence and KV head in the pool.
        pages: of a pool of pages, the one that each block is in: run ``pages[b, block]*K + k``.

    Returns:
        source, target (A = B*K*R entries, 0 after the misses), and the number of misses.
    """
    b, k, r = wanted.shape
    pair = lax.broadcasted_iota(jnp.int32, (b * k, r), 0)
    miss = plan.miss.reshape(b * k, r)
    if pages is None:
        source = pair * num_blocks + wanted.reshape(b * k, r)
    else:
        page = jnp.take_along_axis(pages[:, None], jnp.maximum(wanted, 0), axis=2)
        source = page.reshape(b * k, r) * k + pair % k
    target = pair * plan.slot_blocks.shape[2] + plan.slot_ids.reshape(b * k, r)
    counts = miss.sum(axis=1, dtype=jnp.int32)
    # Place in the list: by comparisons, since on a GPU a sort is a dozen kernels, and splits the
    # CUDA graph in which fetch and compute run side by side.
    other, own = (lax.broadcasted_iota(jnp.int32, (b * k, b * k), axis) for axis in (1, 0))
    start = jnp.where(other < own, counts[None], 0).sum(axis=1, dtype=jnp.int32)
    place = jnp.where(miss, start[:, None] + _rank(plan.miss, None).reshape(b * k, r), b * k * r)
    empty = jnp.zeros(b * k * r, jnp.int32)
    source, target = (empty.at[place].set(runs, mode="drop") for runs in (source, target))
    return source, target, counts.sum(dtype=jnp.int32)
