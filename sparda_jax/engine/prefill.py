"""Prefill, layer by layer: all tokens pass one layer, in chunks, before the next begins.

So only one layer's KV must be whole on the device at a time: it is attended, then it streams to the
host pool while the next layer computes. What is held instead are the hidden states of all tokens,
which are smaller than the KV of all layers by a factor of 2 L K H / D, and nothing of the prompt is
ever fetched back. Every layer runs the same two programs, so they are compiled once.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.block_sparse_attention import block_sparse_attention
from pallas_kernels.compressed_keys import compress_keys
from sparda_jax.config import SparseConfig
from sparda_jax.engine.decode import end_step
from sparda_jax.engine.state import DecodeState, DenseCache, LogProbabilities, Misses
from sparda_jax.forecast.projection import project
from sparda_jax.models.attention import chunk_attention, cudnn_serves, dense_attention
from sparda_jax.models.decoder import Decoder, DecoderLayer
from sparda_jax.models.rope import RopeTable, rope_rows
from sparda_jax.sparse.forecast import select_prefill_forecast
from sparda_jax.sparse.infinigen import Skew, partial_keys
from sparda_jax.sparse.infllm_v2 import select_prefill, to_blocks
from sparda_jax.sparse.nosa import block_bias, block_importance


def _pad_tokens(rows: Float[Array, "B T K H"], length: int) -> Float[Array, "B S K H"]:
    return jnp.pad(rows, ((0, 0), (0, length - rows.shape[1]), (0, 0), (0, 0)))


def _joined(parts: Float[Array, "X B T K H"]) -> Float[Array, "B XT K H"]:
    """Chunks one after the other."""
    rows = jnp.moveaxis(parts, 0, 1)
    return rows.reshape(rows.shape[0], -1, *rows.shape[3:])


def layer_keys_values(
    layer: DecoderLayer, rope: RopeTable, x: Float[Array, "B T D"], length: int, chunk: int
) -> DenseCache:
    """Keys and values of every token of the prompt, padded to ``length`` tokens.

    Chunk by chunk: the normed hidden states of all tokens would be as large as these themselves.
    """

    def part(start: Array) -> tuple[Array, Array]:
        some = jax.lax.dynamic_slice_in_dim(x, start, chunk, axis=1)
        positions = jnp.broadcast_to(start + jnp.arange(chunk), some.shape[:2])
        return layer.qkv(some, *rope_rows(rope, positions))[1:]

    k, v = jax.lax.map(part, jnp.arange(0, x.shape[1], chunk))
    return DenseCache(*(_pad_tokens(_joined(rows), length) for rows in (k, v)))


def layer_blocks(
    layer: DecoderLayer,
    rope: RopeTable,
    x: Float[Array, "B T D"],
    sparse: SparseConfig,
    num_blocks: int,
    chunk: int,
) -> tuple[Float[Array, "B K M 2 P H"], Float[Array, "B K C H"]]:
    """KV blocks and compressed keys of every token of the prompt.

    Rows past a prompt's end hold values of padding. No query sees them: they lie after every real
    position, and decode overwrites them.
    """
    size = sparse.geometry.block_size
    cache = layer_keys_values(layer, rope, x, num_blocks * size, chunk)
    compressed = compress_keys(cache.k.transpose(0, 2, 1, 3), sparse.geometry)
    return to_blocks(cache.k, cache.v, size), compressed


def blocks_bias(layer: DecoderLayer, kv: Float[Array, "B K M 2 P H"]) -> Float[Array, "B K M P"]:
    """NOSA's importance of every token, from the values of all KV heads; the layer must have it."""
    batch, heads, _, _, size, width = kv.shape
    values = kv[:, :, :, 1].transpose(0, 2, 3, 1, 4).reshape(batch, -1, heads, width)
    bias = layer.key_bias(values)
    assert bias is not None
    return block_bias(bias, size)


def _importance(
    layer: DecoderLayer, kv: Array, lengths: Array, sparse: SparseConfig
) -> tuple[Array | None, Array | None]:
    """Bias of attention, and the second criterion of selection; None for models without."""
    if layer.importance is None:
        return None, None
    bias = blocks_bias(layer, kv)
    return bias, block_importance(bias, lengths, sparse.geometry)


