"""One token a request: the layer's two phases, the step, and n steps as one program.

A sparse layer runs in two phases with the fetch between them: `select_layer` (project, compress,
choose blocks, plan slots) and `attend_layer` (attention over slots and tail, output, MLP). Composed
in one program they are `decode_steps`; run as separate programs, with the host in between, they
serve the eager fetcher (`sparda_jax.engine.eager`).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from host_offload.fetch import Fetcher, ProgramFetcher
from host_offload.slot_cache import assign_slots, compact_misses
from pallas_kernels.pool_attention import pool_attention
from sparda_jax.config import SparseConfig
from sparda_jax.engine import cache as caches
from sparda_jax.engine.sampling import sample
from sparda_jax.engine.state import DecodeState, DenseCache, SparseCache, StepOutput
from sparda_jax.models.decoder import Decoder, DecoderLayer
from sparda_jax.models.rope import RopeTable, rope_rows
from sparda_jax.sparse.infllm_v2 import select_decode


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Step:
    """What every layer of one decode step needs to know.

    Attributes:
      position: of the token being decoded.
      active: rows that still generate; the others select and fetch nothing.
      cos: RoPE rows.
      sin: RoPE rows.
    """

    position: Int[Array, " B"]
    active: Bool[Array, " B"]
    cos: Float[Array, "B 1 H"]
    sin: Float[Array, "B 1 H"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """What one layer attends and what must be fetched for it.

    Attributes:
      rows: rows of `SparseCache.blocks` to attend, ascending by block id, -1 for none.
      source: flat run index in the host pool of each missed (block, KV head).
      target: flat run index in the slots, likewise.
      fetched: how many of `source` and `target` count.
      free: selected blocks that no rule forced.
      hits: how many of those were on the device already.
    """

    rows: Int[Array, "B K R"]
    source: Int[Array, " A"]
    target: Int[Array, " A"]
    fetched: Int[Array, ""]
    free: Int[Array, ""]
    hits: Int[Array, ""]


def begin_step(model: Decoder, rope: RopeTable, state: DecodeState) -> tuple[Array, Step]:
    """Embeds the newest tokens; returns ``[B, 1, D]`` and what the layers need."""
    cos, sin = rope_rows(rope, state.lengths[:, None])
    step = Step(position=state.lengths, active=state.active, cos=cos, sin=sin)
    return model.embed(state.last_token[:, None]), step


def _plan(
    cache: SparseCache, ids: Int[Array, "B K R"], step: Step, sparse: SparseConfig, num_blocks: int
) -> tuple[SparseCache, Plan]:
    """Turns selected block ids into rows to attend, and moves or requests what is missing."""
    size = sparse.geometry.block_size
    block = (step.position // size)[:, None, None]
    wanted = jnp.where((ids == block) | ~step.active[:, None, None], -1, ids)
    # The tail block has the highest id: what falls away here is it, or padding. One column stays,
    # since arrays of size zero have no maximum.
    wanted = wanted[..., : max(min(ids.shape[2], num_blocks) - 1, 1)]
    present = wanted >= 0
    free = present & (wanted >= sparse.init_blocks) & (wanted < block - sparse.local_blocks)
    if cache.slot_blocks is None:
        # Resident: a block joins the others when the next one begins.
        begins = (step.position % size == 0)[:, None] & (block[..., 0] > 0)
        moved = jnp.broadcast_to(jnp.where(begins, block[..., 0] - 1, -1), wanted.shape[:2])
        none = jnp.zeros((), jnp.int32)
        empty = jnp.zeros((0,), jnp.int32)
        plan = Plan(wanted, empty, empty, none, jnp.sum(free), jnp.sum(free))
    else:
        slots = assign_slots(cache.slot_blocks, wanted)
        # The block before the tail block is still in the tail ring, and inside one program of
        # several steps perhaps not yet on the host: a miss of it never goes there.
        in_ring = slots.miss & (wanted == block - 1)
        moved = jnp.max(jnp.where(in_ring, slots.slot_ids, -1), axis=-1)
        from_host = slots.miss & ~in_ring
        source, target, count = compact_misses(
            dataclasses.replace(slots, miss=from_host), wanted, num_blocks=num_blocks
        )
        hits = jnp.sum(free & ~from_host)
        plan = Plan(slots.slot_ids, source, target, count, jnp.sum(free), hits)
        cache = dataclasses.replace(cache, slot_blocks=slots.slot_blocks)
    return caches.move_previous_block(cache, step.position, moved, size), plan


def select_layer(
    layer: DecoderLayer,
    x: Float[Array, "B 1 D"],
    cache: SparseCache,
    step: Step,
    sparse: SparseConfig,
    num_blocks: int,
) -> tuple[Float[Array, "B 1 N H"], SparseCache, Plan]:
    """First phase: projections, cache update, block selection, slot plan.

    Args:
      layer: parameters.
      x: hidden states.
      cache: the layer's cache.
      step: positions and RoPE rows.
      sparse: selection rules.
      num_blocks: M, blocks a sequence can hold.

    Returns:
      Queries, the cache with the new token, and what to attend and fetch.
    """
    q, k, v = layer.qkv(x, step.cos, step.sin)
    k, v = k[:, 0], v[:, 0]
    cache = caches.append_compressed(cache, k, step.position, sparse.geometry)
    selection = select_decode(q, cache.compressed, step.position + 1, sparse, num_blocks)
    cache, plan = _plan(cache, selection.ids[:, :, 0], step, sparse, num_blocks)
    cache = caches.append_tail(cache, k, v, step.position, sparse.geometry.block_size)
    return q, cache, plan


def attend_layer(
    layer: DecoderLayer,
    x: Float[Array, "B 1 D"],
    q: Float[Array, "B 1 N H"],
    cache: SparseCache,
    rows: Int[Array, "B K R"],
    step: Step,
    block_size: int,
) -> Float[Array, "B 1 D"]:
    """Second phase: attention over the selected blocks and the tail block, output, MLP."""
    tail, mask = caches.tail_block(cache, step.position, block_size)
    attention = pool_attention(q, cache.blocks, rows, tail, mask)
    assert not isinstance(attention, tuple)  # only with return_lse
    return layer.finish(x, attention)


def _dense_layer(
    layer: DecoderLayer, x: Float[Array, "B 1 D"], cache: DenseCache, step: Step
) -> tuple[Float[Array, "B 1 D"], DenseCache]:
    q, k, v = layer.qkv(x, step.cos, step.sin)
    cache = caches.append_dense(cache, k[:, 0], v[:, 0], step.position)
    attention = jax.nn.dot_product_attention(
        q, cache.k, cache.v, key_value_seq_lengths=step.position + 1
    )
    return layer.finish(x, attention), cache


def end_step(
    model: Decoder, x: Float[Array, "B 1 D"], state: DecodeState
) -> tuple[DecodeState, Int[Array, " B"], Bool[Array, " B"]]:
    """Logits, the next token, and the state advanced by one token (caches untouched).

    Also ends prefill, which is a step whose token at `lengths` was the last of the prompt.

    Args:
      model: parameters.
      x: hidden states of the token at position `lengths`.
      state: the batch.

    Returns:
      The state, the tokens, and which of them were emitted.
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
    return advanced, tokens, emitted


