"""Intervals and tests against the values of the specification and simple cases."""

import numpy as np
import pytest

from sparda_jax.evaluation import comparison
from sparda_jax.evaluation.comparison import Clusters


@pytest.mark.parametrize(
    "right,n,low,high",
    [
        (18, 20, 0.699, 0.972),
        (45, 50, 0.786, 0.957),
        (450, 500, 0.871, 0.923),
        (50, 50, 0.929, 1),
        (15, 30, 0.332, 0.668),
        (0, 10, 0, 0.278),
    ],
)
def test_wilson(right, n, low, high):
    assert comparison.wilson(right, n) == pytest.approx((low, high), abs=5e-4)


def test_bad_counts():
    for right, n in ((1, 0), (3, 2), (-1, 2)):
        with pytest.raises(ValueError, match=f"{right} of {n} is no proportion"):
            comparison.wilson(right, n)
    with pytest.raises(ValueError, match=r"a score of 0\.5 is not 0 or 1"):
        comparison.score([0.5], ["a"], binary=True, seed=0)
    with pytest.raises(ValueError, match="2 scores cannot be paired with 1"):
        comparison.difference([1, 0], [1], ["a", "b"], seed=0)


def test_clusters_widen_the_interval():
    """Ten questions asked six times each say as much as ten, not as sixty."""
    values = [float(i % 2) for i in range(10) for _ in range(6)]
    alone = comparison.score(values, list(map(str, range(60))), binary=True, seed=0)
    together = comparison.score(values, [str(i // 6) for i in range(60)], binary=True, seed=0)
    assert alone.value == together.value == 0.5 and alone.n == together.n == 60
    assert alone.high - alone.low < 0.3 < together.high - together.low


def test_difference():
    rng = np.random.default_rng(0)
    theirs = list(rng.uniform(0, 1, 40))
    names = list(map(str, range(40)))
    better = comparison.difference([x + 0.1 for x in theirs], theirs, names, seed=0)
    # Paired: the spread of the scores themselves is not in it.
    assert better.estimate.low == pytest.approx(better.estimate.high) == pytest.approx(0.1)
    assert better.p == pytest.approx(2 / 10_001) and better.mcnemar is None
    same = comparison.difference(theirs, theirs, names, seed=0)
    assert same.p == 1 and same.estimate.value == 0
    noisy = comparison.difference(list(rng.permutation(theirs)), theirs, names, seed=0)
    assert noisy.estimate.low < noisy.at_least < 0 < noisy.estimate.high and noisy.p > 0.05


def test_mcnemar_and_holm():
    assert comparison.mcnemar([1, 1, 1, 0], [0, 0, 0, 0]) == 2 / 8
    assert comparison.mcnemar([1, 0], [0, 1]) == 1 and comparison.mcnemar([1], [1]) == 1
    assert comparison.difference([1.0, 0], [0.0, 0], ["a", "b"], seed=0).mcnemar == 1
    assert comparison.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert comparison.holm([0.9, 0.8]) == [1, 1] and comparison.holm([]) == []


def test_averages_weigh_tasks_and_not_rows():
    few, many = Clusters.of([1.0], ["a"]), Clusters.of([0.0] * 9, list("bcdefghij"))
    assert comparison.average([few, many], seed=0).value == 0.5
    assert comparison.average([few, many], seed=0).n == 10
    found = comparison.average_difference([few, many], seed=0)
    assert found.estimate.value == 0.5 and found.p < 0.01
