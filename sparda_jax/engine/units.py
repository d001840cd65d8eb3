"""Prefill of one prompt in work units, so that others can decode in between.

All sizes are those of a bucket: hidden states of M*P tokens and KV of M blocks, where M is one of a
few capacities; so few programs exist. The work is that of the prompt: from where a known prefix
ends to its own end, piece by piece. Known blocks that lie in the host pool are read a layer ahead,
beside the first piece of the layer at work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from host_offload import overlap
from host_offload.host_pool import PoolLayer
from host_offload.paged_pool import read_pages
from pallas_kernels.compressed_keys import compress_keys
from sparda_jax.config import SparseConfig
from sparda_jax.engine import prefill
from sparda_jax.engine.choosers import Chooser, InfiniGenAhead
from sparda_jax.engine.pieces import Pieces, over_pieces
from sparda_jax.engine.plan import pad_prompts
from sparda_jax.engine.prompts import Chunks
from sparda_jax.engine.state import DenseCache
from sparda_jax.forecast.projection import project
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


def empty_rows(*, shape: tuple[int, ...], dtype: jnp.dtype) -> DenseCache:
    """Keys and values for dense attention, all zero."""
    return DenseCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def first_value(x: Float[Array, "..."]) -> Float[Array, ""]:
    """Any value of an array: who waits for it waits for the array."""
    return x[(0,) * x.ndim]


def project_pieces(
    layer: DecoderLayer,
    rope: RopeTable,
    x: Float[Array, "1 T D"],
    bounds: Int[Array, " E"],
    past: LayerKV,
    *,
    sizes: tuple[int, ...],
    block_size: int,
) -> LayerKV:
    """Keys and values of all pieces, written behind those of `past`.

    Args:
      layer: parameters.
      rope: table that covers every position.
      x: hidden states before the layer.
      bounds: see `Pieces`.
      past: KV of the bucket; donate it.
      sizes: see `Pieces`.
      block_size: P.
    """
    update = jax.lax.dynamic_update_slice_in_dim

    def write(start: Array, size: int, kv: LayerKV) -> LayerKV:
        part = jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)
        positions = (start + jnp.arange(size, dtype=jnp.int32))[None]
        _, k, v = layer.qkv(part, *rope_rows(rope, positions))
        if isinstance(kv, DenseCache):
            return DenseCache(update(kv.k, k, start, axis=1), update(kv.v, v, start, axis=1))
        return update(kv, to_blocks(k, v, block_size), start // block_size, axis=2)

    return over_pieces(write, bounds, sizes, past)


def first_forecasts(
    layer: DecoderLayer,
    rope: RopeTable,
    x: Float[Array, "1 T D"],
    kernel: Float[Array, "D KH"],
    bounds: Int[Array, " E"],
    *,
    sizes: tuple[int, ...],
) -> Float[Array, "1 T K H"]:
    """Forecast queries of all pieces for layer 0, by its own projection; see `project_pieces`."""

    def one(start: Array, size: int) -> Array:
        part = jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)
        positions = (start + jnp.arange(size, dtype=jnp.int32))[None]
        return project(kernel, layer.attention_norm(part), *rope_rows(rope, positions))

    def write(start: Array, size: int, queries: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(queries, one(start, size), start, axis=1)

    shape = jax.eval_shape(lambda: one(bounds[0], sizes[-1]))
    empty = jnp.zeros((1, x.shape[1], *shape.shape[2:]), shape.dtype)
    return over_pieces(write, bounds, sizes, empty)


# A layer of the pool, a sequence's pages and how many of them count; see `read_pages`.
Stored = tuple[PoolLayer, Array, Array]


def chunk_and_read(
    layer: DecoderLayer, source: Stored, *args: Any, run: Callable[..., Any], **static: Any
) -> tuple[Any, Float[Array, "1 K M 2 P H"]]:
    """A chunk of one layer and, beside it, the known blocks of the next."""
    result = run(layer, *args, **static)
    x = result[0] if isinstance(result, tuple) else result
    return result, read_pages(*source, dtype=x.dtype.name)


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
class Known:
    """Where the KV of a prompt's beginning is.

    Attributes:
      stored: a layer's blocks in the host pool; None for a layer that stays on the device.
      kept: the KV of such a layer, of the bucket's size.
    """

    stored: Callable[[int], Stored | None]
    kept: Callable[[int], LayerKV]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt on its way through the layers.

    Attributes:
      tokens: all of them.
      pieces: that cover those whose KV is not known.
      known: where the KV of the others is; None where there are none.
      capacity: tokens of the bucket.
      store: is offered each layer's blocks, the known ones included; says if it took them. Dense
        attention's keys and values it is not offered.
    """

    tokens: Sequence[int]
    pieces: Pieces
    known: Known | None
    capacity: int
    store: Callable[[int, Array], bool]


