"""What the head says of each row, without the logits of all rows in memory.

The vocabulary is worked through in pieces; of each row stay the largest logit, the sum of
exponentials, the sum that gives the entropy, and the token that is drawn. A row's token is the
largest logit (greedy) or the largest of `logit / temperature + Gumbel noise`, which draws from the
softmax; where top-k, top-p or min-p filter, from the rows of one request at a time.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparda_jax.engine.sampling import filtered
from sparda_jax.engine.state import SamplingState
from sparda_jax.models.decoder import Decoder
from sparda_jax.typing import Array, Bool, Float, Int

# Logits of a row that exist at a time. Two of SmolLM2's 49,152 take 8 MiB for 32 rows in float32.
VOCABULARY_TILE = 16384


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


class _Sums(NamedTuple):
    """Over the pieces so far; all `[B, T]`.

    `total` and `weighted` are relative to `largest`: sum of e^(l - largest), and of that times
    (l - largest).
    """

    largest: Array
    total: Array
    weighted: Array
    best: Array
    token: Array
    logit: Array
    finite: Array


def row_keys(sampling: SamplingState, positions: Array, step: Array) -> Array:
    """A random key for every row: of the request's seed, the position and the step alone."""

    def keys(seed: Array, row: Array, step: Array) -> Array:
        own = jax.random.fold_in(jax.random.key(seed), step)
        return jax.vmap(lambda position: jax.random.fold_in(own, position))(row)

    return jax.vmap(keys)(sampling.seed, positions, step)


def head_rows(model: Decoder, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """What the head is applied to: the final norm and the family's divisor."""
    x = model.final_norm(x)
    return x if model.config.logit_divisor == 1.0 else x / model.config.logit_divisor


def piece_of_logits(
    model: Decoder, rows: Float[Array, "B T D"], start: Array, size: int
) -> Float[Array, "B T V"]:
    """Logits of tokens start .. start+size-1, float32."""
    wide = {"preferred_element_type": jnp.float32}
    if model.head is None:
        part = lax.dynamic_slice_in_dim(model.embedding[...], start, size, axis=0)
        return jnp.einsum("btd,vd->btv", rows, part, **wide)
    part = lax.dynamic_slice_in_dim(model.head.kernel[...], start, size, axis=1)
    return jnp.einsum("btd,dv->btv", rows, part, **wide)


def confidence(
    model: Decoder,
    x: Float[Array, "B T D"],
    mask_token_id: int,
    sampling: SamplingState,
    positions: Int[Array, "B T"],
    step: Int[Array, " B"],
    *,
    tile: int = VOCABULARY_TILE,
) -> Confidence:
    """Draws a token for every row and says how sure the model is of it.

    Args:
        model: its norm and head.
        x: hidden states after the last layer.
        mask_token_id: never drawn.
        sampling: of each request.
        positions: of the tokens that the rows predict; part of the random keys.
        step: denoising step; likewise.
        tile: tokens of the vocabulary at a time.
    """
    rows = head_rows(model, x)
    keys = row_keys(sampling, positions, step)
    sums = lax.cond(
        jnp.any(sampling.temperature > 0),
        lambda: _scan(model, rows, mask_token_id, (sampling.temperature, keys), tile),
        lambda: _scan(model, rows, mask_token_id, None, tile),
    )
    narrowed = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
    filters = (sampling.temperature > 0) & narrowed
    token, logit = lax.cond(
        jnp.any(filters),
        lambda: _draw_filtered(model, rows, mask_token_id, sampling, keys),
        lambda: (sums.token, sums.logit),
    )
    token = jnp.where(filters[:, None], token, sums.token)
    logit = jnp.where(filters[:, None], logit, sums.logit)
    return Confidence(
        token=token,
        probability=jnp.exp(logit - sums.largest) / sums.total,
        entropy=jnp.log(sums.total) - sums.weighted / sums.total,
        finite=sums.finite,
    )


def _scan(
    model: Decoder,
    rows: Array,
    mask_token_id: int,
    noise: tuple[Array, Array] | None,
    tile: int,
) -> _Sums:
    """Works through the vocabulary; `noise` is (temperatures, keys) or None when all are greedy."""
    vocabulary, shape = model.config.vocab_size, rows.shape[:2]
    size = min(tile, vocabulary)

    def add(index: Array, sums: _Sums) -> _Sums:
        # The last piece is moved back to stay inside; what it then repeats does not count.
        start = jnp.minimum(index * size, vocabulary - size)
        logits = piece_of_logits(model, rows, start, size)
        ids = start + jnp.arange(size, dtype=jnp.int32)
        finite = sums.finite & jnp.all(jnp.isfinite(logits), axis=-1)
        logits = jnp.where(ids >= index * size, logits, -jnp.inf)
        scores = jnp.where(ids == mask_token_id, -jnp.inf, logits)
        if noise is not None:
            scores = _perturbed(scores, *noise, index)
        place = jnp.argmax(scores, axis=-1)
        score, logit = (
            jnp.take_along_axis(array, place[..., None], axis=-1)[..., 0]
            for array in (scores, logits)
        )
        largest = jnp.maximum(sums.largest, jnp.max(logits, axis=-1))
        shrink = sums.largest - largest
        shifted = logits - largest[..., None]
        weights = jnp.exp(shifted)
        factor = jnp.exp(shrink)
        better = score > sums.best  # equal scores: the lowest id stays
        return _Sums(
            largest,
            sums.total * factor + weights.sum(-1),
            factor * (sums.weighted + jnp.where(sums.total > 0, shrink * sums.total, 0.0))
            + jnp.where(weights > 0, weights * shifted, 0.0).sum(-1),
            jnp.where(better, score, sums.best),
            jnp.where(better, ids[place], sums.token),
            jnp.where(better, logit, sums.logit),
            finite,
        )

    zero, low = jnp.zeros(shape, jnp.float32), jnp.full(shape, jnp.finfo(jnp.float32).min)
    start = _Sums(low, zero, zero, low, jnp.zeros(shape, jnp.int32), zero, jnp.ones(shape, bool))
    return lax.fori_loop(0, -(-vocabulary // size), add, start)


def _perturbed(logits: Array, temperature: Array, keys: Array, piece: Array) -> Array:
    """`logits / temperature` plus Gumbel noise; the logits themselves where temperature is 0."""
    draw = lambda key: jax.random.gumbel(jax.random.fold_in(key, piece), logits.shape[-1:])
    noise = jax.vmap(jax.vmap(draw))(keys)
    warm = temperature[:, None, None] > 0
    return jnp.where(
        warm, logits / jnp.where(warm, temperature[:, None, None], 1.0) + noise, logits
    )


def _draw_filtered(
    model: Decoder, rows: Array, mask_token_id: int, sampling: SamplingState, keys: Array
) -> tuple[Array, Array]:
    """Temperature and filters, one request after the other; the token and its plain logit."""
    size = model.config.vocab_size

    def one_request(xs: tuple) -> tuple[Array, Array]:
        rows, temperature, top_k, top_p, min_p, keys = xs
        logits = piece_of_logits(model, rows[None], jnp.zeros((), jnp.int32), size)[0]
        open_ = jnp.where(jnp.arange(size) == mask_token_id, -jnp.inf, logits)
        scaled = open_ / jnp.where(temperature > 0, temperature, 1.0)
        kept = jax.vmap(filtered, (0, None, None, None))(scaled, top_k, top_p, min_p)
        token = jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)
        return token, jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]

    settings = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    xs = (rows, *settings, keys)
    token, logit = lax.map(one_request, xs)
    return token, logit
