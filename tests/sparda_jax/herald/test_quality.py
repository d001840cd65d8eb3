"""The quality meters: nothing is lost where all rows are chosen; rows from made-up scores."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from sparda_jax.evaluation.herald_quality import measure
from sparda_jax.evaluation.herald_quality_benchmark import _holds, score_rows, text_windows
from sparda_jax.evaluation.herald_windows import MODES, QualityPlan, Windows

from .conftest import VOCABULARY, make_model


def test_all_rows_lose_nothing_and_few_rows_something():
    plan = QualityPlan(shares=(1.0, 0.1), blocks=1, masks=1, init_rows=4)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY - 1, (3, 128))
    with jax.default_matmul_precision("highest"):
        windows = Windows(make_model(), tokens, plan, chunk=64)
        scores = measure(windows, np.random.default_rng(1), lambda line: None)
    dense = scores["dense", 1.0, "bound"]
    assert dense.shape == (3,) and np.all(dense > 0.5 * np.log(VOCABULARY))
    assert scores["near", 0.0, "kl"].min() > 1e-3
    for mode in MODES:
        np.testing.assert_allclose(scores[mode, 1.0, "bound"], dense, rtol=1e-5)
        assert np.abs(scores[mode, 1.0, "kl"]).max() < 1e-5
        np.testing.assert_array_equal(scores[mode, 1.0, "recall"], 1.0)
        np.testing.assert_array_equal(scores[mode, 1.0, "agreement"], 1.0)
        assert scores[mode, 0.1, "kl"].min() > 1e-5
        if mode != "infinigen":  # it chooses anew in every forward
            np.testing.assert_allclose(scores[mode, 1.0, "mass"], 1.0, rtol=1e-5)
            held = scores[mode, 0.1, "mass"]
            # The tenth of the rows with the most of it, or nearly.
            assert np.all((held > 0.1) & (held < 1) & (held <= scores["mage", 0.1, "mass"] + 1e-6))
        few = scores[mode, 0.1, "recall"]
        assert np.all(few == 1.0) if mode == "mage" else np.all((few > 0.05) & (few < 1))


def test_rows_of_scores():
    dense, near = np.array([2.0, 3.0]), np.array([3.0, 5.0])
    scores = {
        ("dense", 1.0, "bound"): dense,
        ("dense", 1.0, "kl"): dense * 0,
        ("near", 0.0, "bound"): near,
        ("mage", 0.05, "bound"): np.array([2.2, 3.4]),
        ("mage", 0.05, "recall"): np.array([0.5, 1.0]),
    }
    rows = {row.name: row.timing for row in score_rows(scores, "q")}
    assert set(rows) == {
        "q/dense/bound", "q/near/0%/bound_over_dense", "q/mage/5%/bound_over_dense",
        "q/mage/5%/gain_kept", "q/mage/5%/recall",
    }  # fmt: skip
    assert rows["q/dense/bound"].median == 2.5 and rows["q/dense/bound"].n == 2
    assert rows["q/mage/5%/bound_over_dense"].median == pytest.approx(0.3)
    assert rows["q/mage/5%/gain_kept"].median == pytest.approx(0.8)  # (0.8 + 1.6) / (1 + 2)


def test_share_of_no_gain_is_not_told():
    scores = {("dense", 1.0, "bound"): np.array([2.0, 3.0])}
    scores |= {(mode, 0.1, "bound"): np.array([2.5, 2.4]) for mode in ("mage", "herald")}
    scores |= {("near", 0.0, "bound"): np.array([2.5, 2.4])}
    assert not [row.name for row in score_rows(scores, "q") if "gain" in row.name]


def test_windows_are_spread_and_never_overlap():
    documents = [np.arange(100), np.arange(1000, 1250)]
    assert text_windows(documents, 100, 3)[:, 0].tolist() == [0, 1000, 1100]
    assert text_windows(documents, 100, 1)[:, 0].tolist() == [0]
    with pytest.raises(ValueError, match="3 windows"):
        text_windows(documents, 100, 4)


def test_value_counts_as_found_in_one_piece():
    assert _holds([1, 2, 3, 4], [2, 3]) and not _holds([1, 2, 4, 3], [2, 3])
