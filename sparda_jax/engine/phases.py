"""What one decode step does in a sparse layer, phase by phase, and the order of the phases.

A layer projects (`project_layer`), has its blocks chosen and its slots planned (`choose_blocks`, in
some modes while the layer before is at work), fetches what is missing, and attends
(`attend_layer`). `run_layers` is the order. The phases run traced into one program
(`TracedPhases`), or as programs of their own with the host in between (`sparda_jax.engine.eager`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from host_offload.fetch import Fetcher
from host_offload.slot_cache import assign_slots, compact_misses
from pallas_kernels.geometry import BlockGeometry
from pallas_kernels.pool_attention import pool_attention
from sparda_jax.config import SparseConfig
from sparda_jax.engine import cache as caches
from sparda_jax.engine.choosers import Chooser
from sparda_jax.engine.state import LayerCache, Misses, SparseCache, Step
from sparda_jax.models.decoder import Decoder, DecoderLayer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """What one layer attends.

    Attributes:
      rows: rows of `SparseCache.blocks` to attend, ascending by block id, -1 for none.
      free: selected blocks that no rule forced.
      hits: how many of those were on the device already.
      fetched: (block, KV head) runs that were not: `SparseCache.misses`.
    """

    rows: Int[Array, "B K R"]
    free: Int[Array, ""]
    hits: Int[Array, ""]
    fetched: Int[Array, ""]


def _plan(
    cache: SparseCache, ids: Int[Array, "B K R"], step: Step, sparse: SparseConfig, num_blocks: int
) -> tuple[SparseCache, Plan]:
    """Turns selected block ids into rows to attend, and moves or requests what is missing."""
    size = sparse.geometry.block_size
    block = (step.position // size)[:, None, None]
    wanted = jnp.where((ids == block) | ~step.active[:, None, None], -1, ids)
    # The tail block has the highest id: what falls away here is it, or padding. One column stays,
    # since arrays of size zero have no maximum.
    wanted = wanted[..., : max(min(ids.shape[2], num_blocks) - 1, 1)]
    present = wanted >= 0
    free = present & (wanted >= sparse.init_blocks) & (wanted < block - sparse.local_blocks)
    if cache.slot_blocks is None:
        # Resident: a block joins the others when the next one begins.
        begins = (step.position % size == 0)[:, None] & (block[..., 0] > 0)
        moved = jnp.broadcast_to(jnp.where(begins, block[..., 0] - 1, -1), wanted.shape[:2])
        plan = Plan(wanted, jnp.sum(free), jnp.sum(free), jnp.zeros((), jnp.int32))
    else:
        slots = assign_slots(
            cache.slot_blocks, wanted, retention="spare", last_used=cache.last_used
        )
        # The block before the tail block is still in the tail ring, and inside one program of
        # several steps perhaps not yet on the host: a miss of it never goes there.
        in_ring = slots.miss & (wanted == block - 1)
        moved = jnp.max(jnp.where(in_ring, slots.slot_ids, -1), axis=-1)
        from_host = slots.miss & ~in_ring
        misses = Misses(
            *compact_misses(
                dataclasses.replace(slots, miss=from_host),
                wanted,
                num_blocks=num_blocks,
                pages=step.pages,
            )
        )
        hits = jnp.sum(free & ~from_host)
        plan = Plan(slots.slot_ids, jnp.sum(free), hits, misses.count)
        assert cache.last_used is not None
        slot = jnp.arange(cache.slot_blocks.shape[2])
        used = jnp.any(slots.slot_ids[..., None] == slot, axis=2)
        cache = dataclasses.replace(
            cache,
            slot_blocks=slots.slot_blocks,
            last_used=jnp.where(used, step.position[:, None, None], cache.last_used),
            misses=misses,
        )
    return caches.move_previous_block(cache, step.position, moved, size), plan


def project_layer(
    layer: DecoderLayer,
    chooser: Chooser,
    x: Float[Array, "B 1 D"],
    cache: SparseCache,
    step: Step,
    geometry: BlockGeometry,
) -> tuple[Float[Array, "B 1 N H"], Float[Array, "B 1 D"], SparseCache]:
    """Projections, and the cache with the new token.

    Args:
      layer: parameters.
      chooser: who chooses this layer's blocks, in later steps too.
      x: hidden states.
      cache: the layer's cache.
      step: position and RoPE rows.
      geometry: of blocks and compressed keys.

    Returns:
      Queries, what they were projected from, and the cache.
    """
    q, k, v = layer.qkv(x, step.cos, step.sin)
    if layer.importance is not None:
        bias = layer.importance(v)[:, 0]
        cache = caches.append_bias(cache, bias, step.position, geometry.block_size)
    k, v = k[:, 0], v[:, 0]
    cache = caches.append_compressed(cache, k, step.position, geometry)
    cache = caches.append_tail(cache, k, v, step.position, geometry.block_size)
    return q, layer.attention_norm(x), chooser.append(cache, k, step.position)


def choose_blocks(
    layer: DecoderLayer,
    chooser: Chooser,
    source: Array,
    cache: SparseCache,
    step: Step,
    sparse: SparseConfig,
    num_blocks: int,
) -> tuple[SparseCache, Plan]:
    """The blocks of `layer`, and where they are or go; arguments as in `Chooser.choose`."""
    selection = chooser.choose(layer, source, cache, step, sparse, num_blocks)
    return _plan(cache, selection.ids[:, :, 0], step, sparse, num_blocks)


def attend_layer(
    layer: DecoderLayer,
    x: Float[Array, "B 1 D"],
    q: Float[Array, "B 1 N H"],
    blocks: Float[Array, "B K Z 2 P H"],
    tail: Float[Array, "B K 2 2 P H"],
    rows: Int[Array, "B K R"],
    bias: Float[Array, "B K M P"] | None,
    slot_blocks: Int[Array, "B K Z"] | None,
    step: Step,
    block_size: int,
) -> Float[Array, "B 1 D"]:
    """Attention over the selected blocks and the tail block, output, MLP; fields of the cache."""
    newest, mask = caches.tail_block(tail, step.position, block_size)
    biases: dict[str, Any] = (
        {} if bias is None else caches.attended_bias(bias, slot_blocks, step.position)
    )
    attention = pool_attention(q, blocks, rows, newest, mask, **biases)
    assert not isinstance(attention, tuple)  # only with return_lse
    return layer.finish(x, attention)


def fetch_misses(
    fetcher: Fetcher, index: int, cache: SparseCache, before: SparseCache | None
) -> SparseCache:
    """The cache with its misses in their slots, copied after those of the layer `before`."""
    misses = cache.misses
    assert misses is not None
    after = None if before is None or before.misses is None else before.blocks
    lists = (misses.source, misses.target, misses.count)
    blocks = fetcher.fetch(index, cache.blocks, *lists, after)
    return dataclasses.replace(cache, blocks=blocks)


Tied = TypeVar("Tied")


class Phases(Protocol):
    """The phases of one step, run by whoever drives it; layers are named by their number."""

    @property
    def prefetch(self) -> bool:
        """Fetch what was chosen ahead behind the layer in front, not when its own turn comes."""
        ...

    def project(self, index: int, x: Array, cache: SparseCache) -> tuple[Array, Array, SparseCache]:
        """See `project_layer`."""
        ...

    def choose(self, index: int, source: Array, cache: SparseCache) -> tuple[SparseCache, Plan]:
        """See `choose_blocks`."""
        ...

    def fetch(
        self, index: int, cache: SparseCache, before: SparseCache | None = None
    ) -> SparseCache:
        """See `fetch_misses`."""
        ...

    def tie(self, values: Tied) -> Tied:
        """The same; nothing that uses one of them is computed before all of them are."""
        ...

    def attend(self, index: int, x: Array, q: Array, cache: SparseCache, rows: Array) -> Array:
        """See `attend_layer`."""
        ...


def run_layers(
    phases: Phases,
    x: Float[Array, "B 1 D"],
    layers: tuple[LayerCache, ...],
    choosers: Sequence[Chooser],
) -> tuple[Float[Array, "B 1 D"], tuple[SparseCache, ...], list[Plan]]:
    """All sparse layers of one step: the one place that orders the phases.

    What is chosen ahead, and its fetch, depend on nothing that the layer in front does after its
    projections, nor that layer on them: both run side by side where the program allows it. Copies
    run in the order of the layers: two at a time would share the link, and the first come late.

    Args:
      phases: how to run each.
      x: hidden states.
      layers: their caches.
      choosers: of each layer. One that looks ahead is asked while the layer before is at work, the
        first layer's in that layer.
    """
    held = [cache for cache in layers if isinstance(cache, SparseCache)]
    plans: dict[int, Plan] = {}

    def choose(index: int, source: Array) -> None:
        held[index], plans[index] = phases.choose(index, source, held[index])

    for index in range(len(held)):
        q, normed, held[index] = phases.project(index, x, held[index])
        ahead = index + 1 < len(held) and choosers[index + 1].ahead
        own = index not in plans
        if own:
            choose(index, normed if choosers[index].ahead else q)
        elif not phases.prefetch:
            q, misses = phases.tie((q, held[index].misses))
            held[index] = dataclasses.replace(held[index], misses=misses)
        if own or not phases.prefetch:
            held[index] = phases.fetch(index, held[index])
        if ahead:
            choose(index + 1, normed)
        if ahead and phases.prefetch:
            held[index + 1] = phases.fetch(index + 1, held[index + 1], held[index])
        x = phases.attend(index, x, q, held[index], plans[index].rows)
        if ahead:
            x, held[index + 1], plans[index + 1] = _tie(
                phases, x, held[index + 1], plans[index + 1]
            )
    return x, tuple(held), [plans[index] for index in range(len(held))]


def _tie(
    phases: Phases, x: Array, cache: SparseCache, plan: Plan
) -> tuple[Array, SparseCache, Plan]:
    """Ends a layer: the next one begins once its blocks are chosen, if not fetched.

    Otherwise XLA computes what two layers derive from their choices in one kernel, and the fetch
    for the first waits for the second's choice.
    """
    chosen = (cache.slot_blocks, cache.last_used, cache.misses, plan)
    x, (slot_blocks, last_used, misses, plan) = phases.tie((x, chosen))
    cache = dataclasses.replace(cache, slot_blocks=slot_blocks, last_used=last_used, misses=misses)
    return x, cache, plan


# A jit each, so that a program traces and lowers a phase once for all its layers; XLA inlines them.
_project_layer = functools.partial(jax.jit, static_argnames="geometry")(project_layer)
_choose_blocks = functools.partial(jax.jit, static_argnames=("sparse", "num_blocks"))(choose_blocks)
_attend_layer = functools.partial(jax.jit, static_argnames="block_size")(attend_layer)


@dataclasses.dataclass(frozen=True)
class TracedPhases:
    """The phases traced into the program that calls them; see `Phases`.

    Attributes:
      model: parameters.
      choosers: of each layer.
      fetcher: where missed blocks come from; None when the KV is resident.
      step: of this token.
      sparse: selection rules.
      num_blocks: M, blocks a sequence can hold.
      prefetch: see `Phases`.
    """

    model: Decoder
    choosers: tuple[Chooser, ...]
    fetcher: Fetcher | None
    step: Step
    sparse: SparseConfig
    num_blocks: int
    prefetch: bool

    def project(self, index: int, x: Array, cache: SparseCache) -> tuple[Array, Array, SparseCache]:
        """See `project_layer`."""
        layer, chooser = self.model.layers[index], self.choosers[index]
        return _project_layer(layer, chooser, x, cache, self.step, geometry=self.sparse.geometry)

    def choose(self, index: int, source: Array, cache: SparseCache) -> tuple[SparseCache, Plan]:
        """See `choose_blocks`."""
        layer, chooser = self.model.layers[index], self.choosers[index]
        rules = {"sparse": self.sparse, "num_blocks": self.num_blocks}
        return _choose_blocks(layer, chooser, source, cache, self.step, **rules)

    def fetch(
        self, index: int, cache: SparseCache, before: SparseCache | None = None
    ) -> SparseCache:
        """Nothing to do where the KV is resident."""
        if self.fetcher is None or cache.misses is None:
            return cache
        return fetch_misses(self.fetcher, index, cache, before)

    def tie(self, values: Tied) -> Tied:
        """See `Phases.tie`."""
        return jax.lax.optimization_barrier(values)

    def attend(self, index: int, x: Array, q: Array, cache: SparseCache, rows: Array) -> Array:
        """See `attend_layer`."""
        size = self.sparse.geometry.block_size
        held = (cache.blocks, cache.tail, rows, cache.bias, cache.slot_blocks)
        return _attend_layer(self.model.layers[index], x, q, *held, self.step, block_size=size)
