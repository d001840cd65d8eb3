"""Prefill of one prompt in work units, so that others can decode in between.

All sizes are those of a bucket: hidden states of M*P tokens and KV of M blocks, where M is one of a
few capacities; so few programs exist. The work is that of the prompt: whole chunks from `first`,
where a prefix is known already, to the prompt's end. A chunk computes the same whatever came before
it in this process or another, so a prompt on a known prefix ends with the very KV that it would
have had from scratch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.compressed_keys import compress_keys
from sparda_jax.config import SparseConfig
from sparda_jax.engine import prefill
from sparda_jax.engine.choosers import Chooser, InfiniGenAhead
from sparda_jax.engine.plan import pad_prompts
from sparda_jax.engine.prompts import Chunks
from sparda_jax.engine.state import DenseCache
from sparda_jax.models.decoder import DecoderLayer
from sparda_jax.models.rope import RopeTable, rope_rows
from sparda_jax.sparse.infllm_v2 import to_blocks

if TYPE_CHECKING:
    from sparda_jax.engine.generate import Engine

# Keys and values of one layer and one sequence: blocks, or for dense attention token-major.
LayerKV = Array | DenseCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowCache:
    """What prefill leaves of one layer of one sequence; see `SparseCache`.

    Attributes:
      blocks: KV blocks; None where they went to the host pool.
      tail: the last two KV blocks.
      window: the newest keys.
      compressed: compressed keys.
      partial: InfiniGen's keys on few channels; None in other modes.
    """

    blocks: Float[Array, "1 K M 2 P H"] | None
    tail: Float[Array, "1 K 2 2 P H"]
    window: Float[Array, "1 K E H"]
    compressed: Float[Array, "1 K C H"]
    partial: Float[Array, "1 K S E"] | None


LayerRow = DenseCache | RowCache


def capacities(chunk: int, length: int) -> list[int]:
    """Token capacities of the buckets: one chunk, then twice as many, the last covers `length`."""
    sizes = [chunk]
    while sizes[-1] < length:
        sizes.append(min(2 * sizes[-1], -(-length // chunk) * chunk))
    return sizes


def empty_rows(*, shape: tuple[int, ...], dtype: jnp.dtype) -> DenseCache:
    """Keys and values for dense attention, all zero."""
    return DenseCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def first_value(x: Float[Array, "..."]) -> Float[Array, ""]:
    """Any value of an array: who waits for it waits for the array."""
    return x[(0,) * x.ndim]


def project_chunks(
    layer: DecoderLayer,
    rope: RopeTable,
    x: Float[Array, "1 T D"],
    bounds: Int[Array, " 2"],
    past: LayerKV,
    *,
    size: int,
    block_size: int,
) -> LayerKV:
    """Keys and values of the chunks `bounds[0]` to `bounds[1]`, written behind those of `past`.

    Args:
      layer: parameters.
      rope: table that covers every position.
      x: hidden states before the layer.
      bounds: first chunk and the one after the last.
      past: KV of the bucket; donate it.
      size: tokens of a chunk, whole blocks.
      block_size: P.
    """
    update = jax.lax.dynamic_update_slice_in_dim

    def write(index: Array, kv: LayerKV) -> LayerKV:
        start = index * size
        part = jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)
        positions = (start + jnp.arange(size, dtype=jnp.int32))[None]
        _, k, v = layer.qkv(part, *rope_rows(rope, positions))
        if isinstance(kv, DenseCache):
            return DenseCache(update(kv.k, k, start, axis=1), update(kv.v, v, start, axis=1))
        return update(kv, to_blocks(k, v, block_size), start // block_size, axis=2)

    return jax.lax.fori_loop(bounds[0], bounds[1], write, past)


def decode_caches(
    kv: Float[Array, "1 K M 2 P H"],
    lengths: Int[Array, " 1"],
    chooser: Chooser,
    *,
    sparse: SparseConfig,
) -> RowCache:
    """What decode keeps on the device of a layer, besides its blocks."""
    keys = kv[:, :, :, 0].reshape(*kv.shape[:2], -1, kv.shape[-1])
    tail, window = prefill.decode_tail(kv, lengths, sparse=sparse)
    partial = None
    if isinstance(chooser, InfiniGenAhead):
        partial = prefill.partial_cache(kv, chooser.skew)
    return RowCache(None, tail, window, compress_keys(keys, sparse.geometry), partial)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt on its way through the layers.

    Attributes:
      tokens: all of them.
      first: tokens whose KV is known, whole chunks; fewer than all.
      past: a layer's known KV on the device, of the bucket's size; None where `first` is 0.
      capacity: tokens of the bucket.
      store: is offered each layer's blocks, the known ones included; says if it took them. Dense
        attention's keys and values it is not offered.
    """

    tokens: Sequence[int]
    first: int
    past: Callable[[int], LayerKV] | None
    capacity: int
    store: Callable[[int, Array], bool]


