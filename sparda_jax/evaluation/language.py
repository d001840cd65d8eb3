"""Likelihood of held-out text under a policy, and how far its predictions are from dense ones.

    log p(t)            log-probability of the true next token
    KL(t)               sum over the vocabulary of p_dense (log p_dense - log p_policy)

The KL is the sensitive measure for a small model: a difference of log p is mostly noise of single
tokens, while the KL counts every change of the prediction.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.chunking import map_chunks
from sparda_jax.config import SparseConfig
from sparda_jax.evaluation.policies import DENSE, Policy, forward
from sparda_jax.models.decoder import Decoder
from sparda_jax.typing import Array, Bool, Float, Int

# Bound on the float32 logits of one chunk of tokens.
CHUNK_BYTES = 512 << 20


@jax.jit
def score_tokens(
    model: Decoder,
    x: Float[Array, "B T D"],
    reference: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
) -> tuple[Float[Array, "B T"], Float[Array, "B T"], Bool[Array, "B T"]]:
    """log p of the targets, KL from the reference, and whether the target is the likeliest token.

    Args:
        model: the decoder, for its head.
        x: final hidden states of a policy.
        reference: those of dense attention.
        targets: the token that follows each position.
    """

    def score(x: Array, reference: Array, targets: Array) -> tuple[Array, Array, Array]:
        ours, theirs = (jax.nn.log_softmax(model.logits(part)) for part in (x, reference))
        log_p = jnp.take_along_axis(ours, targets[..., None], axis=-1)[..., 0]
        divergence = (jnp.exp(theirs) * (theirs - ours)).sum(-1)
        return log_p, divergence, ours.argmax(-1) == targets

    chunk = max(1, CHUNK_BYTES // (8 * x.shape[0] * model.config.vocab_size))
    log_p, divergence, likeliest = map_chunks(
        score, chunk, (x, reference, targets), axes=(1, 1, 1), out_axes=(1, 1, 1)
    )
    return log_p, divergence, likeliest


def document_scores(
    model: Decoder,
    policies: Sequence[Policy],
    document: np.ndarray,
    sparse: SparseConfig,
    budgets: Sequence[int],
    edges: Sequence[int],
) -> dict[str, np.ndarray]:
    """Sums of log p and KL over one document, by policy, budget and position.

    Args:
        model: the decoder.
        policies: what to run besides dense attention.
        document: `int[T]`, one document.
        sparse: grid and forced blocks; its budget is at least the largest of `budgets`.
        budgets: blocks selected, forced ones included; all run side by side.
        edges: bounds of the position buckets, ascending; a bucket takes its lower bound in.

    Returns:
        By policy name, `float64[len(budgets), 2, len(edges) - 1]`: log p and KL. "dense" has one
        budget, all blocks.
    """
    row = jnp.asarray(document, jnp.int32)[None]
    dense = forward(model, DENSE, row, sparse)
    out = {"dense": _sums(model, dense, dense, row, edges)}
    tiled = jnp.repeat(row, len(budgets), axis=0)
    reference = jnp.repeat(dense, len(budgets), axis=0)
    limits = jnp.asarray(budgets, jnp.int32)
    for policy in policies:
        x = forward(model, policy, tiled, sparse, budgets=limits)
        out[policy.name] = _sums(model, x, reference, tiled, edges)
    return out


def _sums(
    model: Decoder, x: Array, reference: Array, tokens: Array, edges: Sequence[int]
) -> np.ndarray:
    log_p, divergence, _ = score_tokens(model, x[:, :-1], reference[:, :-1], tokens[:, 1:])
    parts = np.stack([np.asarray(log_p), np.asarray(divergence)], axis=1).astype(np.float64)
    pairs = itertools.pairwise(edges)
    return np.stack([parts[..., low:high].sum(-1) for low, high in pairs], axis=-1)


def bucket_sizes(length: int, edges: Sequence[int]) -> np.ndarray:
    """Predicted tokens of each bucket in a document of `length` tokens."""
    last = length - 1
    pairs = itertools.pairwise(edges)
    return np.array([max(0, min(high, last) - min(low, last)) for low, high in pairs])
