"""Selections with a stated overlap from one decode step to the next, in place of chosen ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.block_selection import Selection
from sparda_jax.config import SparseConfig
from sparda_jax.engine.choosers import OwnQueries
from sparda_jax.engine.state import SparseCache, Step


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is decoded.

    Attributes:
      context: tokens of every sequence at the first step.
      batch: sequences.
      hit_rate: share of the free blocks that the step before has selected too.
      calls: timed programs.
      steps_per_call: steps of each.
    """

    context: int
    batch: int
    hit_rate: float
    calls: int = 4
    steps_per_call: int = 32

    @property
    def steps(self) -> int:
        """All steps, those of the first, untimed call and of one to be recorded included."""
        return (self.calls + 2) * self.steps_per_call


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Traced:
    """Lets a chooser choose and answers with the trace.

    Attributes:
      chooser: the one whose work is timed.
      ids: blocks of every step.
      start: position of the first step.
    """

    chooser: Any
    ids: Int[Array, "U B K R"]
    start: Int[Array, ""]

    @property
    def ahead(self) -> bool:
        """As the chooser."""
        return self.chooser.ahead

    def append(
        self, cache: SparseCache, k: Float[Array, "B K H"], position: Int[Array, " B"]
    ) -> SparseCache:
        """As the chooser."""
        return self.chooser.append(cache, k, position)

    def choose(
        self,
        layer: Any,
        source: Array,
        cache: SparseCache,
        step: Step,
        sparse: SparseConfig,
        num_blocks: int,
    ) -> Selection:
        """The trace's blocks, once the chooser has chosen."""
        chosen = self.chooser.choose(layer, source, cache, step, sparse, num_blocks)
        ids = jax.lax.dynamic_index_in_dim(self.ids, step.position[0] - self.start, 0, False)
        # Zero, which the compiler cannot know: the trace has to wait for the selection.
        return Selection(ids[:, :, None] + jnp.minimum(chosen.count, 0)[..., None], chosen.count)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EveryBlock(OwnQueries):
    """Dense attention as the decode kernel does it: all blocks so far, nothing scored."""

    def choose(
        self,
        layer: Any,
        source: Array,
        cache: SparseCache,
        step: Step,
        sparse: SparseConfig,
        num_blocks: int,
    ) -> Selection:
        """Every block up to the token's own."""
        own = (step.position // sparse.geometry.block_size)[:, None, None, None]
        ids = jnp.arange(num_blocks, dtype=jnp.int32)
        ids = jnp.broadcast_to(ids, (own.shape[0], cache.blocks.shape[1], 1, num_blocks))
        return Selection(jnp.where(ids <= own, ids, -1), jnp.sum(ids <= own, axis=-1))


def make_trace(
    workload: Workload, sparse: SparseConfig, heads: int, rng: np.random.Generator
) -> Int[np.ndarray, "U B K R"]:
    """Selections, step by step, that keep `hit_rate` of the free blocks of the step before.

    Args:
      workload: context, batch, hit rate, steps.
      sparse: selection rules.
      heads: K.
      rng: for the choice of blocks.
    """
    size, free = sparse.geometry.block_size, sparse.budget_blocks - sparse.forced_blocks
    pairs = workload.batch * heads
    own = workload.context // size
    candidates = np.arange(sparse.init_blocks, own - sparse.local_blocks)
    order = np.stack([rng.permutation(candidates) for _ in range(pairs)])
    trace = np.empty((workload.steps, pairs, sparse.budget_blocks), np.int32)
    # A window moves over a permutation: what leaves it is replaced by blocks not seen for longest.
    moved = np.zeros(pairs)
    for step in range(workload.steps):
        first = moved.astype(np.int64)[:, None] + np.arange(free)
        current = (workload.context + step) // size
        forced = [
            *range(sparse.init_blocks),
            *range(current - sparse.local_blocks, current + 1),
        ]
        trace[step, :, : len(forced)] = forced
        trace[step, :, len(forced) :] = np.take_along_axis(order, first % len(candidates), axis=1)
        moved += free * (1 - workload.hit_rate)
    trace.sort(axis=2)
    return trace.reshape(workload.steps, workload.batch, heads, -1)