Prefilled = tuple[Array, Array, tuple[LayerRow, ...]]


def run_prompt(engine: Engine, prompt: Prompt) -> Generator[Array, None, Prefilled]:
    """Prefills one prompt; between two units anything else may run on the device.

    Args:
      engine: its programs, parameters and settings.
      prompt: what to run.

    Yields:
      After each unit, a chunk in one layer or the smaller pieces behind the last, an array that is
      there when the unit is done.

    Returns:
      Hidden states after the last layer, the prompt's length, and caches of batch 1 for decode;
      where blocks were stored, the caches hold none.
    """
    tokens, lengths = engine.put(pad_prompts([prompt.tokens], prompt.capacity))
    x = engine.programs.on_model(prefill.embed)(engine.parameters.arrays, tokens)
    pieces = [(engine.put(np.int32(at)), size) for at, size in prompt.pieces]
    layers: list[LayerRow] = []
    run = _LayerRun(engine, prompt, lengths)
    # x itself is gone as soon as the next unit is dispatched.
    sign = engine.programs.plain(first_value)
    for index in range(len(engine.layers)):
        advance, cache = run.begin(index, x)
        for number, (at, size) in enumerate(pieces, 1):
            x = advance(x, at, size)
            if size == prompt.pieces.sizes[0] or number == len(pieces):
                yield sign(x)
        layers.append(cache)
    return x, lengths, tuple(layers)


class _PieceRun(Chunks):
    """Chunks of which one may have a read beside it.

    Attributes:
      source: of the next read; None: nothing is to be read, or it is under way.
      blocks: read last.
    """

    source: Stored | None = None
    blocks: Array | None = None

    def _run(
        self, function: Callable[..., Any], donate: tuple[int, ...], size: int, args: tuple
    ) -> Any:
        if self.source is None:
            return super()._run(function, donate, size, args)
        engine, source, self.source = self._engine, self.source, None
        run = engine.programs.on_layer(
            chunk_and_read,
            donate=tuple(number + 1 for number in donate),
            options=overlap.CONCURRENT_OPTIONS if engine.device.platform == "gpu" else None,
            run=function,
            size=size,
            sparse=engine.sparse,
        )
        result, self.blocks = run(args[0], source, *args[1:])
        return result


class _LayerRun:
    """Starts each layer of a prompt."""

    def __init__(self, engine: Engine, prompt: Prompt, lengths: jax.Array):
        self._engine, self._prompt, self._lengths = engine, prompt, lengths
        pieces = prompt.pieces
        self._bounds = engine.put(np.array(pieces.bounds, np.int32))
        first = engine.programs.on_layer(first_forecasts, sizes=pieces.sizes)
        self._chunks = _PieceRun(engine, lambda *args: first(*args, self._bounds))

    def begin(
        self, index: int, x: jax.Array
    ) -> tuple[Callable[[jax.Array, jax.Array, int], jax.Array], LayerRow]:
        """Computes a layer's KV; returns how to advance a piece of x, and the cache for decode."""
        engine, programs, sizes = self._engine, self._engine.programs, self._prompt.pieces.sizes
        arrays, rope = engine.layers[index].arrays, engine.rope
        block_size = engine.sparse.geometry.block_size
        run = programs.on_layer(project_pieces, donate=(4,), sizes=sizes, block_size=block_size)
        kv = run(arrays, rope, x, self._bounds, self._past(index))
        if isinstance(kv, DenseCache):
            return lambda x, at, size: programs.on_layer(
                prefill.dense_chunk, donate=(2,), size=size
            )(arrays, rope, x, at, kv), kv
        cache = self._cache(index, kv)
        self._chunks.enter(index, x, kv, cache.compressed, self._lengths)
        if self._prompt.known is not None and index + 1 < len(engine.layers):
            self._chunks.source = self._prompt.known.stored(index + 1)
        return self._chunks.advance, cache

    def _past(self, index: int) -> LayerKV:
        """The KV of the bucket that is known, zeros for the rest."""
        known, (read, self._chunks.blocks) = self._prompt.known, (self._chunks.blocks, None)
        if read is not None:
            return read
        if known is not None:
            source = known.stored(index)
            if source is None:
                return known.kept(index)
            dtype = self._engine.model.dtype.name
            blocks: jax.Array = self._engine.programs.plain(read_pages, dtype=dtype)(*source)
            return blocks
        return self._empty()

    def _empty(self) -> LayerKV:
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
