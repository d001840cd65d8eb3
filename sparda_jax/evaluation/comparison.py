"""Intervals, paired differences and tests over evaluation examples (spec/evaluation.md, sec. 7).

Examples of one cluster (rows of one question, samples of one problem) depend on each other, so
whole clusters are resampled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from sparda_jax.evaluation.statistics import Estimate

RESAMPLES = 10_000
_Z = 1.959963984540054
# Resampled index matrices are drawn so many rows at a time.
_CHUNK = 500


def wilson(right: float, n: int) -> tuple[float, float]:
    """95 % interval of a proportion: for scores that are 0 or 1, and only for these.

        centre = (p + z^2 / 2n) / (1 + z^2 / n)
        half   = z sqrt(p (1 - p) / n + z^2 / 4n^2) / (1 + z^2 / n)

    Args:
        right: number of ones.
        n: number of scores.

    Raises:
        ValueError: n is not positive, or not 0 <= right <= n.
    """
    if n < 1 or not 0 <= right <= n:
        raise ValueError(f"{right} of {n} is no proportion")
    p, z2 = right / n, _Z**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


@dataclasses.dataclass(frozen=True)
class Clusters:
    """Values summed by cluster.

    Attributes:
        sums: of each cluster's values.
        counts: how many they are.
    """

    sums: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, values: Sequence[float], clusters: Sequence[str]) -> Clusters:
        """Groups values by the names of their clusters.

        Raises:
            ValueError: no values, or not one name for each.
        """
        if not values or len(values) != len(clusters):
            raise ValueError(f"{len(values)} values in {len(clusters)} clusters")
        names, inverse = np.unique(np.asarray(clusters), return_inverse=True)
        sums = np.bincount(inverse, np.asarray(values, np.float64), len(names))
        return cls(sums, np.bincount(inverse, minlength=len(names)).astype(np.float64))

    @property
    def mean(self) -> float:
        """Over all values."""
        return float(self.sums.sum() / self.counts.sum())

    def resampled(self, rng: np.random.Generator, resamples: int = RESAMPLES) -> np.ndarray:
        """Means of as many clusters, drawn with replacement."""
        size, means = len(self.sums), []
        for start in range(0, resamples, _CHUNK):
            draws = rng.integers(0, size, (min(_CHUNK, resamples - start), size))
            means.append(self.sums[draws].sum(1) / self.counts[draws].sum(1))
        return np.concatenate(means)


def score(values: Sequence[float], clusters: Sequence[str], *, binary: bool, seed: int) -> Estimate:
    """Mean of scores with its 95 % interval: Wilson's for 0/1 scores, else a bootstrap.

    Args:
        values: one for each example.
        clusters: their names.
        binary: values are 0 or 1.
        seed: of the resampling.

    Raises:
        ValueError: a value that is not 0 or 1 though all should be.
    """
    grouped = Clusters.of(values, clusters)
    alone = len(grouped.sums) == len(values)
    if binary and not set(values) <= {0.0, 1.0}:
        raise ValueError(f"a score of {next(v for v in values if v not in (0, 1))} is not 0 or 1")
    if binary and alone:
        low, high = wilson(float(sum(values)), len(values))
    else:
        means = grouped.resampled(np.random.default_rng(seed))
        low, high = map(float, np.percentile(means, (2.5, 97.5)))
    return Estimate(grouped.mean, low, high, len(values))


def average(
    tasks: Sequence[Clusters], *, seed: int, weights: Sequence[float] | None = None
) -> Estimate:
    """Mean over tasks; examples are resampled inside each, never pooled.

    Args:
        tasks: scores of each.
        seed: of the resampling.
        weights: of the tasks; None: all the same.
    """
    rng = np.random.default_rng(seed)
    means = np.average([task.resampled(rng) for task in tasks], axis=0, weights=weights)
    low, high = map(float, np.percentile(means, (2.5, 97.5)))
    value = float(np.average([task.mean for task in tasks], weights=weights))
    return Estimate(value, low, high, int(sum(task.counts.sum() for task in tasks)))


@dataclasses.dataclass(frozen=True)
class Difference:
    """A paired difference.

    Attributes:
        estimate: mean of ours less theirs, with its interval.
        p: two-sided, that there is no difference, by the bootstrap.
        at_least: lower end of the one-sided 95 % interval: for non-inferiority.
        mcnemar: exact p of McNemar's test; None unless all scores are 0 or 1.
    """

    estimate: Estimate
    p: float
    at_least: float
    mcnemar: float | None


def mcnemar(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Exact p: min(1, 2 P(Bin(b + c, 1/2) <= min(b, c))), 1 where none differ."""
    b = sum(a > o for a, o in zip(ours, theirs, strict=True))
    c = sum(a < o for a, o in zip(ours, theirs, strict=True))
    if not b + c:
        return 1.0
    tail = sum(math.comb(b + c, k) for k in range(min(b, c) + 1))
    return min(1.0, 2 * tail / 2 ** (b + c))


def difference(
    ours: Sequence[float], theirs: Sequence[float], clusters: Sequence[str], *, seed: int
) -> Difference:
    """Of two systems on the same examples, in the same order.

    Args:
        ours: scores.
        theirs: scores of the system compared with.
        clusters: of the examples.
        seed: of the resampling.

    Raises:
        ValueError: lengths that differ.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} scores cannot be paired with {len(theirs)}")
    gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
    grouped = Clusters.of(gaps, clusters)
    binary = {*ours, *theirs} <= {0.0, 1.0} and len(grouped.sums) == len(gaps)
    exact = mcnemar(ours, theirs) if binary else None
    return _summary(grouped.mean, grouped.resampled(np.random.default_rng(seed)), len(gaps), exact)


def average_difference(
    tasks: Sequence[Clusters], *, seed: int, weights: Sequence[float] | None = None
) -> Difference:
    """Of the mean over tasks, each with the differences of its examples; see `average`."""
    rng = np.random.default_rng(seed)
    means = np.average([task.resampled(rng) for task in tasks], axis=0, weights=weights)
    count = int(sum(task.counts.sum() for task in tasks))
    value = float(np.average([task.mean for task in tasks], weights=weights))
    return _summary(value, means, count, None)


def _summary(value: float, means: np.ndarray, n: int, exact: float | None) -> Difference:
    tails = [(1 + int(side.sum())) / (len(means) + 1) for side in (means <= 0, means >= 0)]
    at_least, low, high = map(float, np.percentile(means, (5, 2.5, 97.5)))
    return Difference(Estimate(value, low, high, n), min(1.0, 2 * min(tails)), at_least, exact)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number, in their order (Holm's step-down)."""
    order = np.argsort(p_values, kind="stable")
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[int(index)] = highest
    return adjusted
