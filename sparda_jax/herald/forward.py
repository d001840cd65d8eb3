"""Forwards of a batch against pools: live rows, and beside them the draft and the next block.

The parts (`begin`, `project`, `attend_layer`, `conclude`) are programs of their own where the host
must see a layer's queries, or bring its rows, while later layers run; `denoise` puts the same parts
into one program that runs a block to its end.

Rows of a forward with lookahead, W each, and what they attend besides the prefix:

    live    tokens and masks of the block                live
    draft   the block as its first forward guessed it    draft
    next    the block after it, all masks                draft, next

(Where a commit hands over the next block's first token, that token is not known yet: a mask too.)

Live rows are attended in a call of their own, of the same shape with lookahead and without: no
draft value can reach them, not even as NaN times zero.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax

from sparda_jax.diffusion.attention import attend, block_mask, dense_prefix, pack, write_block
from sparda_jax.diffusion.config import diffusion_of
from sparda_jax.diffusion.decode import finished_rows, settle
from sparda_jax.diffusion.state import BlockState, ForwardOutput, LayerKV, Prefix
from sparda_jax.herald.state import HeraldState, Pool, Turn
from sparda_jax.models.decoder import Decoder, DecoderLayer
from sparda_jax.models.rope import RopeTable, rope_rows
from sparda_jax.typing import Array, Bool, Float, Int


def prefix_of(
    cache: LayerKV | None,
    pool: Pool | None,
    init: Float[Array, "B K 2 I H"] | None,
    previous: Float[Array, "B K 2 W H"] | None,
    start: Int[Array, " B"],
) -> Prefix:
    """What the rows of a block attend of the tokens before it: a whole cache, or a pool.

    With a pool: its rows, the init rows before the previous block, and the previous block.
    """
    if pool is None:
        assert cache is not None
        return dense_prefix(cache, start)
    assert init is not None and previous is not None
    leading, width = init.shape[3], previous.shape[3]
    packed = dense_prefix(pool.kv, pool.count)
    first = jnp.arange(leading) < (start - width)[:, None]
    near = jnp.broadcast_to(start[:, None] > 0, (start.shape[0], width))
    return Prefix(
        packed.slots,
        packed.slot_ids,
        jnp.concatenate([packed.rest, init, previous], axis=3),
        jnp.concatenate([packed.rest_mask, first, near], axis=1),
    )


def begin(
    model: Decoder,
    rope: RopeTable,
    block: BlockState,
    turn: Turn,
    *,
    lookahead: bool,
) -> tuple[Float[Array, "B T D"], tuple[Array, Array], Bool[Array, " B"], Int[Array, " B"]]:
    """Embeds the rows of a forward: W live ones, or 3W.

    Returns:
        Embeddings; (cos, sin); rows that commit in this forward; the centre [MASK] among the last
        W rows.
    """
    _, mask_token_id = diffusion_of(model.config)
    width = block.tokens.shape[1]
    place = block.start[:, None] + jnp.arange(width)
    tokens = jnp.where(block.masked, mask_token_id, block.tokens)
    if lookahead:
        guess = jnp.where(block.masked, turn.draft, block.tokens)
        tokens = jnp.concatenate([tokens, guess, jnp.full_like(tokens, mask_token_id)], axis=1)
        place = jnp.concatenate([place, place, place + width], axis=1)
    centre = centre_of(jnp.ones_like(block.masked) if lookahead else block.masked)
    committing = finished_rows(block) & ~turn.gave
    return model.embed(tokens), rope_rows(rope, place), committing, centre


def centre_of(masked: Bool[Array, "B W"]) -> Int[Array, " B"]:
    """The masked position nearest to the middle of the block; W // 2 where all are masked."""
    width = masked.shape[1]
    distance = jnp.abs(jnp.arange(width) - width // 2)
    return jnp.argmin(jnp.where(masked, distance, width), axis=1).astype(jnp.int32)


def pick_queries(
    q: Float[Array, "B T N H"], heads: int, width: int, centre: Int[Array, " B"] | None
) -> Float[Array, "B K Q H"]:
    """Queries of the last W rows by KV head: of one row each, or of all W (`centre` None)."""
    rows = q[:, -width:]
    if centre is not None:
        rows = jnp.take_along_axis(rows, centre[:, None, None, None], axis=1)
    batch, count, _, size = rows.shape
    grouped = rows.reshape(batch, count, heads, -1, size).swapaxes(1, 2)
    return grouped.reshape(batch, heads, -1, size)


def project(
    layer: DecoderLayer,
    x: Float[Array, "B T D"],
    rope: tuple[Array, Array],
    centre: Int[Array, " B"] | None,
    *,
    width: int,
) -> tuple[tuple[Array, Array, Array], Float[Array, "B K Q H"]]:
    """Queries, keys and values of all rows, and the queries that choose."""
    q, k, v = layer.qkv(x, *rope)
    return (q, k, v), pick_queries(q, k.shape[2], width, centre)


def predict(
    layer: DecoderLayer,
    x: Float[Array, "B T D"],
    rope: tuple[Array, Array],
    centre: Int[Array, " B"] | None,
    *,
    width: int,
) -> Float[Array, "B K Q H"]:
    """The queries that choose, from the input of the layer before (InfiniGen)."""
    q = layer.query(layer.attention_norm(x), *rope)
    return pick_queries(q, layer.config.num_kv_heads, width, centre)


def _draft_mask(width: int, causal: bool) -> Bool[Array, "T T"]:
    """Draft and next rows: who attends whom."""
    index = jnp.arange(width)
    clean = index[:, None] >= index if causal else jnp.ones((width, width), bool)
    return jnp.block([[clean, jnp.zeros_like(clean)], [jnp.ones((width, 2 * width), bool)]])


def attend_layer(
    layer: DecoderLayer,
    x: Float[Array, "B T D"],
    qkv: tuple[Array, Array, Array],
    kept: tuple[LayerKV | None, Array | None, Array | None],
    pool: Pool | None,
    start: Int[Array, " B"],
    committing: Bool[Array, " B"],
    *,
    width: int,
    causal: bool,
) -> tuple[Float[Array, "B T D"], tuple[LayerKV | None, Array | None, Array | None]]:
    """The rest of a layer; rows that commit keep their KV.

    Args:
        layer: parameters.
        x: its input.
        qkv: of `project`.
        kept: the layer's cache, init rows and previous block; donate them.
        pool: chosen rows; None: the cache is attended.
        start: of each row's block.
        committing: rows whose KV is kept.
        width: W.
        causal: clean tokens attend nothing behind them.
    """
    q, k, v = qkv
    cache, init, previous = kept
    prefix = prefix_of(cache, pool, init, previous, start)
    own = pack(k[:, :width], v[:, :width])
    mask = block_mask(committing, width, causal_clean=causal)
    out = attend(q[:, :width], prefix, own, mask)
    if x.shape[1] > width:
        far = pack(k[:, width:], v[:, width:])
        mask = jnp.broadcast_to(_draft_mask(width, causal), (x.shape[0], 2 * width, 2 * width))
        out = jnp.concatenate([out, attend(q[:, width:], prefix, far, mask)], axis=1)
    return layer.finish(x, out), keep(kept, own, start, committing)


def keep(
    kept: tuple[LayerKV | None, Array | None, Array | None],
    own: Float[Array, "B K 2 W H"],
    start: Int[Array, " B"],
    committing: Bool[Array, " B"],
) -> tuple[LayerKV | None, Array | None, Array | None]:
    """Cache, init rows and previous block, with the KV of the rows that commit."""
    cache, init, previous = kept
    width = own.shape[3]
    if cache is not None:
        cache = write_block(cache, own, start, committing)
    if init is not None:
        offset = jnp.arange(init.shape[3]) - start[:, None]
        inside = committing[:, None] & (offset >= 0) & (offset < width)
        place = jnp.clip(offset, 0, width - 1)[:, None, None, :, None]
        taken = jnp.take_along_axis(own, place, axis=3)
        init = jnp.where(inside[:, None, None, :, None], taken, init)
    if previous is not None:
        previous = jnp.where(committing[:, None, None, None, None], own, previous)
    return cache, init, previous


def conclude(
    model: Decoder,
    block: BlockState,
    turn: Turn,
    x: Float[Array, "B T D"],
    committing: Bool[Array, " B"],
) -> tuple[BlockState, Turn]:
    """What a forward decides of its live rows, and what the rows gave."""
    resting = block.active & turn.gave
    before = dataclasses.replace(block, active=block.active & ~turn.gave)
    after, found = settle(model, before, x[:, : block.tokens.shape[1]], committing)
    after = dataclasses.replace(after, active=after.active | resting)
    return after, record(turn, before, found)


def record(turn: Turn, before: BlockState, found: ForwardOutput) -> Turn:
    """The turn after one more forward."""
    tokens = jnp.where(found.decided, found.token, before.tokens)
    gives = found.committed | found.ended
    first = turn.forwards == 0
    draft, open_ = (
        jnp.where(first, found.token, turn.draft),
        jnp.where(first, before.masked, turn.open),
    )
    equal = (open_ & (tokens == draft)).sum(1, dtype=jnp.int32)
    return Turn(
        gave=turn.gave | gives,
        committed=turn.committed | found.committed,
        tokens=jnp.where(gives[:, None], tokens, turn.tokens),
        steps=jnp.where(gives, before.step + found.ended, turn.steps),
        draft=draft,
        open=open_,
        equal=jnp.where(gives, equal, turn.equal),
        handover=jnp.where(gives, found.handover, turn.handover),
        forwards=turn.forwards + 1,
    )


def new_turn(batch: int, width: int) -> Turn:
    """A turn in which nothing has happened."""
    no, zeros = jnp.zeros(batch, bool), jnp.zeros((batch, width), jnp.int32)
    count = jnp.zeros(batch, jnp.int32)
    start = jnp.zeros((), jnp.int32)
    return Turn(no, no, zeros, count, zeros, zeros > 0, count, count - 1, start)


def denoise(
    model: Decoder,
    rope: RopeTable,
    state: HeraldState,
    pools: tuple[Pool | None, ...],
    turn: Turn,
    most: Int[Array, ""],
) -> tuple[HeraldState, Turn]:
    """Forwards of all rows until each has given its block, or until `most` were run in this turn.

    Args:
        model: parameters.
        rope: table that covers every position.
        state: the batch; donate it.
        pools: chosen rows of each layer; None: its cache is attended.
        turn: what was given before; donate it.
        most: forwards, those before included.
    """
    facts, _ = diffusion_of(model.config)
    width = state.block.tokens.shape[1]

    def runs(carry: tuple[HeraldState, Turn]) -> Array:
        state, turn = carry
        return jnp.any(state.block.active & ~turn.gave) & (turn.forwards < most)

    def body(carry: tuple[HeraldState, Turn]) -> tuple[HeraldState, Turn]:
        state, turn = carry
        block = state.block
        x, tables, committing, _ = begin(model, rope, block, turn, lookahead=False)
        every = []
        for number, layer in enumerate(model.layers):
            qkv = layer.qkv(x, *tables)
            kept = state.caches[number], state.init[number], state.previous[number]
            x, kept = attend_layer(
                layer,
                x,
                qkv,
                kept,
                pools[number],
                block.start,
                committing,
                width=width,
                causal=facts.causal_clean,
            )
            every.append(kept)
        block, turn = conclude(model, block, turn, x, committing)
        return HeraldState(block, *(tuple(part) for part in zip(*every, strict=True))), turn

    return lax.while_loop(runs, body, (state, turn))
