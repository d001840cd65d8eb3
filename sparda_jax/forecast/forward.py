"""Whole-sequence forward with Forecast selection, for use inside the caller's own jit."""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp

from pallas_kernels.block_sparse_attention import block_sparse_attention
from pallas_kernels.compressed_keys import compress_keys
from sparda_jax.config import SparseConfig
from sparda_jax.forecast.projection import Forecast
from sparda_jax.models.decoder import Decoder
from sparda_jax.models.rope import rope_at
from sparda_jax.sparse.forecast import check_lookahead, select_forecast, visible_windows
from sparda_jax.sparse.infllm_v2 import select_prefill, to_blocks
from sparda_jax.sparse.nosa import block_bias, block_importance
from sparda_jax.typing import Array, Float, Int


def sparda_logits(
    model: Decoder,
    forecast: Forecast,
    tokens: Int[Array, "B T"],
    *,
    sparse: SparseConfig,
    lengths: Int[Array, " B"] | None = None,
    prompt_lengths: Int[Array, " B"] | None = None,
    max_length: int | None = None,
) -> Float[Array, "B T V"]:
    """Logits of whole sequences in `sparda` mode; see `sparda_forward` for the arguments."""
    logits, _ = sparda_forward(
        model,
        forecast,
        tokens,
        sparse=sparse,
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        max_length=max_length,
    )
    return logits


def sparda_forward(
    model: Decoder,
    forecast: Forecast,
    tokens: Int[Array, "B T"],
    *,
    sparse: SparseConfig,
    lengths: Int[Array, " B"] | None = None,
    prompt_lengths: Int[Array, " B"] | None = None,
    max_length: int | None = None,
    forecast_prompt: bool = True,
    mask_future: bool = True,
) -> tuple[Float[Array, "B T V"], Int[Array, "L B K T R"]]:
    """Logits and selections of whole sequences, without a cache.

    Args:
        model: the frozen decoder.
        forecast: its projections.
        tokens: token ids, padded at the end where sequences differ in length.
        sparse: the policy.
        lengths: valid tokens per row; None: all. What stands past them means nothing.
        prompt_lengths: tokens of each row that count as prompt; those after them select as decode
            steps do (teacher forcing). None: all of them.
        max_length: the requested maximum length, which fixes LongRoPE's factors; None: what the
            model declares. Static.
        forecast_prompt: False: the prompt's tokens select by the model's own queries, and only
            decode steps by Forecast.
        mask_future: False: a block after the query's own can take a place in a prompt token's
            selection, as in the public code; for tests against it.

    Raises:
        ValueError: more tokens than `max_length`; a policy that `check_lookahead` refuses.
        NotImplementedError: `prompt_lengths` with a `dense_len`, under which a row would change
            from dense to sparse on the way.
    """
    check_lookahead(sparse)
    if sparse.dense_len and prompt_lengths is not None:
        raise NotImplementedError(f"prompt_lengths with dense_len {sparse.dense_len}: only 0")
    batch, count = tokens.shape
    limit = model.config.max_position_embeddings if max_length is None else max_length
    if count > limit:
        raise ValueError(f"{count} tokens exceed the maximum length of {limit}")
    positions = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (batch, count))
    lengths = jnp.full((batch,), count, jnp.int32) if lengths is None else lengths
    ends = lengths if prompt_lengths is None else prompt_lengths
    visible = visible_windows(positions, ends, sparse.geometry)
    dense = None if sparse.dense_len == 0 else lengths < sparse.dense_len
    cos, sin = rope_at(model.config.rope, positions, limit)
    x, queries, selected = model.embed(tokens), None, []
    for index, layer in enumerate(model.layers):
        normed = layer.attention_norm(x)
        if queries is None:
            queries = forecast.first(normed, cos, sin)
        q, k, v = layer.qkv(x, cos, sin)
        kv = to_blocks(k, v, sparse.geometry.block_size)
        keys = kv[:, :, :, 0].reshape(*kv.shape[:2], -1, k.shape[-1])
        compressed = compress_keys(keys, sparse.geometry)
        values_bias = layer.key_bias(v)
        bias = importance = None
        if values_bias is not None:
            bias = block_bias(values_bias, sparse.geometry.block_size)
            importance = block_importance(bias, lengths, sparse.geometry)
        ids = select_forecast(
            *(queries, compressed, positions, visible, sparse, kv.shape[2]),
            dense=dense,
            mask_future=mask_future,
            importance=importance,
        ).ids
        if not forecast_prompt:
            own = select_prefill(
                q, compressed, positions, lengths, sparse, kv.shape[2], importance
            ).ids
            ids = jnp.where((positions < ends[:, None])[:, None, :, None], own, ids)
        attention = cast(jax.Array, block_sparse_attention(q, kv, ids, positions, key_bias=bias))
        selected.append(ids)
        queries = forecast.layers[index](normed, cos, sin)
        x = layer.finish(x, attention)
    return model.logits(x), jnp.stack(selected)
