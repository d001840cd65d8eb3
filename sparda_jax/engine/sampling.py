"""Drawing the next token, every request with its own settings and random stream."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sparda_jax.engine.state import LogProbabilities, SamplingState


def filtered(
    logits: Float[Array, " V"], top_k: Array, top_p: Array, min_p: Array | float = 0.0
) -> Float[Array, " V"]:
    """Logits outside top-k, then outside top-p or min-p of what is left, set to -inf."""
    size = logits.shape[0]
    ordered = -jnp.sort(-logits)
    rank = jnp.arange(size)
    kept = rank < jnp.where(top_k > 0, top_k, size)
    probability = jax.nn.softmax(jnp.where(kept, ordered, -jnp.inf))
    # The token that crosses top_p is kept: what counts is the mass before it. Rank 0 always is.
    before = jnp.cumsum(probability) - probability
    kept &= ((before < top_p) & (probability >= min_p * probability[0])) | (rank == 0)
    threshold = jnp.min(jnp.where(kept, ordered, jnp.inf))
    return jnp.where(logits >= threshold, logits, -jnp.inf)


def _draw(
    logits: Float[Array, " V"],
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    seed: Array,
    position: Array,
) -> Int[Array, ""]:
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
    key = jax.random.fold_in(jax.random.key(seed), position)
    drawn = jax.random.categorical(key, filtered(scaled, top_k, top_p, min_p))
    return jnp.where(temperature > 0, drawn, jnp.argmax(logits)).astype(jnp.int32)


def sample(
    logits: Float[Array, "B V"], sampling: SamplingState, positions: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Draws one token a request.

    Temperature first, then top-k, then top-p and min-p of the renormalised rest. Tokens whose logit
    ties with the last one kept are kept too. Greedy (temperature 0) takes the lowest id among equal
    maxima.

    Args:
      logits: float32.
      sampling: settings of the batch.
      positions: position of the token being drawn; part of the random key.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # The sort over the vocabulary costs more than a small model's layer: only when anyone samples.
    return jax.lax.cond(
        jnp.any(sampling.temperature > 0),
        lambda: jax.vmap(_draw)(
            logits,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.seed,
            positions,
        ),
        lambda: greedy,
    )


def log_probabilities(
    logits: Float[Array, "B V"], tokens: Int[Array, " B"], sampling: SamplingState, count: int
) -> LogProbabilities:
    """Log-softmax of the logits at the tokens drawn, and its largest values.

    Args:
      logits: float32.
      tokens: drawn.
      sampling: says whether any request wants them.
      count: E, likeliest tokens to report.
    """

    def compute() -> LogProbabilities:
        values = jax.nn.log_softmax(logits)
        drawn = jnp.take_along_axis(values, tokens[:, None], axis=1)[:, 0]
        top, ids = jax.lax.top_k(values, count)
        return LogProbabilities(drawn, ids.astype(jnp.int32), top)

    return jax.lax.cond(
        jnp.any(sampling.logprobs), compute, lambda: no_log_probabilities(tokens.shape[0], count)
    )


def no_log_probabilities(batch: int, count: int) -> LogProbabilities:
    """Zeros."""
    zeros = jnp.zeros((batch, count))
    return LogProbabilities(jnp.zeros(batch), jnp.zeros((batch, count), jnp.int32), zeros)
