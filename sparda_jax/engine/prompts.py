"""Drives prefill: layer after layer, chunk after chunk, each layer's KV to where it stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from host_offload.host_pool import HostPool
from sparda_jax.config import SamplingParams
from sparda_jax.engine import prefill
from sparda_jax.engine.choosers import InfiniGenAhead
from sparda_jax.engine.plan import BatchPlan, pad_prompts
from sparda_jax.engine.state import (
    DecodeState,
    DenseCache,
    LayerCache,
    SamplingState,
    SparseCache,
    sampling_fields,
)

if TYPE_CHECKING:
    from sparda_jax.engine.generate import Engine

Progress = Callable[[int, int], None]


class Chunks:
    """How chunks go through one sparse layer after another, once the layer's KV is there.

    Args:
      engine: its programs, parameters and settings.
      first: Forecast queries of all tokens for layer 0: a program of its parameters, RoPE, hidden
        states and projection.
    """

    def __init__(self, engine: Engine, first: Callable[..., jax.Array]):
        self._engine, self._first = engine, first
        self._forecast: jax.Array | None = None  # queries for the blocks of the layer at work
        self._index = 0  # the layer at work
        self._held: tuple[jax.Array, ...] = ()  # what its chunks look at

    def enter(
        self, index: int, x: jax.Array, kv: jax.Array, compressed: jax.Array, lengths: jax.Array
    ) -> None:
        """Begins a layer.

        Args:
          index: which; they follow one another.
          x: hidden states of all tokens before it.
          kv: its blocks.
          compressed: their compressed keys.
          lengths: tokens of each prompt.
        """
        engine = self._engine
        self._index, self._held = index, (kv, compressed, lengths)
        if engine.config.mode == "sparda" and index == 0:
            arrays, kernel = engine.layers[0].arrays, engine.forecast_kernel(0)
            self._forecast = self._first(arrays, engine.rope, x, kernel)

    def advance(self, x: jax.Array, at: jax.Array, size: int) -> jax.Array:
        """Hidden states with those of one chunk behind the layer; donates x.

        Args:
          x: hidden states of all tokens.
          at: the chunk's first token.
          size: its tokens.
        """
        engine, index = self._engine, self._index
        arrays, rope = engine.layers[index].arrays, engine.rope
        if engine.config.mode != "sparda":
            own = (arrays, rope, x, at, *self._held)
            advanced: jax.Array = self._run(prefill.sparse_chunk, (2,), size, own)
            return advanced
        # The last layer has no next one; what its projection makes is not looked at.
        kernel = engine.forecast_kernel(min(index + 1, len(engine.layers) - 1))
        args = (arrays, rope, x, self._forecast, at, kernel, *self._held)
        x, self._forecast = self._run(prefill.forecast_chunk, (2, 3), size, args)
        return x

    def _run(
        self, function: Callable[..., Any], donate: tuple[int, ...], size: int, args: tuple
    ) -> Any:
        sparse = self._engine.sparse
        run = self._engine.programs.on_layer(function, donate=donate, size=size, sparse=sparse)
        return run(*args)


class PromptRun:
    """Prefill of one batch, once.

    Args:
      engine: its programs, parameters and settings.
      plan: sizes of the batch.
      pool: takes the KV; None when it stays on the device.
    """

    def __init__(self, engine: Engine, plan: BatchPlan, pool: HostPool | None):
        self._engine, self._plan, self._pool = engine, plan, pool

    def __call__(
        self, prompts: Sequence[Sequence[int]], progress: Progress | None
    ) -> tuple[jax.Array, jax.Array, list[LayerCache]]:
        """Runs the prompts through all layers.

        Args:
          prompts: token ids of each request.
          progress: called with (done, total) units of work.

        Returns:
          Hidden states after the last layer, prompt lengths, and the caches for decode.
        """
        engine, plan = self._engine, self._plan
        tokens, lengths = engine.put(pad_prompts(prompts, plan.padded_length))
        x = engine.programs.on_model(prefill.embed)(engine.parameters.arrays, tokens)
        chunk = min(engine.config.prefill_chunk, plan.padded_length)
        starts = [engine.put(np.int32(at)) for at in range(0, plan.padded_length, chunk)]
        total, layers = len(engine.layers) * len(starts), []
        first = engine.programs.on_layer(prefill.first_forecast, chunk=chunk)
        chunks = Chunks(engine, first)
        for index in range(len(engine.layers)):
            advance, cache = self._layer(index, x, lengths, chunk, chunks)
            for part, at in enumerate(starts):
                x = advance(x, at)
                if progress is not None:
                    x.block_until_ready()
                    progress(index * len(starts) + part + 1, total)
            # No layer is dispatched ahead: the KV of several would be allocated at once.
            x.block_until_ready()
            layers.append(cache)
        return x, lengths, layers

    def _layer(
        self, index: int, x: jax.Array, lengths: jax.Array, chunk: int, chunks: Chunks
    ) -> tuple[Callable[[jax.Array, jax.Array], jax.Array], LayerCache]:
        """Computes a layer's KV; returns how to advance a chunk of x, and the cache for decode."""
        engine, programs, plan = self._engine, self._engine.programs, self._plan
        sparse, rope, arrays = engine.sparse, engine.rope, engine.layers[index].arrays
        if engine.config.mode == "dense":
            length = plan.num_blocks * sparse.geometry.block_size
            make = programs.on_layer(prefill.layer_keys_values, length=length, chunk=chunk)
            dense: DenseCache = make(arrays, rope, x)
            run = programs.on_layer(prefill.dense_chunk, donate=(2,), size=chunk)
            return lambda x, at: run(arrays, rope, x, at, dense), dense
        make = programs.on_layer(
            prefill.layer_blocks, sparse=sparse, num_blocks=plan.num_blocks, chunk=chunk
        )
        kv, compressed = make(arrays, rope, x)
        cache = self._sparse_cache(index, kv, compressed, lengths)
        chunks.enter(index, x, kv, compressed, lengths)
        return lambda x, at: chunks.advance(x, at, chunk), cache

    def _sparse_cache(
        self, index: int, kv: jax.Array, compressed: jax.Array, lengths: jax.Array
    ) -> SparseCache:
        """What stays of a layer's KV on the device; offloaded, the blocks go to the host."""
        programs, plan, chooser = self._engine.programs, self._plan, self._engine.choosers[index]
        partial = None
        if isinstance(chooser, InfiniGenAhead):
            partial = programs.plain(prefill.partial_cache)(kv, chooser.skew)
        tail, window = programs.plain(prefill.decode_tail, sparse=self._engine.sparse)(kv, lengths)
        bias = None
        if self._engine.model.config.kv_importance:
            bias = programs.on_layer(prefill.blocks_bias)(self._engine.layers[index].arrays, kv)
        rest: tuple[Any, ...] = (tail, window, compressed, partial, bias)
        if self._pool is None or index < plan.resident_layers:
            return SparseCache(kv, None, None, None, *rest)
        self._pool.store_layer(index, kv)
        shape = (*kv.shape[:2], plan.slots, *kv.shape[3:])
        empty = programs.plain(
            prefill.empty_slots, shape=shape, dtype=kv.dtype, selected=plan.selected
        )
        return SparseCache(*empty(), *rest)


