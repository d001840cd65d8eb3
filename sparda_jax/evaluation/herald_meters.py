"""Meters of chosen rows and of what a model predicts over them; `herald_quality` adds them up."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.cpu_selection import Aggregate, covered_mass, recall, row_scores
from sparda_jax.diffusion.state import LayerKV
from sparda_jax.herald import layout as layouts
from sparda_jax.models.decoder import Decoder
from sparda_jax.typing import Array, Bool, Float, Int

# Ids of chosen rows by layer, `[B, K, X]`.
Rows = dict[int, np.ndarray]


@jax.jit
def alike(
    model: Decoder, x: Float[Array, "B T D"], other: Float[Array, "B T D"]
) -> Bool[Array, "B T"]:
    """Whether two sets of hidden states have the same first choice."""
    ours, theirs = (jnp.argmax(model.logits(rows), axis=-1) for rows in (x, other))
    return ours == theirs


def cache_scores(
    cache: LayerKV,
    queries: Float[Array, "B K Q H"],
    first: Int[Array, " B"],
    end: Int[Array, " B"],
    *,
    aggregate: Aggregate,
) -> Float[Array, "B K S"]:
    """`row_scores` of a cache's keys."""
    rows = layouts.by_row(cache)[:, :, 0]
    scale = cache.shape[-1] ** -0.5
    return row_scores(rows, queries, first, end, scale=scale, aggregate=aggregate)


def recalls(found: Rows, wanted: Rows, past: int) -> np.ndarray:
    """Of every window, mean over layers and KV heads; ids from `past` on fill up."""
    rows = []
    for window in range(len(next(iter(wanted.values())))):
        of = [recall(_real(found[n][window], past), _real(wanted[n][window], past)) for n in wanted]
        rows.append(np.mean(of))
    return np.array(rows)


def masses(found: Rows, scores: dict[int, np.ndarray], past: int) -> np.ndarray:
    """Of every window, mean over layers and KV heads; the scores are softmax masses."""
    windows = range(len(next(iter(scores.values()))))
    held = lambda n, window: covered_mass(scores[n][window], _real(found[n][window], past), 0)
    return np.array([np.mean([held(n, window) for n in found]) for window in windows])


def _real(ids: np.ndarray, past: int) -> np.ndarray:
    """Ids without those that fill up; every head has as many."""
    return ids[:, ids[0] < past]