Prefilled = tuple[Array, Array, tuple[LayerRow, ...]]


def run_prompt(engine: Engine, prompt: Prompt, chunk: int) -> Generator[Array, None, Prefilled]:
    """Prefills one prompt; between two units anything else may run on the device.

    Args:
      engine: its programs, parameters and settings.
      prompt: what to run.
      chunk: tokens of a chunk, whole blocks.

    Yields:
      After each unit an array that is there when the unit is done.

    Returns:
      Hidden states after the last layer, the prompt's length, and caches of batch 1 for decode;
      where blocks were stored, the caches hold none.
    """
    tokens, lengths = engine.put(pad_prompts([prompt.tokens], prompt.capacity))
    x = engine.programs.on_model(prefill.embed)(engine.parameters.arrays, tokens)
    stop = -(-len(prompt.tokens) // chunk)
    bounds = engine.put(np.array([prompt.first // chunk, stop], np.int32))
    starts = [engine.put(np.int32(at * chunk)) for at in range(prompt.first // chunk, stop)]
    layers: list[LayerRow] = []
    run = _LayerRun(engine, prompt, chunk, lengths, bounds)
    # x itself is gone as soon as the next unit is dispatched.
    sign = engine.programs.plain(first_value)
    for index in range(len(engine.layers)):
        advance, cache = run.begin(index, x)
        for at in starts:
            x = advance(x, at)
            yield sign(x)
        layers.append(cache)
    return x, lengths, tuple(layers)


class _LayerRun:
    """Starts each layer of a prompt."""

    def __init__(
        self, engine: Engine, prompt: Prompt, chunk: int, lengths: jax.Array, bounds: jax.Array
    ):
        self._engine, self._prompt, self._chunk = engine, prompt, chunk
        self._lengths, self._bounds = lengths, bounds
        self._chunks = Chunks(engine, chunk)

    def begin(
        self, index: int, x: jax.Array
    ) -> tuple[Callable[[jax.Array, jax.Array], jax.Array], LayerRow]:
        """Computes a layer's KV; returns how to advance a chunk of x, and the cache for decode."""
        engine, programs, size = self._engine, self._engine.programs, self._chunk
        arrays, rope = engine.layers[index].arrays, engine.rope
        block_size = engine.sparse.geometry.block_size
        project = programs.on_layer(project_chunks, donate=(4,), size=size, block_size=block_size)
        kv = project(arrays, rope, x, self._bounds, self._past(index))
        if isinstance(kv, DenseCache):
            run = programs.on_layer(prefill.dense_chunk, donate=(2,), size=size)
            return lambda x, at: run(arrays, rope, x, at, kv), kv
        cache = self._cache(index, kv)
        return self._chunks.advance(index, x, kv, cache.compressed, self._lengths), cache

    def _past(self, index: int) -> LayerKV:
        if self._prompt.past is not None:
            return self._prompt.past(index)
        engine, capacity = self._engine, self._prompt.capacity
        config, size = engine.model.config, engine.sparse.geometry.block_size
        row = (capacity, config.num_kv_heads, config.head_dim)
        shape = (1, config.num_kv_heads, capacity // size, 2, size, config.head_dim)
        dtype = engine.model.dtype
        if engine.config.mode == "dense":
            run = engine.programs.plain(empty_rows, shape=(1, *row), dtype=dtype)
        else:
            run = engine.programs.plain(jnp.zeros, shape=shape, dtype=dtype)
        kv: LayerKV = run()
        return kv

    def _cache(self, index: int, kv: jax.Array) -> RowCache:
        engine, store = self._engine, self._prompt.store
        run = engine.programs.plain(decode_caches, sparse=engine.sparse)
        cache: RowCache = run(kv, self._lengths, engine.choosers[index])
        return cache if store(index, kv) else dataclasses.replace(cache, blocks=kv)
