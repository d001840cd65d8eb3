"""Estimates with bootstrap intervals over documents or samples."""

from __future__ import annotations

import dataclasses

import numpy as np

RESAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval.

    Attributes:
        value: of the whole sample.
        low: 2.5th percentile of the resamples.
        high: 97.5th percentile.
        n: documents or samples that were drawn from.
    """

    value: float
    low: float
    high: float
    n: int


def ratio(parts: np.ndarray, wholes: np.ndarray, *, seed: int = 0) -> Estimate:
    """`sum(parts) / sum(wholes)` over units, with an interval from resampling them.

    Tokens of one document depend on each other, so the unit is the document. For a plain mean,
    `wholes` are ones; differences of two policies on the same documents are `parts` themselves,
    which makes the interval a paired one.

    Args:
        parts: `[X]`, one value a unit, or `[X, L]`, where the mean of L such ratios is wanted.
        wholes: likewise.
        seed: of the resampling.

    Raises:
        ValueError: no units, shapes that differ, or wholes that sum to zero.
    """
    parts, wholes = np.asarray(parts, np.float64), np.asarray(wholes, np.float64)
    if parts.ndim not in (1, 2) or parts.shape != wholes.shape or not parts.size:
        raise ValueError(f"expected two equal, non-empty shapes: {parts.shape}, {wholes.shape}")
    parts, wholes = (array.reshape(len(array), -1) for array in (parts, wholes))
    if not (wholes.sum(0) > 0).all():
        raise ValueError(f"nothing was counted: denominators of {len(wholes)} units sum to zero")
    draws = np.random.default_rng(seed).integers(0, len(parts), (RESAMPLES, len(parts)))
    below = wholes[draws].sum(1)
    # A resample of units in which nothing was counted says nothing about the ratio.
    usable = (below > 0).all(1)
    values = (parts[draws].sum(1)[usable] / below[usable]).mean(1)
    low, high = np.percentile(values, (2.5, 97.5))
    value = (parts.sum(0) / wholes.sum(0)).mean()
    return Estimate(float(value), float(low), float(high), len(parts))


def mean(values: np.ndarray, *, seed: int = 0) -> Estimate:
    """The mean of one value a unit; see `ratio`."""
    return ratio(values, np.ones(np.shape(values)), seed=seed)