def _chunk(
    layer: DecoderLayer, rope: RopeTable, x: Array, start: Array, size: int
) -> tuple[Array, Array, Array]:
    """Hidden states, queries and positions of one chunk."""
    part = jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)
    positions = jnp.broadcast_to(start + jnp.arange(size, dtype=jnp.int32), part.shape[:2])
    q, _, _ = layer.qkv(part, *rope_rows(rope, positions))
    return part, q, positions


def dense_chunk(
    layer: DecoderLayer,
    rope: RopeTable,
    x: Float[Array, "B T D"],
    start: Int[Array, ""],
    cache: DenseCache,
    *,
    size: int,
) -> Float[Array, "B T D"]:
    """One chunk through the rest of the layer, with dense causal attention; x updated in place."""
    part, q, positions = _chunk(layer, rope, x, start, size)
    # cuDNN's causal mask is for queries and keys that start together.
    bias = layer.key_bias(cache.v)
    if size == x.shape[1] and bias is None and cudnn_serves(q):
        attention = dense_attention(q, cache.k[:, :size], cache.v[:, :size], None)
    else:
        attention = chunk_attention(q, cache.k, cache.v, positions, bias)
    return jax.lax.dynamic_update_slice_in_dim(x, layer.finish(part, attention), start, axis=1)


def sparse_chunk(
    layer: DecoderLayer,
    rope: RopeTable,
    x: Float[Array, "B T D"],
    start: Int[Array, ""],
    kv: Float[Array, "B K M 2 P H"],
    compressed: Float[Array, "B K C H"],
    lengths: Int[Array, " B"],
    *,
    size: int,
    sparse: SparseConfig,
) -> Float[Array, "B T D"]:
    """One chunk through the rest of the layer, over selected blocks; x updated in place."""
    part, q, positions = _chunk(layer, rope, x, start, size)
    bias, importance = _importance(layer, kv, lengths, sparse)
    selection = select_prefill(q, compressed, positions, lengths, sparse, kv.shape[2], importance)
    attention = block_sparse_attention(q, kv, selection.ids, positions, key_bias=bias)
    assert not isinstance(attention, tuple)  # only with return_lse
    return jax.lax.dynamic_update_slice_in_dim(x, layer.finish(part, attention), start, axis=1)


def first_forecast(
    layer: DecoderLayer,
    rope: RopeTable,
    x: Float[Array, "B T D"],
    kernel: Float[Array, "D KH"],
    chunk: int,
) -> Float[Array, "B T K H"]:
    """Forecast queries of every token for layer 0, by its own projection, chunk by chunk."""

    def part(start: Array) -> Array:
        some = jax.lax.dynamic_slice_in_dim(x, start, chunk, axis=1)
        positions = jnp.broadcast_to(start + jnp.arange(chunk), some.shape[:2])
        return project(kernel, layer.attention_norm(some), *rope_rows(rope, positions))

    return _joined(jax.lax.map(part, jnp.arange(0, x.shape[1], chunk)))


