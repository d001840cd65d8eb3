"""Prefill of one prompt in work units, so that others can decode in between.

All sizes are those of a bucket: hidden states of M*P tokens and KV of M blocks, where M is one of a
few capacities; so few programs exist. The work is that of the prompt: from where a known prefix
ends to its own end, piece by piece. A layer's first piece has the copies between device and host
beside it: of its new blocks to their pages, and of the next layer's known blocks from theirs.
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
from host_offload.paged_pool import PagedPool, read_pages, write_pages
from pallas_kernels.compressed_keys import compress_keys
from sparda_jax.config import SparseConfig
from sparda_jax.engine import prefill
from sparda_jax.engine.choosers import Chooser, InfiniGenAhead
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


def _piece(x: Array, start: Array, size: int) -> tuple[Array, Array]:
    """Hidden states and positions of one piece."""
    part = jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)
    return part, (start + jnp.arange(size, dtype=jnp.int32))[None]


def project_piece(
    layer: DecoderLayer,
    rope: RopeTable,
    x: Float[Array, "1 T D"],
    start: Int[Array, ""],
    kv: LayerKV,
    *,
    size: int,
    block_size: int,
) -> LayerKV:
    """Keys and values of one piece, written behind those before it.

    A program for each: in a loop whose bounds are data the host would wait for the device.

    Args:
      layer: parameters.
      rope: table that covers every position.
      x: hidden states before the layer.
      start: the piece's first token.
      kv: of the bucket; donate it.
      size: tokens of the piece.
      block_size: P.
    """
    update = jax.lax.dynamic_update_slice_in_dim
    part, positions = _piece(x, start, size)
    _, k, v = layer.qkv(part, *rope_rows(rope, positions))
    if isinstance(kv, DenseCache):
        return DenseCache(update(kv.k, k, start, axis=1), update(kv.v, v, start, axis=1))
    return update(kv, to_blocks(k, v, block_size), start // block_size, axis=2)


def first_forecast_piece(
    layer: DecoderLayer,
    rope: RopeTable,
    x: Float[Array, "1 T D"],
    kernel: Float[Array, "D KH"],
    start: Int[Array, ""],
    queries: Float[Array, "1 T K H"],
    *,
    size: int,
) -> Float[Array, "1 T K H"]:
    """Forecast queries of one piece for layer 0, by its own projection; see `project_piece`."""
    part, positions = _piece(x, start, size)
    some = project(kernel, layer.attention_norm(part), *rope_rows(rope, positions))
    return jax.lax.dynamic_update_slice_in_dim(queries, some.astype(queries.dtype), start, axis=1)


# A layer of the pool, a sequence's pages and how many of them count; see `read_pages`.
Source = tuple[PoolLayer, Array, Array]
# Blocks of a layer, the first that is written and the pages of those from there; see `write_pages`.
Update = tuple[Array, Array, Array]


def chunk_and_copy(
    layer: DecoderLayer,
    pool: PoolLayer | None,
    update: Update | None,
    source: Source | None,
    *args: Any,
    run: Callable[..., Any],
    **static: Any,
) -> tuple[Any, PoolLayer | None, Float[Array, "1 K M 2 P H"] | None]:
    """A chunk of one layer and, beside it, copies between device and host.

    Args:
      layer: parameters.
      pool: the layer's; donate it.
      update: what is written to it; None: nothing, and there is no pool.
      source: known blocks of the next layer; None: there are none.
      *args: of the chunk.
      run: what advances the chunk.
      **static: likewise.

    Returns:
      What `run` returns, the pool, and the blocks that were read.
    """
    result = run(layer, *args, **static)
    x = result[0] if isinstance(result, tuple) else result
    if pool is not None and update is not None:
        pool = write_pages(pool, *update)
    blocks = None if source is None else read_pages(*source, dtype=x.dtype.name)
    return result, pool, blocks


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
class Paged:
    """Where a prompt's blocks are in the host pool, and go to.

    Attributes:
      pool: of all rows.
      known: pages of the bucket's blocks and how many of them are known; None: none is.
      new: the first block that is written and the pages of those from there.
    """

    pool: PagedPool
    known: tuple[Array, Array] | None
    new: tuple[Array, Array]

    def source(self, index: int) -> Source | None:
        """Known blocks of a layer; None where there are none, or the layer is not in the pool."""
        layer = self.pool.layers[index]
        return None if layer is None or self.known is None else (layer, *self.known)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt on its way through the layers.

    Attributes:
      tokens: all of them.
      pieces: first token and size of those that cover what is not known; see `pieces.cut`.
      chunk: the largest size.
      capacity: tokens of the bucket.
      kept: known KV of a layer that stays on the device, of the bucket's size; None: none is known.
      paged: of the layers in the host pool; None where there is no pool.
    """

    tokens: Sequence[int]
    pieces: Sequence[tuple[int, int]]
    chunk: int
    capacity: int
    kept: Callable[[int], LayerKV] | None
    paged: Paged | None


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
      where blocks go to the host pool, the caches hold none.
    """
    tokens, lengths = engine.put(pad_prompts([prompt.tokens], prompt.capacity))
    x = engine.programs.on_model(prefill.embed)(engine.parameters.arrays, tokens)
    pieces = [(engine.put(np.int32(at)), size) for at, size in prompt.pieces]
    layers: list[LayerRow] = []
    run = _LayerRun(engine, prompt, lengths, pieces)
    # x itself is gone as soon as the next unit is dispatched.
    sign = engine.programs.plain(first_value)
    for index in range(len(engine.layers)):
        advance, cache = run.begin(index, x)
        for number, (at, size) in enumerate(pieces, 1):
            x = advance(x, at, size)
            if size == prompt.chunk or number == len(pieces):
                yield sign(x)
        layers.append(cache)
    return x, lengths, tuple(layers)


class _PieceRun(Chunks):
    """Chunks of which the first of a layer has copies beside it.

    Args:
      engine: see `Chunks`.
      first: likewise.
      paged: where from and to; None: nothing is copied.

    Attributes:
      blocks: read last.
    """

    def __init__(self, engine: Engine, first: Callable[..., jax.Array], paged: Paged | None):
        super().__init__(engine, first)
        self._paged, self._due = paged, False
        self.blocks: Array | None = None

    def enter(
        self, index: int, x: jax.Array, kv: jax.Array, compressed: jax.Array, lengths: jax.Array
    ) -> None:
        """See `Chunks`."""
        super().enter(index, x, kv, compressed, lengths)
        self._due = self._paged is not None

    def _run(
        self, function: Callable[..., Any], donate: tuple[int, ...], size: int, args: tuple
    ) -> Any:
        if self._paged is None or not self._due:
            return super()._run(function, donate, size, args)
        engine, paged, index = self._engine, self._paged, self._index
        pool, self._due = paged.pool.layers[index], False
        update = None if pool is None else (self._held[0], *paged.new)
        source = paged.source(index + 1) if index + 1 < len(engine.layers) else None
        run = engine.programs.on_layer(
            chunk_and_copy,
            donate=(1, *(number + 3 for number in donate)),
            options=overlap.CONCURRENT_OPTIONS if engine.device.platform == "gpu" else None,
            results=lambda places: (None, places[1], None),
            run=function,
            size=size,
            sparse=engine.sparse,
        )
        result, pool, self.blocks = run(args[0], pool, update, source, *args[1:])
        if pool is not None:
            paged.pool.replace(index, pool)
        return result


class _LayerRun:
    """Starts each layer of a prompt."""

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt,
        lengths: jax.Array,
        pieces: Sequence[tuple[jax.Array, int]],
    ):
        self._engine, self._prompt, self._lengths = engine, prompt, lengths
        self._pieces = pieces  # as the prompt's, on the device
        self._chunks = _PieceRun(engine, self._first_forecast, prompt.paged)

    def _first_forecast(
        self, arrays: Any, rope: RopeTable, x: jax.Array, kernel: jax.Array
    ) -> jax.Array:
        engine, config = self._engine, self._engine.model.config
        shape = (*x.shape[:2], config.num_kv_heads, config.head_dim)
        queries: jax.Array = engine.programs.plain(jnp.zeros, shape=shape, dtype=x.dtype)()
        for at, size in self._pieces:
            run = engine.programs.on_layer(first_forecast_piece, donate=(5,), size=size)
            queries = run(arrays, rope, x, kernel, at, queries)
        return queries

    def begin(
        self, index: int, x: jax.Array
    ) -> tuple[Callable[[jax.Array, jax.Array, int], jax.Array], LayerRow]:
        """Computes a layer's KV; returns how to advance a piece of x, and the cache for decode."""
        engine, programs = self._engine, self._engine.programs
        arrays, rope = engine.layers[index].arrays, engine.rope
        kv, block_size = self._past(index), engine.sparse.geometry.block_size
        for at, size in self._pieces:
            run = programs.on_layer(project_piece, donate=(4,), size=size, block_size=block_size)
            kv = run(arrays, rope, x, at, kv)
        if isinstance(kv, DenseCache):
            return lambda x, at, size: programs.on_layer(
                prefill.dense_chunk, donate=(2,), size=size
            )(arrays, rope, x, at, kv), kv
        cache = self._cache(index, kv)
        self._chunks.enter(index, x, kv, cache.compressed, self._lengths)
        return self._chunks.advance, cache

    def _past(self, index: int) -> LayerKV:
        """The KV of the bucket that is known, zeros for the rest."""
        prompt, (read, self._chunks.blocks) = self._prompt, (self._chunks.blocks, None)
        if read is not None:
            return read
        source = None if prompt.paged is None else prompt.paged.source(index)
        if source is not None:  # no layer before it to read beside
            dtype = self._engine.model.dtype.name
            blocks: jax.Array = self._engine.programs.plain(read_pages, dtype=dtype)(*source)
            return blocks
        return self._empty() if prompt.kept is None else prompt.kept(index)

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
        engine, paged = self._engine, self._prompt.paged
        run = engine.programs.plain(decode_caches, sparse=engine.sparse)
        cache: RowCache = run(kv, self._lengths, engine.choosers[index])
        stays = paged is None or paged.pool.layers[index] is None
        return dataclasses.replace(cache, blocks=kv) if stays else cache
