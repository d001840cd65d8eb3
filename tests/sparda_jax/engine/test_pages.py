"""Pages: every one is free, or some row's; shared ones count for each row that has them."""

import collections

import numpy as np

from sparda_jax.engine.pages import Pages
from sparda_jax.engine.pieces import capacities, cut, piece_sizes


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


def test_pieces_cover_what_is_not_known():
    """One after the other, within the bucket, none beside the end, few of each size."""
    sizes = piece_sizes(1024, 16)
    assert (sizes, piece_sizes(48, 16), piece_sizes(128, 16)) == ((1024, 256, 64), (48,), (128, 32))
    buckets = capacities(sizes, 3000)
    assert buckets == [1024, 2048, 3008]
    rng = np.random.default_rng(1)
    for length in [1, 64, 1023, 1024, 2900, *rng.integers(1, 3001, 200).tolist()]:
        capacity = next(size for size in buckets if size >= length)
        first = int(rng.integers(0, length)) // 64 * 64
        pieces = list(cut(first, length, capacity, sizes))
        ends = [at + size for at, size in pieces]
        assert [at for at, _ in pieces] == [first, *ends[:-1]]
        assert pieces[-1][0] < length <= ends[-1] <= capacity
        counts = [sum(size == each for _, size in pieces) for each in sizes]
        # Four would be one of the size above, unless that does not fit in the bucket.
        assert max(counts[1:]) <= 3 or (first + counts[0] * 1024 + 1024 > capacity)