def first_tokens(
    engine: Engine,
    x: jax.Array,
    lengths: jax.Array,
    requests: Sequence[SamplingParams],
    *,
    width: int | None = None,
    pages: np.ndarray | None = None,
) -> tuple[DecodeState, list[Any]]:
    """Draws the first token of each prompt that went through all layers.

    Args:
      engine: its programs, parameters and settings.
      x: hidden states after the last layer.
      lengths: of the prompts.
      requests: settings of each.
      width: see `sampling_fields`.
      pages: see `DecodeState`.

    Returns:
      The state, without caches; and of each request the token, whether it was emitted, and how
      likely it was.
    """
    count = len(requests)
    fields = {
        "last_token": np.zeros(count, np.int32),
        "active": np.ones(count, bool),
        "failed": np.zeros(count, bool),
        "remaining": np.array([request.max_new_tokens for request in requests], np.int32),
        "pages": pages,
    }
    sampling = SamplingState(**engine.put(sampling_fields(requests, width=width)))
    state = DecodeState(lengths=lengths, sampling=sampling, layers=(), **engine.put(fields))
    run = engine.programs.on_model(prefill.first_token, top_logprobs=engine.config.top_logprobs)
    state, *drawn = run(engine.parameters.arrays, x, state)
    return state, drawn
