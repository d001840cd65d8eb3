"""Pages: every one is free, or some row's; shared ones count for each row that has them."""

import collections

import numpy as np

from sparda_jax.engine.pages import Pages


def check(pages):
    held = collections.Counter(
        page for row in range(4) for page in pages.table[row, : pages.held[row]].tolist()
    )
    assert sorted(pages._free + list(held)) == list(range(pages.count))
    assert all(pages._users[page] == held[page] for page in range(pages.count))
    assert pages.used([0, 1, 2, 3]) == len(held)


def test_random_rows_come_and_go():
    rng = np.random.default_rng(0)
    pages, shared = Pages(12, 4, 6), 0
    for _ in range(500):
        row, source = rng.integers(4, size=2).tolist()
        common = int(rng.integers(0, pages.held[source] + 1))
        blocks = common + int(rng.integers(0, 7 - common))
        if rng.random() < 0.3:
            kept = int(rng.integers(0, 7))
            pages.shrink(row, kept)
            assert pages.held[row] <= kept
        elif blocks - common <= pages.free:
            before = pages.table[source, :common].copy()
            pages.take(row, blocks, source, common)
            assert pages.table[row, :common].tolist() == before.tolist()
            assert pages.held[row] == blocks
            shared += common
        check(pages)
    assert shared > 100
