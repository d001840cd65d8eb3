"""What the head says of each row, without the logits of all rows in memory.

Rows are worked through a tile at a time, over the whole vocabulary; of each stay the token that is
drawn and three figures. Not the vocabulary in pieces: XLA copies a slice of the head before it
multiplies (compiled for an H200: three times the traffic), and every piece is read once a step.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from sparda_jax.engine.sampling import filtered
from sparda_jax.engine.state import SamplingState
from sparda_jax.models.decoder import Decoder
from sparda_jax.typing import Array, Bool, Float, Int

# Rows whose logits exist at a time, at most: 256 of LLaDA2's 157,184 take 154 MiB in float32.
TILE_ROWS = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Confidence:
    """Of every row.

    Attributes:
        token: drawn; never the mask token.
        probability: its softmax probability, over all tokens, at temperature 1 and unfiltered.
        entropy: of that softmax, nats.
        finite: no logit is NaN or infinite.
    """

    token: Int[Array, "B T"]
    probability: Float[Array, "B T"]
    entropy: Float[Array, "B T"]
    finite: Bool[Array, "B T"]

    @classmethod
    def blank(cls, batch: int, count: int) -> Confidence:
        """Of rows that were not run."""
        zero = jnp.zeros((batch, count))
        return cls(zero.astype(jnp.int32), zero, zero, jnp.ones((batch, count), bool))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Draw:
    """How each row draws, `[rows]`; the fields are those of `SamplingState`."""

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    key: Array


def confidence(
    model: Decoder,
    x: Float[Array, "B T D"],
    mask_token_id: int,
    sampling: SamplingState,
    positions: Int[Array, "B T"],
    step: Int[Array, " B"],
    *,
    tile: int = TILE_ROWS,
) -> Confidence:
    """Draws a token for every row and says how sure the model is of it.

    Args:
        model: its norm and head.
        x: hidden states after the last layer.
        mask_token_id: never drawn.
        sampling: of each request.
        positions: of the tokens that the rows predict; part of the random keys.
        step: denoising step; likewise.
        tile: rows at a time, at most; never all of them.
    """
    batch, count, size = x.shape
    rows = batch * count
    tiles = max(-(-rows // tile), min(2, rows))
    each = -(-rows // tiles)
    spread = lambda setting: jnp.repeat(setting, count)
    draw = _Draw(
        spread(sampling.temperature),
        spread(sampling.top_k),
        spread(sampling.top_p),
        spread(sampling.min_p),
        row_keys(sampling, positions, step).reshape(rows),
    )

    def cut(array: Array) -> Array:
        filled = jnp.concatenate([array, jnp.broadcast_to(array[:1], _more(array, each * tiles))])
        return filled.reshape(tiles, each, *array.shape[1:])

    def one(_: None, xs: tuple[Array, _Draw]) -> tuple[None, Confidence]:
        return None, _of_tile(model, *xs, mask_token_id)

    _, found = lax.scan(one, None, jax.tree.map(cut, (x.reshape(rows, size), draw)), unroll=2)
    return jax.tree.map(lambda array: array.reshape(-1)[:rows].reshape(batch, count), found)


def row_keys(sampling: SamplingState, positions: Array, step: Array) -> Array:
    """A random key for every row: of the request's seed, the position and the step alone."""

    def keys(seed: Array, row: Array, step: Array) -> Array:
        own = jax.random.fold_in(jax.random.key(seed), step)
        return jax.vmap(lambda position: jax.random.fold_in(own, position))(row)

    return jax.vmap(keys)(sampling.seed, positions, step)


def _more(array: Array, rows: int) -> tuple[int, ...]:
    return (rows - array.shape[0], *array.shape[1:])


def _of_tile(model: Decoder, x: Array, draw: _Draw, mask_token_id: int) -> Confidence:
    """Figures of `[rows, D]`; everything is `[rows]`."""
    logits = model.logits(x[None])[0]
    largest = jnp.max(logits, axis=-1, keepdims=True)
    shifted = logits - largest
    weights = jnp.exp(shifted)
    total = weights.sum(-1)
    spent = jnp.where(weights > 0, weights * shifted, 0.0).sum(-1)
    open_ = jnp.where(jnp.arange(logits.shape[1]) == mask_token_id, -jnp.inf, logits)
    best = jnp.argmax(open_, axis=-1).astype(jnp.int32)
    warm = draw.temperature > 0
    token = lax.cond(
        jnp.any(warm), lambda: jnp.where(warm, _drawn(open_, draw), best), lambda: best
    )
    chosen = jnp.take_along_axis(shifted, token[:, None], axis=1)[:, 0]
    return Confidence(
        token=token,
        probability=jnp.exp(chosen) / total,
        entropy=jnp.log(total) - spent / total,
        finite=jnp.all(jnp.isfinite(logits), axis=-1),
    )


def _drawn(open_: Array, draw: _Draw) -> Array:
    """A token of every row at its temperature, from the filtered softmax where it is filtered."""
    warm = draw.temperature > 0
    scaled = open_ / jnp.where(warm, draw.temperature, 1.0)[:, None]
    narrowed = warm & ((draw.top_k > 0) | (draw.top_p < 1) | (draw.min_p > 0))
    kept = lax.cond(
        jnp.any(narrowed),  # the filters sort the vocabulary
        lambda: jax.vmap(filtered)(scaled, draw.top_k, draw.top_p, draw.min_p),
        lambda: scaled,
    )
    kept = jnp.where(narrowed[:, None], kept, scaled)
    return jax.vmap(jax.random.categorical)(draw.key, kept).astype(jnp.int32)
