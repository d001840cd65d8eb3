"""Decode steps driven layer by layer from the host, for the eager fetcher.

The phases are those of `sparda_jax.engine.decode`, each its own program: the miss list has to reach
the host between a layer's selection and its attention. All layers share the programs.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from host_offload.fetch import Fetcher
from sparda_jax.config import SparseConfig
from sparda_jax.engine import decode
from sparda_jax.engine.modules import Parameters
from sparda_jax.engine.programs import Programs
from sparda_jax.engine.state import DecodeState, SparseCache, StepOutput
from sparda_jax.models.decoder import Decoder, DecoderLayer
from sparda_jax.models.rope import RopeTable

Counts = tuple[Int[Array, ""], ...]


def _end(
    model: Decoder, x: Array, state: DecodeState, free: Counts, hits: Counts, fetched: Counts
) -> tuple[DecodeState, StepOutput]:
    state, tokens, emitted = decode.end_step(model, x, state)
    totals = (jnp.sum(jnp.stack(parts)) for parts in (free, hits, fetched))
    output = StepOutput(tokens, emitted, *totals)
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

    Returns:
      The state, and the output with a leading axis of 1.
    """
    begin = programs.on_model(decode.begin_step)
    select = programs.on_layer(
        decode.select_layer, donate=(2,), sparse=sparse, num_blocks=num_blocks
    )
    attend = programs.on_layer(
        decode.attend_layer, donate=(1,), block_size=sparse.geometry.block_size
    )
    rest = dataclasses.replace(state, layers=())
    x, step = begin(model.arrays, rope, rest)
    caches, plans = [], []
    for index, (layer, cache) in enumerate(zip(layers, state.layers, strict=True)):
        assert isinstance(cache, SparseCache)
        q, cache, plan = select(layer.arrays, x, cache, step)
        blocks = fetcher.fetch(index, cache.blocks, plan.source, plan.target, plan.fetched)
        cache = dataclasses.replace(cache, blocks=blocks)
        x = attend(layer.arrays, x, q, cache, plan.rows, step)
        caches.append(cache)
        plans.append(plan)
    counts = (tuple(getattr(plan, name) for plan in plans) for name in ("free", "hits", "fetched"))
    rest, output = programs.on_model(_end)(model.arrays, x, rest, *counts)
    return dataclasses.replace(rest, layers=tuple(caches)), output