def forecast_chunk(
    layer: DecoderLayer,
    rope: RopeTable,
    x: Float[Array, "B T D"],
    forecast: Float[Array, "B T K H"],
    start: Int[Array, ""],
    kernel: Float[Array, "D KH"],
    kv: Float[Array, "B K M 2 P H"],
    compressed: Float[Array, "B K C H"],
    lengths: Int[Array, " B"],
    *,
    size: int,
    sparse: SparseConfig,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T K H"]]:
    """`sparse_chunk` with blocks that the layer before chose; x and forecast updated in place.

    Args:
      layer: parameters.
      rope: table that covers every position.
      x: hidden states of all tokens.
      forecast: in: queries for this layer's blocks; out, for this chunk: for the next layer's.
      start: first token of the chunk.
      kernel: the projection that runs in this layer.
      kv: blocks of the whole prompt.
      compressed: their compressed keys.
      lengths: prompt tokens per request.
      size: tokens of a chunk.
      sparse: selection rules.
    """
    part, q, positions = _chunk(layer, rope, x, start, size)
    queries = jax.lax.dynamic_slice_in_dim(forecast, start, size, axis=1)
    bias, importance = _importance(layer, kv, lengths, sparse)
    selection = select_prefill_forecast(
        queries, compressed, positions, lengths, sparse, kv.shape[2], importance=importance
    )
    following = project(kernel, layer.attention_norm(part), *rope_rows(rope, positions))
    attention = block_sparse_attention(q, kv, selection.ids, positions, key_bias=bias)
    assert not isinstance(attention, tuple)  # only with return_lse
    update = jax.lax.dynamic_update_slice_in_dim
    return (
        update(x, layer.finish(part, attention), start, axis=1),
        update(forecast, following.astype(forecast.dtype), start, axis=1),
    )


def decode_tail(
    kv: Float[Array, "B K M 2 P H"], lengths: Int[Array, " B"], *, sparse: SparseConfig
) -> tuple[Float[Array, "B K 2 2 P H"], Float[Array, "B K E H"]]:
    """The tail ring and the window of newest keys with which decode goes on.

    Args:
      kv: all blocks of the layer.
      lengths: prompt tokens per request.
      sparse: selection rules.

    Returns:
      `SparseCache.tail` and `SparseCache.window`.
    """
    batch, heads, num_blocks, _, size, width = kv.shape
    kernel = sparse.geometry.kernel_size
    current = lengths // size
    # Ring row r holds whichever of the current and the previous block has parity r.
    ring = jnp.stack([current - (current % 2 != row) for row in range(2)], axis=1)
    ring = jnp.clip(ring, 0, num_blocks - 1)
    tail = jnp.take_along_axis(kv, ring[:, None, :, None, None, None], axis=2)
    # Window row e holds the newest position p < length with p % kernel == e. Rows of positions
    # before 0 are never read: a window is complete only once `kernel` keys were written.
    newest = lengths[:, None] - 1
    position = jnp.maximum(newest - (newest - jnp.arange(kernel)) % kernel, 0)
    keys = kv[:, :, :, 0].reshape(batch, heads, num_blocks * size, width)
    return tail, jnp.take_along_axis(keys, position[:, None, :, None], axis=2)


def partial_cache(kv: Float[Array, "B K M 2 P H"], skew: Skew) -> Float[Array, "B K S E"]:
    """InfiniGen's partial keys of all M*P positions."""
    return partial_keys(kv[:, :, :, 0].reshape(*kv.shape[:2], -1, kv.shape[-1]), skew)


def empty_slots(
    *, shape: tuple[int, ...], dtype: jnp.dtype, selected: int
) -> tuple[Float[Array, "B K Z 2 P H"], Int[Array, "B K Z"], Int[Array, "B K Z"], Misses]:
    """Device slots that hold nothing, their block ids, when they were last used, and no misses.

    Args:
      shape: of the slots.
      dtype: likewise.
      selected: blocks that a KV head can miss in one step.
    """
    none = jnp.full(shape[:3], -1, jnp.int32)
    runs = jnp.zeros(shape[0] * shape[1] * selected, jnp.int32)
    return jnp.zeros(shape, dtype), none, none, Misses(runs, runs, jnp.zeros((), jnp.int32))


def embed(model: Decoder, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Hidden states before the first layer."""
    return model.embed(tokens)


def first_token(
    model: Decoder, x: Float[Array, "B T D"], state: DecodeState, *, top_logprobs: int
) -> tuple[DecodeState, Int[Array, " B"], Bool[Array, " B"], LogProbabilities]:
    """Draws the first token of each request from the hidden state of its last prompt token.

    Args:
      model: parameters.
      x: hidden states after the last layer.
      state: the batch, without caches; `lengths` are those of the prompts.
      top_logprobs: likeliest tokens to report, where a request wants log-probabilities.

    Returns:
      The state after that token, the tokens, which of them were emitted, and how likely they were.
    """
    last = jnp.take_along_axis(x, (state.lengths - 1)[:, None, None], axis=1)
    # A decode step whose token was the last one of the prompt, hence at position length - 1.
    state = dataclasses.replace(state, lengths=state.lengths - 1)
    return end_step(model, last, state, top_logprobs)
