"""One token a request: the step, and n steps as one program."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from host_offload.fetch import Fetcher, ProgramFetcher
from host_offload.host_pool import PoolLayer
from sparda_jax.config import SparseConfig
from sparda_jax.engine import cache as caches
from sparda_jax.engine.choosers import Chooser, own_choosers
from sparda_jax.engine.phases import TracedPhases, run_layers
from sparda_jax.engine.sampling import log_probabilities, no_log_probabilities, sample
from sparda_jax.engine.state import (
    DecodeState,
    DenseCache,
    LayerCache,
    LogProbabilities,
    Step,
    StepOutput,
)
from sparda_jax.models.attention import attention_bias
from sparda_jax.models.decoder import Decoder, DecoderLayer
from sparda_jax.models.rope import RopeTable, rope_rows


def begin_step(model: Decoder, rope: RopeTable, state: DecodeState) -> tuple[Array, Step]:
    """Embeds the newest tokens; returns ``[B, 1, D]`` and what the layers need."""
    cos, sin = rope_rows(rope, state.lengths[:, None])
    step = Step(state.lengths, state.active, cos, sin, state.pages)
    return model.embed(state.last_token[:, None]), step


def _dense_layer(
    layer: DecoderLayer, x: Float[Array, "B 1 D"], cache: DenseCache, step: Step
) -> tuple[Float[Array, "B 1 D"], DenseCache]:
    q, k, v = layer.qkv(x, step.cos, step.sin)
    cache = caches.append_dense(cache, k[:, 0], v[:, 0], step.position)
    bias = layer.key_bias(cache.v)
    attention = jax.nn.dot_product_attention(
        q,
        cache.k,
        cache.v,
        None if bias is None else attention_bias(bias, q.shape[2]),
        key_value_seq_lengths=step.position + 1,
    )
    return layer.finish(x, attention), cache


def end_step(
    model: Decoder, x: Float[Array, "B 1 D"], state: DecodeState, top_logprobs: int
) -> tuple[DecodeState, Int[Array, " B"], Bool[Array, " B"], LogProbabilities]:
    """Logits, the next token, and the state advanced by one token (caches untouched).

    Also ends prefill, which is a step whose token at `lengths` was the last of the prompt.

    Args:
      model: parameters.
      x: hidden states of the token at position `lengths`.
      state: the batch.
      top_logprobs: likeliest tokens to report, where a request wants log-probabilities.

    Returns:
      The state, the tokens, which of them were emitted, and how likely they were.
    """
    logits = model.logits(x)[:, 0]
    finite = jnp.all(jnp.isfinite(logits), axis=-1)
    emitted = state.active & finite
    tokens = sample(logits, state.sampling, state.lengths + 1)
    stops = jnp.any(tokens[:, None] == state.sampling.stop_ids, axis=-1)
    remaining = state.remaining - emitted
    advanced = dataclasses.replace(
        state,
        lengths=state.lengths + emitted,
        last_token=jnp.where(emitted, tokens, state.last_token),
        active=emitted & ~stops & (remaining > 0),
        failed=state.failed | (state.active & ~finite),
        remaining=remaining,
    )
    logprobs = log_probabilities(logits, tokens, state.sampling, top_logprobs)
    return advanced, tokens, emitted, logprobs


def decode_step(
    model: Decoder,
    rope: RopeTable,
    state: DecodeState,
    fetcher: Fetcher | None,
    sparse: SparseConfig | None,
    num_blocks: int,
    choosers: tuple[Chooser, ...],
    prefetch: bool,
    top_logprobs: int,
) -> tuple[DecodeState, StepOutput]:
    """Decodes one token for every active request; arguments as those of `decode_steps`.

    Args:
      model: parameters.
      rope: table that covers every position.
      state: the batch.
      fetcher: where missed blocks come from; None when the KV is resident.
      sparse: selection rules; None is dense attention.
      num_blocks: M, blocks a sequence can hold.
      choosers: of each layer.
      prefetch: fetch what was chosen ahead behind the layer in front.
      top_logprobs: likeliest tokens to report.
    """
    x, step = begin_step(model, rope, state)
    counts = [jnp.zeros((), jnp.int32)] * 3
    layers: tuple[LayerCache, ...]
    if sparse is None:
        dense = []
        for layer, cache in zip(model.layers, state.layers, strict=True):
            assert isinstance(cache, DenseCache)
            x, cache = _dense_layer(layer, x, cache, step)
            dense.append(cache)
        layers = tuple(dense)
    else:
        phases = TracedPhases(model, choosers, fetcher, step, sparse, num_blocks, prefetch)
        x, layers, plans = run_layers(phases, x, state.layers, choosers)
        counts = [
            sum((getattr(plan, name) for plan in plans), counts[0])
            for name in ("free", "hits", "fetched")
        ]
    state, tokens, emitted, logprobs = end_step(model, x, state, top_logprobs)
    output = StepOutput(tokens, emitted, logprobs, *counts)
    return dataclasses.replace(state, layers=layers), output


def decode_steps(
    model: Decoder,
    rope: RopeTable,
    pool: tuple[PoolLayer | None, ...] | None,
    state: DecodeState,
    choosers: tuple[Chooser, ...] | None = None,
    *,
    steps: int,
    sparse: SparseConfig | None,
    num_blocks: int,
    prefetch: bool = True,
    top_logprobs: int = 0,
) -> tuple[DecodeState, StepOutput]:
    """Decodes up to ``steps`` tokens a request, all in the program that calls it.

    Traces inside any `jax.jit`: the engine compiles it ahead of time, users may call it in their
    own. The host pool is read only; a tail block that fills stays in the tail ring, and the caller
    writes it back before it decodes ``P`` more tokens. Hence ``steps <= P`` when offloaded.

    Args:
      model: parameters.
      rope: table that covers every position.
      pool: L host pools, None for a layer whose KV is resident; None when all are.
      state: the batch; donate it.
      choosers: who chooses the blocks of each layer (`forecast_choosers`); None: its own queries.
      steps: n, static.
      sparse: selection rules; None is dense attention.
      num_blocks: M, blocks a sequence can hold.
      prefetch: fetch what was chosen ahead behind the layer in front; on a GPU, side by side only
        in programs compiled with `host_offload.overlap.CONCURRENT_OPTIONS`.
      top_logprobs: likeliest tokens to report, where a request wants log-probabilities.

    Returns:
      The state and the outputs of the steps stacked on a leading axis of size n. Steps after the
      last request finished are not run; their `emitted` is False.

    Raises:
      ValueError: more steps than a block has tokens, with a host pool.
    """
    if pool is not None and sparse is not None and steps > sparse.geometry.block_size:
        raise ValueError(
            f"steps per call must not exceed the block size {sparse.geometry.block_size} "
            f"when KV is offloaded, got {steps}"
        )
    fetcher = None if pool is None else ProgramFetcher(pool)
    choosers = own_choosers(len(model.layers)) if choosers is None else choosers

    def one(state: DecodeState) -> tuple[DecodeState, StepOutput]:
        return decode_step(
            model, rope, state, fetcher, sparse, num_blocks, choosers, prefetch, top_logprobs
        )

    batch = state.lengths.shape[0]
    outputs = StepOutput(
        tokens=jnp.zeros((steps, batch), jnp.int32),
        emitted=jnp.zeros((steps, batch), bool),
        logprobs=jax.tree.map(
            lambda leaf: jnp.zeros((steps, *leaf.shape), leaf.dtype),
            no_log_probabilities(batch, top_logprobs),
        ),
        free=jnp.zeros((steps,), jnp.int32),
        hits=jnp.zeros((steps,), jnp.int32),
        fetched=jnp.zeros((steps,), jnp.int32),
    )

    def unfinished(carry: tuple) -> Array:
        index, state, _ = carry
        return (index < steps) & jnp.any(state.active)

    def body(carry: tuple) -> tuple:
        index, state, outputs = carry
        state, output = one(state)
        outputs = jax.tree.map(lambda all_, new: all_.at[index].set(new), outputs, output)
        return index + 1, state, outputs

    carry = (jnp.zeros((), jnp.int32), state, outputs)
    _, state, outputs = jax.lax.while_loop(unfinished, body, carry)
    return state, outputs
