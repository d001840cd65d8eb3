"""Which blocks every layer and KV head attends while tokens are generated.

The tokens are the engine's; what they attend is read off a forward pass over all of them, whose
selections are those of decode (spec: decode == whole sequence). `scripts/benchmark.py attended`
makes a results file of it, which `scripts/report.py` draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from sparda_jax.config import SparseConfig
from sparda_jax.evaluation import policies
from sparda_jax.evaluation.policies import LayerStep, Policy
from sparda_jax.evaluation.statistics import Estimate
from sparda_jax.evaluation.tables import ScoreRow, make_row
from sparda_jax.models.decoder import Decoder


def attended_blocks(
    model: Decoder,
    policy: Policy,
    tokens: Sequence[int],
    sparse: SparseConfig,
    steps: int,
) -> np.ndarray:
    """Blocks that the last tokens of a sequence attend.

    Args:
        model: the decoder.
        policy: says what every layer attends; dense attends all and has no picture.
        tokens: prompt and what was generated.
        sparse: selection rules.
        steps: how many of the last tokens.

    Returns:
        `bool[L, K, steps, M]`.

    Raises:
        ValueError: dense attention, or fewer tokens than steps.
    """
    if not policy.layers:
        raise ValueError("dense attention attends all blocks: there is nothing to show")
    if not 1 <= steps <= len(tokens):
        raise ValueError(f"{steps} steps of a sequence of {len(tokens)} tokens")
    last = jnp.arange(len(tokens) - steps, len(tokens))
    budgets, masks = jnp.full((1,), sparse.budget_blocks, jnp.int32), []

    def look(step: LayerStep) -> None:
        masks.append(np.asarray(step.at(last).mask(policy, budgets, sparse))[0])

    row = jnp.asarray(tokens, jnp.int32)[None]
    policies.forward(model, policy, row, sparse, visit=look)
    return np.stack(masks)


def as_document(blocks: np.ndarray) -> dict[str, Any]:
    """The mask as it stands in a results file; see `report.blocks_of`."""
    ids = [[[np.flatnonzero(s).tolist() for s in head] for head in layer] for layer in blocks]
    return {"blocks": blocks.shape[-1], "ids": ids}


def rows(mode: str, blocks: np.ndarray) -> Iterator[ScoreRow]:
    """By layer, how much changes from step to step: mean over KV heads and steps, least, most."""
    for layer, mask in enumerate(blocks):
        changed = 1 - (mask[:, 1:] & mask[:, :-1]).sum(-1) / mask[:, 1:].sum(-1)
        value, low, high = changed.mean(), changed.min(), changed.max()
        estimate = Estimate(float(value), float(low), float(high), changed.size)
        yield make_row(f"attended/{mode}/changed/layer_{layer:02d}", estimate, "share", "lower")
