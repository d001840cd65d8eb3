"""The aligned part of a prompt: block-causal, all layers of a chunk in one program."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_kernels.block_sparse_attention import block_sparse_attention
from sparda_jax.diffusion.attention import pack
from sparda_jax.diffusion.confidence import confidence
from sparda_jax.diffusion.config import diffusion_of
from sparda_jax.diffusion.masks import last_visible
from sparda_jax.diffusion.state import LayerKV
from sparda_jax.engine.state import SamplingState
from sparda_jax.models.decoder import Decoder
from sparda_jax.models.rope import RopeTable, rope_rows
from sparda_jax.typing import Array, Float, Int


def empty_caches(
    *, shape: tuple[int, ...], layers: int, size: int, dtype: jnp.dtype
) -> tuple[tuple[LayerKV, ...], Float[Array, "B D"]]:
    """What `prefill_chunk` begins with: caches of this shape, one a layer, and `last`.

    Args:
        shape: `[B, K, M, 2, P, H]`.
        layers: L.
        size: D.
        dtype: of both.
    """
    caches = tuple(jnp.zeros(shape, dtype) for _ in range(layers))
    return caches, jnp.zeros((shape[0], size), dtype)


def prefill_chunk(
    model: Decoder,
    rope: RopeTable,
    tokens: Int[Array, "B T"],
    start: Int[Array, ""],
    aligned: Int[Array, " B"],
    layers: tuple[LayerKV, ...],
    last: Float[Array, "B D"],
) -> tuple[tuple[LayerKV, ...], Float[Array, "B D"]]:
    """Writes the KV of T tokens at `start`; whole KV blocks.

    Rows past a request's aligned length are written too; they are never attended, and the
    commits of its blocks take their place.

    Args:
        model: parameters.
        rope: table that covers every position.
        tokens: of the chunk.
        start: position of the first, a multiple of the KV block.
        aligned: whole diffusion blocks of each prompt, tokens.
        layers: the caches; donate them.
        last: hidden states of the last aligned token of rows whose chunk it was.

    Returns:
        The caches and `last`, with the rows filled whose last aligned token is in this chunk.
    """
    facts, _ = diffusion_of(model.config)
    batch, count = tokens.shape
    heads, blocks, size = layers[0].shape[1], layers[0].shape[2], layers[0].shape[4]
    positions = jnp.broadcast_to(start + jnp.arange(count, dtype=jnp.int32), (batch, count))
    cos, sin = rope_rows(rope, positions)
    seen = last_visible(positions, facts.block_size, causal=facts.causal_clean)
    number = jnp.arange(blocks, dtype=jnp.int32)
    ids = jnp.where(number <= seen[..., None] // size, number, -1)
    ids = jnp.broadcast_to(ids[:, None], (batch, heads, count, blocks))
    x, written = model.embed(tokens), []
    for layer, cache in zip(model.layers, layers, strict=True):
        q, k, v = layer.qkv(x, cos, sin)
        own = pack(k, v).reshape(batch, heads, 2, count // size, size, -1).swapaxes(2, 3)
        cache = lax.dynamic_update_slice_in_dim(cache, own, start // size, axis=2)
        written.append(cache)
        attention = block_sparse_attention(q, cache, ids, seen)
        assert not isinstance(attention, tuple)  # no log-sum-exp was asked for
        x = layer.finish(x, attention)
    offset = aligned - 1 - start
    row = jnp.take_along_axis(x, jnp.clip(offset, 0, count - 1)[:, None, None], axis=1)[:, 0]
    here = (offset >= 0) & (offset < count)
    return tuple(written), jnp.where(here[:, None], row, last)


def first_handover(
    model: Decoder,
    last: Float[Array, "B D"],
    aligned: Int[Array, " B"],
    sampling: SamplingState,
) -> Int[Array, " B"]:
    """The token after the aligned prompt, from the logits of its last one (Fast-dLLM v2)."""
    _, mask_token_id = diffusion_of(model.config)
    zeros = jnp.zeros_like(aligned)
    found = confidence(model, last[:, None], mask_token_id, sampling, aligned[:, None], zeros)
    return found.token[:, 0]
