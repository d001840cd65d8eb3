"""The host store and what runs on it: rows, aliases, commits before scans, errors, stale rows."""

from __future__ import annotations

import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from host_offload.cpu_selection import CpuSelector, SelectionRule
from host_offload.retrieval import Retrieval, Span
from host_offload.row_store import RowShape, RowStore

SHAPE = RowShape(
    layers=2, batch=3, heads=2, capacity=64, width=16, dtype=jnp.dtype("float32"), quantised=True
)
ROWS, GRANULE = 16, 8


@pytest.fixture
def store() -> RowStore:
    return RowStore(SHAPE, jax.devices()[0])


@pytest.fixture
def retrieval(store: RowStore) -> Iterator[Retrieval]:
    selector = CpuSelector(SelectionRule(shortlist=8.0), 0.25)
    with Retrieval(
        store, selector, ROWS, GRANULE, jax.devices()[0], workers=2, quantised=True
    ) as made:
        yield made


def fresh(seed: int, rows: int = 64) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal((3, 2, 2, rows, 16), np.float32) for _ in range(2))


def test_rows_are_written_in_place_and_read_without_a_copy(store: RowStore):
    before = store.keys(1, 2)
    kv = fresh(0, rows=4)[0][0]
    store.write(1, 2, 8, kv, (np.ones((2, 4, 16), np.int8), np.ones((2, 4), np.float32)))
    np.testing.assert_array_equal(np.asarray(before)[:, 8:12], kv[:, 0])
    found = np.empty((2, 2, 4, 16), np.float32)
    store.gather(1, 2, np.tile(np.arange(8, 12), (2, 1)), found, granule=1, run=1)
    np.testing.assert_array_equal(found, kv)
    assert not store.key_view(1, 2)[:, 12:].any() and not store.key_view(0, 2).any()
    small, scales = store.quantised_keys(1, 2)
    assert small[:, 8:12].all() and scales[:, 8:12].all() and int((scales != 0).sum()) == 8


def test_fetches_the_rows_that_numpy_would(retrieval: Retrieval):
    layers = fresh(1)
    retrieval.commit([jnp.asarray(kv) for kv in layers], [(0, 1, 0), (2, 0, 0)])
    queries = np.random.default_rng(2).standard_normal((3, 2, 3, 16), np.float32)
    spans = [Span(1, 4, 40, 10), Span(0, 4, 20, 30)]
    for layer, kv in enumerate(layers):
        found = retrieval.request(layer, jnp.asarray(queries), spans).result(60)
        assert found.counts.tolist() == [16, 10, 0]
        for row, source, end, count in ((1, 0, 40, 10), (0, 2, 20, 16)):
            keys = kv[source][:, 0]
            logits = np.einsum("kqh,ksh->kqs", queries[row], keys[:, 4:end]) * 0.25
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            mass = (weights / weights.sum(-1, keepdims=True)).sum(1)
            for head in range(2):
                best = np.sort(np.argsort(-mass[head])[:count]) + 4
                np.testing.assert_array_equal(found.ids[row][head], best)
                got = np.asarray(found.kv)[row, head, :, :count]
                np.testing.assert_array_equal(got, kv[source][head][:, best])


def test_stale_rows_never_reach_a_program(retrieval: Retrieval):
    """What programs read besides the rows that count is finite, whatever the buffer held."""
    retrieval.commit([jnp.asarray(kv) for kv in fresh(3)], [(row, row, 0) for row in range(3)])
    for view in retrieval._staging._views:
        view[:] = np.nan
    queries = jnp.ones((3, 2, 3, 16))
    spans = [Span(0, 0, 40, 5), Span(1, 0, 40, 8), Span(2, 0, 40, 16)]
    found = retrieval.request(0, queries, spans).result(60)
    rows = np.asarray(found.kv)
    assert np.isfinite(rows[0, :, :, :8]).all() and (rows[0, :, :, 5:8] == 0).all()
    # The granule after the last full one is the one that is read row by row.
    assert np.isfinite(rows[1]).all() and np.isfinite(rows[2]).all()


def test_commits_come_before_the_scans_that_were_asked_for_later(
    retrieval: Retrieval, monkeypatch: pytest.MonkeyPatch
):
    write = retrieval.store.write

    def slow(*args: object) -> None:
        time.sleep(0.01)
        write(*args)

    monkeypatch.setattr(retrieval.store, "write", slow)
    layers = fresh(4)
    retrieval.commit([jnp.asarray(kv) for kv in layers], [(1, 1, 0)])
    found = retrieval.request(1, jnp.ones((3, 2, 3, 16)), [Span(1, 0, 8, 8)]).result(60)
    np.testing.assert_array_equal(np.asarray(found.kv)[1, :, :, :8], layers[1][1, :, :, :8])


def test_one_request_can_fail_alone(retrieval: Retrieval):
    bad = fresh(5)
    bad[0][2, :, 0, 20] = np.nan
    retrieval.commit([jnp.asarray(kv) for kv in bad], [(row, row, 0) for row in range(3)])
    spans = [Span(row, 0, 64, 8) for row in range(3)]
    found = retrieval.request(0, jnp.ones((3, 2, 3, 16)), spans).result(60)
    assert list(found.errors) == [2] and "NaN" in str(found.errors[2])
    assert found.counts.tolist() == [8, 8, 0]


def test_sizes_are_checked():
    with pytest.raises(ValueError, match=r"1\.0 KiB"):
        RowStore(SHAPE, jax.devices()[0], budget=1024)
