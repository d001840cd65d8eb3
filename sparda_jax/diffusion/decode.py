"""Denoising: one forward of every row's block, and several blocks as one program.

A row whose block still has masks denoises; a row whose block has none commits: the same forward,
on its final tokens, writes the block's KV and the row goes on to the next block. So rows at
different steps, blocks and rules share one program, and no forward waits for the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from sparda_jax.config import DiffusionConfig
from sparda_jax.diffusion.attention import attend, block_mask, dense_prefix, pack, write_block
from sparda_jax.diffusion.confidence import Confidence, confidence
from sparda_jax.diffusion.config import diffusion_of
from sparda_jax.diffusion.state import BlockKV, BlockOutput, BlockState, ForwardOutput, LayerKV
from sparda_jax.diffusion.strategies import candidates, choose
from sparda_jax.models.decoder import Decoder
from sparda_jax.models.rope import RopeTable, rope_rows
from sparda_jax.typing import Array, Bool, Float, Int


def run_layers(
    model: Decoder,
    rope: RopeTable,
    caches: Iterable[LayerKV],
    start: Int[Array, " B"],
    tokens: Int[Array, "B W"],
    masked: Bool[Array, "B W"],
    committing: Bool[Array, " B"],
) -> tuple[Float[Array, "B W D"], BlockKV]:
    """All layers over every row's block.

    Args:
        model: parameters.
        rope: table that covers every position.
        caches: of every layer; all tokens before the block are attended.
        start: of the block.
        tokens: of the block.
        masked: which of them are not known.
        committing: rows whose tokens are all clean.

    Returns:
        Hidden states, and the KV of the block.
    """
    facts, mask_token_id = diffusion_of(model.config)
    width = tokens.shape[1]
    cos, sin = rope_rows(rope, start[:, None] + jnp.arange(width))
    own_mask = block_mask(committing, width, causal_clean=facts.causal_clean)
    x = model.embed(jnp.where(masked, mask_token_id, tokens))
    block_kv = []
    for layer, cache in zip(model.layers, caches, strict=True):
        q, k, v = layer.qkv(x, cos, sin)
        own = pack(k, v)
        x = layer.finish(x, attend(q, dense_prefix(cache, start), own, own_mask))
        block_kv.append(own)
    return x, tuple(block_kv)


def run_sub_block(
    model: Decoder, rope: RopeTable, state: BlockState, size: int, mask_token_id: int
) -> tuple[Float[Array, "B Q D"], BlockKV, Int[Array, " B"]]:
    """All layers over the sub-block at work alone; the block's other tokens as they were.

    The dual cache of Fast-dLLM v2 (spec/herald.md, sec. 2.3): the other tokens take part with the
    KV that they had when the whole block was last run, nobody is masked.

    Args:
        model: parameters.
        rope: table that covers every position.
        state: the batch, with the KV of its blocks.
        size: tokens of a sub-block.
        mask_token_id: what masked positions are embedded as.

    Returns:
        Hidden states, the KV of the block, and where in it the sub-block begins.
    """
    assert state.block_kv is not None
    batch, width = state.tokens.shape
    at = candidates(state.masked, state.rule.sub_block)[1] * size
    index = at[:, None] + jnp.arange(size)
    cos, sin = rope_rows(rope, state.start[:, None] + index)
    tokens = jnp.where(state.masked, mask_token_id, state.tokens)
    x = model.embed(jnp.take_along_axis(tokens, index, axis=1))
    everything = jnp.ones((batch, size, width), bool)
    block_kv = []
    for layer, cache, kept in zip(model.layers, state.layers, state.block_kv, strict=True):
        q, k, v = layer.qkv(x, cos, sin)
        own = _placed(kept, pack(k, v), at, axis=2)
        x = layer.finish(x, attend(q, dense_prefix(cache, state.start), own, everything))
        block_kv.append(own)
    return x, tuple(block_kv), at


def _placed(whole: Array, part: Array, at: Int[Array, " B"], *, axis: int = 0) -> Array:
    """Every row of the batch with its part written at its place; `axis` of a row."""
    write = partial(lax.dynamic_update_slice_in_dim, axis=axis)
    return jax.vmap(write)(whole, part, at)


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


def forward(
    model: Decoder, rope: RopeTable, state: BlockState, *, sub_block: int | None = None
) -> tuple[BlockState, ForwardOutput]:
    """Runs every active row's block once: denoises it, or commits it and begins the next.

    Args:
        model: parameters; `model.config.diffusion` says the block size and the mask token.
        rope: table that covers every position.
        state: the batch.
        sub_block: with the dual cache, tokens of every request's sub-blocks. Rows then wait where
            a forward runs sub-blocks and they need their whole block, so that what is computed
            for a row does not depend on its neighbours.
    """
    facts, mask_token_id = diffusion_of(model.config)
    width = state.tokens.shape[1]
    waiting = jnp.zeros_like(state.active)
    narrow: Array | None = None
    if sub_block is not None:
        whole = needs_whole_block(state)
        narrow = jnp.any(state.active & ~whole)
        waiting = state.active & whole & narrow
        state = dataclasses.replace(state, active=state.active & ~waiting)
    committing = finished_rows(state)

    def run_whole() -> tuple[Confidence, BlockKV]:
        block = state.start, state.tokens, state.masked
        x, block_kv = run_layers(model, rope, state.layers, *block, committing)
        return _judged(model, state, x, jnp.zeros_like(state.start)), block_kv

    def run_part() -> tuple[Confidence, BlockKV]:
        assert sub_block is not None
        x, block_kv, at = run_sub_block(model, rope, state, sub_block, mask_token_id)
        found = _judged(model, state, x, at)
        blank = Confidence.blank(*state.tokens.shape)
        return jax.tree.map(lambda all_, part: _placed(all_, part, at), blank, found), block_kv

    raw, block_kv = run_whole() if narrow is None else lax.cond(narrow, run_part, run_whole)
    layers = tuple(
        write_block(cache, own, state.start, committing)
        for cache, own in zip(state.layers, block_kv, strict=True)
    )
    kept = None if narrow is None else block_kv
    state = dataclasses.replace(state, layers=layers, block_kv=kept)
    after, output = _decided(facts, state, raw, committing)
    ran = width if narrow is None else jnp.where(narrow, sub_block or 0, width)
    output = dataclasses.replace(output, ran=jnp.where(waiting, 0, ran))
    return dataclasses.replace(after, active=after.active | waiting), output


def needs_whole_block(state: BlockState) -> Bool[Array, " B"]:
    """With the dual cache: a sub-block begins, its first token is masked, or the block commits."""
    open_, sub = candidates(state.masked, state.rule.sub_block)
    index = jnp.arange(state.tokens.shape[1])
    first = index == (sub * state.rule.sub_block)[:, None]
    return (sub != state.last_sub) | jnp.any(open_ & first, axis=1) | ~jnp.any(state.masked, axis=1)


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
    facts, _ = diffusion_of(model.config)
    raw = _judged(model, state, x, jnp.zeros_like(state.start))
    return _decided(facts, state, raw, committing)


def _judged(
    model: Decoder, state: BlockState, x: Float[Array, "B T D"], at: Int[Array, " B"]
) -> Confidence:
    """What the head says of the rows of a block from place `at` on."""
    facts, mask_token_id = diffusion_of(model.config)
    predicted = (state.start + at)[:, None] + jnp.arange(x.shape[1]) + facts.logit_shift
    return confidence(model, x, mask_token_id, state.sampling, predicted, state.step)


def _decided(
    facts: DiffusionConfig, state: BlockState, raw: Confidence, committing: Bool[Array, " B"]
) -> tuple[BlockState, ForwardOutput]:
    """Replaces masks, ends requests, begins blocks; `raw` before any shift."""
    open_, sub = candidates(state.masked, state.rule.sub_block)
    positions = state.start[:, None] + jnp.arange(state.tokens.shape[1])
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
        found.token,
        found.probability,
        found.entropy,
        decided,
        committing,
        ended,
        handover,
        jnp.full_like(state.start, state.tokens.shape[1]),
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
    model: Decoder,
    rope: RopeTable,
    state: BlockState,
    *,
    blocks: int,
    sub_block: int | None = None,
) -> tuple[BlockState, BlockOutput]:
    """Decodes up to `blocks` blocks of every active row, all in the program that calls it.

    A row that has given its blocks rests until the others have theirs, so what a row gives does not
    depend on its neighbours.

    Args:
        model: parameters.
        rope: table that covers every position.
        state: the batch; donate it.
        blocks: of each row, static.
        sub_block: with the dual cache, see `forward`; static.
    """
    batch, width = state.tokens.shape
    empty = jnp.zeros((batch, blocks), jnp.int32)
    output = BlockOutput(
        jnp.zeros(batch, jnp.int32),
        jnp.zeros((batch, blocks, width), jnp.int32),
        empty,
        empty - 1,
        jnp.zeros((), jnp.int32),
        jnp.zeros((), jnp.int32),
    )

    def runs(state: BlockState, output: BlockOutput) -> Array:
        return state.active & (output.count < blocks)

    def body(carry: tuple[BlockState, BlockOutput]) -> tuple[BlockState, BlockOutput]:
        state, output = carry
        resting = state.active & (output.count >= blocks)
        working = dataclasses.replace(state, active=state.active & ~resting)
        after, found = forward(model, rope, working, sub_block=sub_block)
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
            output.narrow + jnp.any((found.ran > 0) & (found.ran < width)),
        )

    return lax.while_loop(lambda carry: jnp.any(runs(*carry)), body, (state, output))