def decode_step(
    model: Decoder,
    rope: RopeTable,
    state: DecodeState,
    fetcher: Fetcher | None,
    sparse: SparseConfig | None,
    num_blocks: int,
) -> tuple[DecodeState, StepOutput]:
    """Decodes one token for every active request.

    Args:
      model: parameters.
      rope: table that covers every position.
      state: the batch.
      fetcher: where missed blocks come from; None when the KV is resident.
      sparse: selection rules; None is dense attention.
      num_blocks: M, blocks a sequence can hold.
    """
    x, step = begin_step(model, rope, state)
    layers = []
    zero = jnp.zeros((), jnp.int32)
    free, hits, fetched = zero, zero, zero
    for index, (layer, cache) in enumerate(zip(model.layers, state.layers, strict=True)):
        if isinstance(cache, DenseCache):
            x, cache = _dense_layer(layer, x, cache, step)
        else:
            assert sparse is not None
            q, cache, plan = select_layer(layer, x, cache, step, sparse, num_blocks)
            if fetcher is not None:
                blocks = fetcher.fetch(index, cache.blocks, plan.source, plan.target, plan.fetched)
                cache = dataclasses.replace(cache, blocks=blocks)
            x = attend_layer(layer, x, q, cache, plan.rows, step, sparse.geometry.block_size)
            free, hits = free + plan.free, hits + plan.hits
            fetched = fetched + plan.fetched
        layers.append(cache)
    state, tokens, emitted = end_step(model, x, state)
    state = dataclasses.replace(state, layers=tuple(layers))
    return state, StepOutput(tokens, emitted, free, hits, fetched)


def decode_steps(
    model: Decoder,
    rope: RopeTable,
    pool: tuple[Float[Array, "B K M 2 P H"], ...] | None,
    state: DecodeState,
    *,
    steps: int,
    sparse: SparseConfig | None,
    num_blocks: int,
) -> tuple[DecodeState, StepOutput]:
    """Decodes up to ``steps`` tokens a request, all in the program that calls it.

    Traces inside any `jax.jit`: the engine compiles it ahead of time, users may call it in their
    own. The host pool is read only; a tail block that fills stays in the tail ring, and the caller
    writes it back before it decodes ``P`` more tokens. Hence ``steps <= P`` when offloaded.

    Args:
      model: parameters.
      rope: table that covers every position.
      pool: L host arrays; None when the KV is resident.
      state: the batch; donate it.
      steps: n, static.
      sparse: selection rules; None is dense attention.
      num_blocks: M, blocks a sequence can hold.

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

    def one(state: DecodeState) -> tuple[DecodeState, StepOutput]:
        return decode_step(model, rope, state, fetcher, sparse, num_blocks)

    batch = state.lengths.shape[0]
    outputs = StepOutput(
        tokens=jnp.zeros((steps, batch), jnp.int32),
        emitted=jnp.zeros((steps, batch), bool),
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
