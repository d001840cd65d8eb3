"""Decode steps driven layer by layer from the host, for the eager fetcher.

The phases are those of `sparda_jax.engine.phases`, each its own program: the miss list has to reach
the host between a layer's selection and its attention. All layers share the programs.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from host_offload.fetch import Fetcher
from sparda_jax.config import SparseConfig
from sparda_jax.engine import decode, phases
from sparda_jax.engine.choosers import Chooser
from sparda_jax.engine.modules import Parameters
from sparda_jax.engine.phases import Plan
from sparda_jax.engine.programs import Programs
from sparda_jax.engine.state import DecodeState, SparseCache, Step, StepOutput
from sparda_jax.models.decoder import Decoder, DecoderLayer
from sparda_jax.models.rope import RopeTable

Counts = tuple[Int[Array, ""], ...]


@dataclasses.dataclass(frozen=True)
class CompiledPhases:
    """Each phase a program of its own; see `sparda_jax.engine.phases.Phases`.

    Attributes:
      programs: of the engine.
      layers: parameters of each layer.
      choosers: of each layer.
      fetcher: driven from the host.
      sparse: selection rules.
      num_blocks: M, blocks a sequence can hold.
      step: of this token.
    """

    programs: Programs
    layers: tuple[Parameters[DecoderLayer], ...]
    choosers: tuple[Chooser, ...]
    fetcher: Fetcher
    sparse: SparseConfig
    num_blocks: int
    step: Step

    def project(self, index: int, x: Array, cache: SparseCache) -> tuple[Array, Array, SparseCache]:
        """See `phases.project_layer`."""
        run = self.programs.on_layer(
            phases.project_layer, donate=(3,), geometry=self.sparse.geometry
        )
        return run(self.layers[index].arrays, self.choosers[index], x, cache, self.step)

    def choose(self, index: int, source: Array, cache: SparseCache) -> tuple[SparseCache, Plan]:
        """See `phases.choose_blocks`."""
        run = self.programs.on_layer(
            phases.choose_blocks, donate=(3,), sparse=self.sparse, num_blocks=self.num_blocks
        )
        return run(self.layers[index].arrays, self.choosers[index], source, cache, self.step)

    @property
    def prefetch(self) -> bool:
        """Copies are dispatched as soon as their list is on the host."""
        return True

    def fetch(
        self, index: int, cache: SparseCache, before: SparseCache | None = None
    ) -> SparseCache:
        """Waits for the miss list; the copies themselves are asynchronous."""
        if cache.misses is None:
            return cache
        return phases.fetch_misses(self.fetcher, index, cache, before)

    def tie(self, values: phases.Tied) -> phases.Tied:
        """Programs run in the order of their calls anyway."""
        return values

    def attend(self, index: int, x: Array, q: Array, cache: SparseCache, rows: Array) -> Array:
        """See `phases.attend_layer`."""
        size = self.sparse.geometry.block_size
        run = self.programs.on_layer(phases.attend_layer, donate=(1,), block_size=size)
        held = (cache.blocks, cache.tail, rows, cache.bias, cache.slot_blocks)
        return run(self.layers[index].arrays, x, q, *held, self.step)


def _end(
    model: Decoder,
    x: Array,
    state: DecodeState,
    free: Counts,
    hits: Counts,
    fetched: Counts,
    *,
    top_logprobs: int,
) -> tuple[DecodeState, StepOutput]:
    state, tokens, emitted, logprobs = decode.end_step(model, x, state, top_logprobs)
    totals = (jnp.sum(jnp.stack(parts)) for parts in (free, hits, fetched))
    output = StepOutput(tokens, emitted, logprobs, *totals)
    return state, jax.tree.map(lambda leaf: leaf[None], output)


def eager_step(
    programs: Programs,
    model: Parameters[Decoder],
    layers: tuple[Parameters[DecoderLayer], ...],
    rope: RopeTable,
    state: DecodeState,
    fetcher: Fetcher,
    sparse: SparseConfig,
    num_blocks: int,
    choosers: tuple[Chooser, ...],
    top_logprobs: int,
) -> tuple[DecodeState, StepOutput]:
    """One token for every active request, as `decode.decode_step`.

    Args:
      programs: of the engine.
      model: all parameters.
      layers: those of each layer.
      rope: table that covers every position.
      state: the batch; its caches are donated.
      fetcher: driven from the host.
      sparse: selection rules.
      num_blocks: M, blocks a sequence can hold.
      choosers: of each layer.
      top_logprobs: likeliest tokens to report.

    Returns:
      The state, and the output with a leading axis of 1.
    """
    rest = dataclasses.replace(state, layers=())
    x, step = programs.on_model(decode.begin_step)(model.arrays, rope, rest)
    run = CompiledPhases(programs, layers, choosers, fetcher, sparse, num_blocks, step)
    x, caches, plans = phases.run_layers(run, x, state.layers, choosers)
    counts = (tuple(getattr(plan, name) for plan in plans) for name in ("free", "hits", "fetched"))
    rest, output = programs.on_model(_end, top_logprobs=top_logprobs)(
        model.arrays, x, rest, *counts
    )
    return dataclasses.replace(rest, layers=caches), output
