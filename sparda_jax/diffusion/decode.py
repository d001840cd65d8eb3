"""Denoising: one forward of every row's block, and several blocks as one program.

A row whose block still has masks denoises; a row whose block has none commits: the same forward,
on its final tokens, writes the block's KV and the row goes on to the next block. So rows at
different steps, blocks and rules share one program, and no forward waits for the host.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from sparda_jax.config import DiffusionConfig
from sparda_jax.diffusion.attention import attend, block_mask, dense_prefix, pack, write_block
from sparda_jax.diffusion.confidence import Confidence, confidence
from sparda_jax.diffusion.config import diffusion_of
from sparda_jax.diffusion.state import BlockOutput, BlockState, ForwardOutput, LayerKV
from sparda_jax.diffusion.strategies import candidates, choose
from sparda_jax.models.decoder import Decoder
from sparda_jax.models.rope import RopeTable, rope_rows
from sparda_jax.typing import Array, Bool, Float, Int


def refreshed_rows(state: BlockState) -> Bool[Array, "B W"]:
    """Rows whose KV is taken from this forward; the others keep that of an earlier one.

    The dual cache of Fast-dLLM v2: all rows in a sub-block's first forward and as long as its first
    token is masked, then those of the sub-block alone; all when the block is committed.
    """
    open_, sub = candidates(state.masked, state.rule.sub_block)
    size = state.rule.sub_block[:, None]
    index = jnp.arange(state.tokens.shape[1])
    first_open = jnp.any(open_ & (index == sub[:, None] * size), axis=1)
    whole = (sub != state.last_sub) | first_open | ~jnp.any(state.masked, axis=1)
    return whole[:, None] | (index // size == sub[:, None])


def run_layers(
    model: Decoder,
    rope: RopeTable,
    state: BlockState,
    committing: Bool[Array, " B"],
    refreshed: Bool[Array, "B W"] | None,
    mask_token_id: int,
) -> tuple[Float[Array, "B W D"], tuple[LayerKV, ...], tuple[Array, ...] | None]:
    """All layers over every row's block; caches change for the rows that commit.

    Args:
        model: parameters.
        rope: table that covers every position.
        state: the batch.
        committing: rows whose KV is written.
        refreshed: rows whose KV is taken from this forward; None: all, nothing of it is kept.
        mask_token_id: what masked positions are embedded as.

    Returns:
        Hidden states, the caches, and the KV of the block where `refreshed` is given.
    """
    facts, _ = diffusion_of(model.config)
    width = state.tokens.shape[1]
    positions = state.start[:, None] + jnp.arange(width)
    cos, sin = rope_rows(rope, positions)
    own_mask = block_mask(committing, width, causal_clean=facts.causal_clean)
    x = model.embed(jnp.where(state.masked, mask_token_id, state.tokens))
    layers, kept = [], []
    for number, layer in enumerate(model.layers):
        q, k, v = layer.qkv(x, cos, sin)
        own = pack(k, v)
        if refreshed is not None:
            assert state.block_kv is not None
            own = jnp.where(refreshed[:, None, None, :, None], own, state.block_kv[number])
            kept.append(own)
        cache = state.layers[number]
        x = layer.finish(x, attend(q, dense_prefix(cache, state.start), own, own_mask))
        layers.append(write_block(cache, own, state.start, committing))
    return x, tuple(layers), tuple(kept) if refreshed is not None else None


def _shifted(found: Confidence) -> Confidence:
    """Row i-1 predicts token i; row 0 also stands for itself, where nothing comes before it."""
    return jax.tree.map(lambda rows: jnp.concatenate([rows[:, :1], rows[:, :-1]], axis=1), found)


def _stop_before_masks(state: BlockState, tokens: Array, masked: Array) -> Bool[Array, " B"]:
    """Whether a generated stop token has no mask before it in the block."""
    index = jnp.arange(tokens.shape[1])
    stops = jnp.any(tokens[..., None] == state.sampling.stop_ids[:, None], axis=-1)
    stops &= ~masked & (state.start[:, None] + index >= state.prompt_length[:, None])
    first_mask = jnp.where(jnp.any(masked, axis=1), jnp.argmax(masked, axis=1), len(index))
    first_stop = jnp.where(jnp.any(stops, axis=1), jnp.argmax(stops, axis=1), len(index))
    return first_stop < first_mask


def forward(model: Decoder, rope: RopeTable, state: BlockState) -> tuple[BlockState, ForwardOutput]:
    """Runs every active row's block once: denoises it, or commits it and begins the next.

    Args:
        model: parameters; `model.config.diffusion` says the block size and the mask token.
        rope: table that covers every position.
        state: the batch.
    """
    _, mask_token_id = diffusion_of(model.config)
    committing = finished_rows(state)
    refreshed = None if state.block_kv is None else refreshed_rows(state)
    x, layers, block_kv = run_layers(model, rope, state, committing, refreshed, mask_token_id)
    state = dataclasses.replace(state, layers=layers, block_kv=block_kv)
    return settle(model, state, x, committing)


def finished_rows(state: BlockState) -> Bool[Array, " B"]:
    """Rows whose block has no mask left: their next forward commits it."""
    return state.active & ~jnp.any(state.masked, axis=1)


def settle(
    model: Decoder, state: BlockState, x: Float[Array, "B W D"], committing: Bool[Array, " B"]
) -> tuple[BlockState, ForwardOutput]:
    """What a forward decides, once the layers have run.

    Args:
        model: its norm and head.
        state: as the layers met it, their caches up to date.
        x: hidden states of the block after the last layer.
        committing: rows whose block was finished before.
    """
    facts, mask_token_id = diffusion_of(model.config)
    open_, sub = candidates(state.masked, state.rule.sub_block)
    positions = state.start[:, None] + jnp.arange(x.shape[1])
    predicted = positions + (1 if facts.logit_shift else 0)
    raw = confidence(model, x, mask_token_id, state.sampling, predicted, state.step)
    found = _shifted(raw) if facts.logit_shift else raw
    healthy = state.active & jnp.all(raw.finite, axis=1)
    committing &= healthy
    decided = choose(found.probability, found.entropy, open_, state.step, state.rule)
    decided &= (healthy & ~committing)[:, None]
    tokens = jnp.where(decided, found.token, state.tokens)
    masked = state.masked & ~decided
    stopped = _stop_before_masks(state, tokens, masked)
    enough = ~jnp.any(masked & (positions < state.limit[:, None]), axis=1)
    enough &= state.start + tokens.shape[1] >= state.limit
    early = (state.rule.early_stop & stopped) | (state.rule.early_limit & enough)
    ended = healthy & ~committing & early
    changed = dataclasses.replace(
        state,
        tokens=tokens,
        masked=masked,
        step=state.step + (healthy & ~committing),
        last_sub=jnp.where(healthy & ~committing, sub, state.last_sub),
        active=healthy & ~ended,
        failed=state.failed | (state.active & ~healthy),
    )
    handover = jnp.where(committing & facts.logit_shift, raw.token[:, -1], -1)
    output = ForwardOutput(
        found.token, found.probability, found.entropy, decided, committing, ended, handover
    )
    return _begin_next(changed, facts, committing, handover, stopped), output


def _begin_next(
    state: BlockState,
    facts: DiffusionConfig,
    committing: Bool[Array, " B"],
    handover: Int[Array, " B"],
    stopped: Bool[Array, " B"],
) -> BlockState:
    """Moves the rows that committed to their next block, or ends their requests."""
    width = state.tokens.shape[1]
    start = state.start + jnp.where(committing, width, 0)
    known = start
    if facts.logit_shift:
        known = start + 1
        stopped = stopped | jnp.any(handover[:, None] == state.sampling.stop_ids, axis=1)
    done = committing & (stopped | (known >= state.limit))
    begins = committing[:, None]
    masked = jnp.where(begins, True, state.masked)
    tokens = jnp.where(begins, 0, state.tokens)
    if facts.logit_shift:
        first = begins & (jnp.arange(width) == 0)
        masked, tokens = masked & ~first, jnp.where(first, handover[:, None], tokens)
    return dataclasses.replace(
        state,
        start=start,
        tokens=tokens,
        masked=masked,
        step=jnp.where(committing, 0, state.step),
        last_sub=jnp.where(committing, -1, state.last_sub),
        active=state.active & ~done,
    )


def decode_blocks(
    model: Decoder, rope: RopeTable, state: BlockState, *, blocks: int
) -> tuple[BlockState, BlockOutput]:
    """Decodes up to `blocks` blocks of every active row, all in the program that calls it.

    A row that has given its blocks rests until the others have theirs, so what a row gives does not
    depend on its neighbours.

    Args:
        model: parameters.
        rope: table that covers every position.
        state: the batch; donate it.
        blocks: of each row, static.
    """
    batch, width = state.tokens.shape
    empty = jnp.zeros((batch, blocks), jnp.int32)
    output = BlockOutput(
        jnp.zeros(batch, jnp.int32),
        jnp.zeros((batch, blocks, width), jnp.int32),
        empty,
        empty - 1,
        jnp.zeros((), jnp.int32),
    )

    def runs(state: BlockState, output: BlockOutput) -> Array:
        return state.active & (output.count < blocks)

    def body(carry: tuple[BlockState, BlockOutput]) -> tuple[BlockState, BlockOutput]:
        state, output = carry
        resting = state.active & (output.count >= blocks)
        after, found = forward(
            model, rope, dataclasses.replace(state, active=state.active & ~resting)
        )
        after = dataclasses.replace(after, active=after.active | resting)
        gives = found.committed | found.ended
        tokens = jnp.where(found.decided, found.token, state.tokens)
        steps = state.step + found.ended
        index = jnp.where(gives, output.count, blocks)  # an index past the end is dropped
        rows = jnp.arange(batch)
        return after, BlockOutput(
            output.count + gives,
            output.tokens.at[rows, index].set(tokens, mode="drop"),
            output.steps.at[rows, index].set(steps, mode="drop"),
            output.handover.at[rows, index].set(found.handover, mode="drop"),
            output.forwards + 1,
        )

    return lax.while_loop(lambda carry: jnp.any(runs(*carry)), body, (state, output))
