"""The CPU's choice against the reference cases, numpy, and itself with int8 keys."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from host_offload.cpu_selection import (
    CpuSelector,
    SelectionRule,
    choose_rows,
    covered_mass,
    covering_count,
    quantise_rows,
    recall,
)
from host_offload.native_rows import NativeRows
from host_offload.row_store import RowShape, RowStore

CASES = Path(__file__).parents[1] / "data" / "block_diffusion" / "herald_select"


def bfloat(bits: np.ndarray) -> np.ndarray:
    return bits.view(ml_dtypes.bfloat16)


def padded(keys: np.ndarray, capacity: int, first: int) -> np.ndarray:
    """Keys from row `first` on in a store whose other rows hold NaN."""
    whole = np.full((keys.shape[0], capacity, keys.shape[2]), np.nan, np.float32).astype(keys.dtype)
    whole[:, first : first + keys.shape[1]] = keys
    return whole


def grouped(queries: np.ndarray, heads: int) -> np.ndarray:
    """[W, N, H] -> [K, W*G, H]."""
    count, _, width = queries.shape
    parts = queries.reshape(count, heads, -1, width)
    return np.moveaxis(parts, 1, 0).reshape(heads, -1, width)


@pytest.mark.parametrize("path", sorted(CASES.glob("*.npz")), ids=lambda path: path.stem[7:])
def test_equals_cases(path: Path):
    case = np.load(path)
    keys, queries, count = bfloat(case["k_bf16"]), bfloat(case["q_bf16"]), int(case["k"][0])
    heads, rows, width = keys.shape
    centre = grouped(queries[case["centre"]], heads)
    store = padded(keys, 1024, first=16)
    wanted = {
        ("centre_softmax", "softmax"): centre,
        ("centre_raw", "raw"): centre,
        ("all_softmax", "softmax"): grouped(queries, heads),
    }
    ties = "ties" in path.stem
    for number, ((name, aggregate), query) in enumerate(wanted.items()):
        selector = CpuSelector(SelectionRule(aggregate=aggregate), width**-0.5)
        ids = selector.select(store, query, 16, 16 + rows, count) - 16
        for head in range(heads):
            right = np.sort(case[f"{name}_ids"][head])
            if case["gap"][number, head] > 1e-6 or (ties and name != "all_softmax"):
                np.testing.assert_array_equal(ids[head], right)
            scores = case[f"{name}_score"][head]
            # Sets that differ only where scores are equal in float32 hold the same score.
            np.testing.assert_allclose(scores[ids[head]].sum(), scores[right].sum(), rtol=1e-5)


@pytest.mark.parametrize("values", [6, 4000])
@pytest.mark.parametrize("size", [200, 4096])
def test_low_rows_are_preferred_among_equals(size: int, values: int):
    """Whatever share is chosen; of many scores a sample says where the chosen ones begin."""
    scores = np.random.default_rng(0).integers(0, values, (3, size)).astype(np.float32)
    scores[2] = np.sort(scores[2] ** 3)  # no sample is like the whole
    for count in (0, 1, 37, 199, size - 1, size, size + 9):
        ids = choose_rows(scores, count)
        for head, chosen in zip(scores, ids, strict=True):
            order = np.lexsort((np.arange(size), -head))[:count]
            np.testing.assert_array_equal(chosen, np.sort(order))


def test_score_that_is_not_a_number_is_refused():
    with pytest.raises(FloatingPointError, match="NaN"):
        choose_rows(np.array([[1.0, 0.2, 0.1], [1.0, np.nan, 0.5]], np.float32), 1)


def test_runs_are_chosen_whole_by_their_sum():
    scores = np.random.default_rng(1).random((2, 64)).astype(np.float32)
    ids = choose_rows(scores, 16, run=8)
    sums = scores.reshape(2, 8, 8).sum(-1)
    for head in range(2):
        best = np.sort(np.argsort(-sums[head])[:2])
        np.testing.assert_array_equal(ids[head], (best[:, None] * 8 + np.arange(8)).ravel())


def test_coverage_takes_the_fewest_rows_that_suffice_in_every_head():
    scores = np.array([[0.5, 0.3, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]], np.float32)
    assert covering_count(scores[:1], 0.75, most=4) == 2
    assert covering_count(scores, 0.75, most=4) == 3
    assert covering_count(scores, 0.75, most=2) == 2
    assert covering_count(scores, 1.0, most=4) == 4
    assert covering_count(scores, 0.75, most=4, run=2) == 4


def keys_and_query(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((2, 512, 64), np.float32) * 2
    query = rng.standard_normal((2, 4, 64), np.float32)
    return keys.astype(ml_dtypes.bfloat16), query.astype(ml_dtypes.bfloat16)


def test_int8_scan_with_a_short_list_finds_the_exact_rows():
    keys, query = keys_and_query(2)
    small, scales = (np.asarray(part) for part in quantise_rows(keys))
    error = small * scales[..., None] - keys.astype(np.float32)
    assert np.all(np.abs(error) <= scales[..., None] * 0.5001)
    found = {}
    for shortlist in (1.0, 3.0):
        selector = CpuSelector(SelectionRule(shortlist=shortlist), 0.125)
        exact = selector.select(keys, query, 16, 496, 24)
        quick = selector.select_quantised(small, scales, keys, query, 16, 496, 24)
        assert quick.shape == exact.shape and np.all(np.diff(quick) > 0)
        found[shortlist] = recall(quick, exact)
    # Without a longer list the int8 order decides, which is not quite the exact one.
    assert 0.8 < found[1.0] < 1.0
    assert found[1.0] < found[3.0] and found[3.0] > 0.95


def test_meters():
    keys, query = keys_and_query(3)
    selector = CpuSelector(SelectionRule(), 0.125)
    scores = selector.scores(keys, query, 0, 512)
    np.testing.assert_allclose(scores.sum(1), 4, rtol=1e-5)
    ids = selector.select(keys, query, 0, 512, 32)
    best = -np.sort(-scores, axis=1)[:, :32]
    assert covered_mass(scores, ids, 0) == pytest.approx(float((best.sum(1) / 4).mean()))
    assert recall(ids[:, :8], ids) == 0.25


def test_rules_are_checked():
    for fields, message in (
        ({"aggregate": "mean"}, "mean"),
        ({"run": 3}, "3"),
        ({"coverage": 1.5}, "1.5"),
        ({"coverage": 0.5, "aggregate": "raw"}, "raw"),
        ({"shortlist": 0.5}, "0.5"),
    ):
        with pytest.raises(ValueError, match=message):
            SelectionRule(**fields)


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("aggregate", "quantised", "run"),
    [("softmax", False, 1), ("softmax", True, 4), ("raw", True, 1)],
)
def test_compiled_code_chooses_and_gathers_the_same_rows(aggregate, quantised, run):
    rng, count, first, end = np.random.default_rng(run), 48, 16, 180
    shape = RowShape(1, 2, 2, 192, 64, np.dtype(ml_dtypes.bfloat16), quantised)
    store = RowStore(shape, jax.devices()[0])
    draw = lambda *size: rng.integers(-4, 5, size).astype(ml_dtypes.bfloat16)
    kv = draw(2, 2, 192, 64)  # whole numbers: sums are exact in any order, ties are common
    kv[:, 0, :first] = kv[:, 0, end:] = np.nan
    small = tuple(np.asarray(part) for part in quantise_rows(kv[:, 0])) if quantised else None
    store.write(0, 1, 0, kv, small)
    rule = SelectionRule(aggregate=aggregate, run=run, shortlist=1.5)
    # Five queries: some loops take four at a time. The second scale leaves rows of equal scores.
    queries, selector = draw(2, 5, 64), CpuSelector(rule, 1 / 32)
    native = NativeRows(store, rule, 1 / 32, quantised)
    out = np.full((2, 2, 64, 64), np.nan, shape.dtype)
    ids, (began, chosen, gathered) = native.fetch((0, 1), queries, (first, end, count), out, 32)
    span, keys = (first, end, count), store.keys(0, 1)
    if quantised:
        exact = store.key_view(0, 1)
        wanted = selector.select_quantised(*store.quantised_keys(0, 1), exact, queries, *span)
    else:
        wanted = selector.select(keys, queries, *span)
    np.testing.assert_array_equal(ids, wanted)
    assert began < chosen < gathered
    for head in range(2):
        for of in range(2):
            np.testing.assert_array_equal(out[head, of, :count], kv[head, of, ids[head]])
    assert not out[:, :, count:].any()
    with pytest.raises(NotImplementedError, match="coverage"):
        NativeRows(store, SelectionRule(coverage=0.5), 1 / 32, quantised)
    with pytest.raises(FloatingPointError, match="not finite"):
        native.choose((0, 1), queries, (first, end + 1, count))
