"""Selection against a float64 oracle, and the rules of production one by one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import BlockGeometry
from pallas_kernels.block_selection import (
    reference,
    select_blocks_forecast,
    select_blocks_multi_head,
)
from pallas_kernels.block_selection.reference import choose_blocks

SMALL = BlockGeometry(16, 8, 4)


def oracle_block_scores(
    queries, compressed, visible, num_blocks, geometry, *, multi_head, coarse=None
):
    """float64 [B, K, T, M]; queries is [B, T, N, H] or [B, T, K, H]; coarse keys and counts."""
    queries, compressed = np.asarray(queries, np.float64), np.asarray(compressed, np.float64)
    b, t, n, h = queries.shape
    k, c = compressed.shape[1:3]
    out = np.full((b, k, t, num_blocks), -np.inf)
    for i, head, token in np.ndindex(b, k, t):
        seen = min(int(visible[i, token]), c)
        group = queries[i, token].reshape(k, n // k, h)[head]
        dots = group @ compressed[i, head].T
        if multi_head:
            weights = np.exp(dots[:, :seen] / np.sqrt(h))
            scores = np.zeros(c)
            total = weights.sum(1, keepdims=True)
            if coarse is not None:
                keys = np.asarray(coarse[0], np.float64)[i, head, : coarse[1][i, token]]
                total = np.exp(group @ keys.T / np.sqrt(h)).sum(1, keepdims=True)
                total = np.where(len(keys), total, 1.0)
            if seen:
                scores[:seen] = (weights / total).sum(0)
        else:
            scores = np.where(np.arange(c) < seen, dots[0], -np.inf)
        for m in range(num_blocks):
            first, last = geometry.pool_range(m, c)
            if last > first:
                out[i, head, token, m] = scores[first:last].max()
    return out


def check(selection, scores, query_block, init_blocks, local_blocks, budget, tolerance=1e-5):
    """The selection is one that the exact scores allow, up to near ties."""
    ids, count = np.asarray(selection.ids), np.asarray(selection.count)
    b, k, t, m = scores.shape
    for i, head, token in np.ndindex(b, k, t):
        own = int(query_block[i, token])
        row = scores[i, head, token].copy()
        block = np.arange(m)
        row[(block < init_blocks) | ((block >= own - local_blocks) & (block <= own))] = np.inf
        candidates = block[block <= own]
        kept = ids[i, head, token][: count[i, head, token]]
        assert (ids[i, head, token][len(kept) :] == -1).all()
        assert len(kept) == min(budget, len(candidates))
        assert (np.diff(kept) > 0).all()
        assert np.isin(kept, candidates).all()
        rest = np.setdiff1d(candidates, kept)
        if len(kept) and len(rest):
            assert row[kept].min() >= row[rest].max() - tolerance
            # Exactly equal scores: the lower id is kept.
            worst = kept[row[kept] == row[kept].min()]
            tied = rest[row[rest] == row[kept].min()]
            assert not len(tied) or tied.min() > worst.max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("group", [1, 3, 16])
@pytest.mark.parametrize("multi_head", [True, False])
def test_against_float64(rng, multi_head, group, dtype):
    b, k, h, m, t, c = 2, 2, 8, 8, 20, 24
    heads = k * group if multi_head else k
    rules = {"init_blocks": 1, "local_blocks": 1, "budget": 4}
    select = jax.jit(
        functools.partial(
            select_blocks_multi_head if multi_head else select_blocks_forecast,
            num_blocks=m,
            geometry=SMALL,
            **rules,
        )
    )
    # The last 20 tokens, also of lengths that do not have them: those select nothing.
    for length in (1, 7, 8, 15, 16, 17, 100):
        queries = jnp.asarray(rng.normal(size=(b, t, heads, h)) * 2, dtype)
        compressed = jnp.asarray(rng.normal(size=(b, k, c, h)), dtype)
        position = np.broadcast_to(np.arange(length - t, length), (b, t))
        own = jnp.asarray(position // 16, jnp.int32)
        windows = SMALL.complete_windows if multi_head else SMALL.started_windows
        visible = jnp.asarray(np.clip(windows(position), 0, c), jnp.int32)
        exact = oracle_block_scores(queries, compressed, visible, m, SMALL, multi_head=multi_head)
        with jax.default_matmul_precision("highest"):
            check(select(queries, compressed, own, visible), exact, own, **rules)


def test_sums_over_coarser_keys(rng):
    b, k, group, h, m, t, c = 2, 2, 3, 8, 8, 20, 24
    q = jnp.asarray(rng.normal(size=(b, t, k * group, h)) * 2, jnp.float32)
    compressed = jnp.asarray(rng.normal(size=(b, k, c, h)), jnp.float32)
    coarse = jnp.asarray(rng.normal(size=(b, k, 5, h)), jnp.float32)
    query_block = jnp.asarray(rng.integers(0, m, (b, t)), jnp.int32)
    visible = jnp.asarray(rng.integers(0, c + 1, (b, t)), jnp.int32)
    few = jnp.asarray(rng.integers(0, 6, (b, t)), jnp.int32)
    rules = {"init_blocks": 1, "local_blocks": 1, "budget": 4}
    selection = select_blocks_multi_head(
        q, compressed, query_block, visible, num_blocks=m, geometry=SMALL, coarse=coarse,
        coarse_visible=few, **rules,
    )  # fmt: skip
    scores = oracle_block_scores(
        q, compressed, visible, m, SMALL, multi_head=True, coarse=(coarse, few)
    )
    check(selection, scores, query_block, **rules)


@pytest.mark.parametrize("multi_head", [True, False])
def test_chunks_of_tokens_change_nothing(rng, monkeypatch, multi_head):
    b, t, k, h, c, m = 2, 37, 2, 8, 24, 7
    queries = jnp.asarray(rng.normal(size=(b, t, 4 if multi_head else k, h)), jnp.float32)
    compressed = jnp.asarray(rng.normal(size=(b, k, c, h)), jnp.float32)
    position = jnp.asarray(np.sort(rng.integers(0, 100, (b, t)), 1), jnp.int32)
    select = select_blocks_multi_head if multi_head else select_blocks_forecast

    def run():
        return jax.jit(
            lambda *args: select(
                *args, num_blocks=m, geometry=SMALL, init_blocks=1, local_blocks=0, budget=3,
                width=7, dense=jnp.array([False, True]),
            )
        )(queries, compressed, position // 16, SMALL.complete_windows(position))  # fmt: skip

    whole = run()
    monkeypatch.setattr(reference, "CHUNK_BYTES", 4 * b * queries.shape[2] * c * 10)
    chunked = run()
    np.testing.assert_array_equal(chunked.ids, whole.ids)
    np.testing.assert_array_equal(chunked.count, whole.count)


def test_invisible_keys_have_no_influence(rng):
    """Whatever stands in a capacity beyond the visible keys, the choice is the same."""
    q = jnp.asarray(rng.normal(size=(1, 1, 4, 8)), jnp.float32)
    compressed = rng.normal(size=(1, 2, 30, 8)).astype(np.float32)
    select = jax.jit(
        functools.partial(
            select_blocks_multi_head,
            num_blocks=10,
            geometry=SMALL,
            init_blocks=0,
            local_blocks=0,
            budget=3,
        )
    )
    results = []
    for fill in (0.0, 50.0, np.nan):
        compressed[:, :, 20:] = fill
        results.append(select(q, jnp.asarray(compressed), jnp.array([[5]]), jnp.array([[20]])).ids)
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def choose(scores, own, **rules):
    scores = jnp.asarray(scores, jnp.float32)[None, None, None]
    rules = {"init_blocks": 0, "local_blocks": 0, **rules}
    selection = choose_blocks(scores, jnp.array([[own]]), **rules)
    assert int(selection.count[0, 0, 0]) == int((selection.ids >= 0).sum())
    return selection.ids[0, 0, 0].tolist()


def test_a_future_block_never_costs_a_slot():
    scores = [1, 2, 3, 4, 99, 98]
    assert choose(scores, 3, budget=3) == [1, 2, 3]
    assert choose(scores, 3, budget=3, mask_future=False) == [3, -1, -1]


def test_a_forced_init_block_must_not_lie_in_the_future():
    assert choose([1, 2, 3], 0, init_blocks=2, budget=3) == [0, -1, -1]


def test_ties_go_to_the_lowest_id():
    assert choose([1, 7, 7, 7, 7, 0], 5, budget=3) == [1, 2, 5]
    assert choose([0] * 6, 5, budget=4) == [0, 1, 2, 5]


def test_a_block_without_score_is_eligible_after_all_others():
    inf = float("inf")
    assert choose([-inf, -inf, -5, -inf, 0], 4, budget=2) == [2, 4]
    assert choose([-inf, -inf, -5, -inf, 0], 4, budget=4) == [0, 1, 2, 4]
    assert choose([-inf] * 5, 2, budget=4) == [0, 1, 2, -1]


def test_local_blocks_include_both_ends():
    assert choose([9, 9, 9, 0, 0, 0], 5, local_blocks=2, budget=4) == [0, 3, 4, 5]


def test_more_forced_blocks_than_budget_keep_the_lowest():
    assert choose([0] * 8, 7, init_blocks=1, local_blocks=4, budget=3) == [0, 3, 4]


def test_width_beyond_the_budget_and_fewer_blocks_than_budget():
    assert choose([3, 2, 1], 2, budget=2, width=5) == [0, 2, -1, -1, -1]
    assert choose([3, 2], 1, budget=6) == [0, 1, -1, -1, -1, -1]


def test_dense_rows_select_every_block_up_to_their_own(rng):
    scores = jnp.asarray(rng.normal(size=(3, 2, 4, 6)), jnp.float32)
    own = jnp.asarray([[0, 1, 4, 5]] * 3, jnp.int32)
    dense = jnp.array([True, False, True])
    rules = {"init_blocks": 1, "local_blocks": 0, "budget": 2, "width": 8}
    mixed = choose_blocks(scores, own, dense=dense, **rules)
    plain = choose_blocks(scores, own, **rules)
    np.testing.assert_array_equal(mixed.ids[1], plain.ids[1])
    block = np.arange(8)
    every = np.where(block <= np.asarray(own[0])[:, None], block, -1)
    for b in (0, 2):
        np.testing.assert_array_equal(mixed.ids[b], np.broadcast_to(every, (2, 4, 8)))
        np.testing.assert_array_equal(mixed.count[b], np.asarray(own[:2]) + 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": 0}, "budget must be at least 1 block, got 0"),
        ({"width": 2}, "width 2 is smaller than the budget of 3 blocks"),
        ({"num_blocks": 0}, "num_blocks must be at least 1, got 0"),
        ({"local_blocks": -1}, "must not be negative, got 1, -1"),
    ],
)
def test_bad_rules(change, message):
    rules = {
        "num_blocks": 6, "geometry": SMALL, "init_blocks": 1, "local_blocks": 1, "budget": 3,
    }  # fmt: skip
    one = jnp.ones((1, 1), jnp.int32)
    with pytest.raises(ValueError, match=message):
        select_blocks_forecast(
            jnp.ones((1, 1, 2, 8)), jnp.ones((1, 2, 5, 8)), one, one, **{**rules, **change}
        )


def test_bad_shapes():
    one = jnp.ones((1, 1), jnp.int32)
    rules = {
        "num_blocks": 6, "geometry": SMALL, "init_blocks": 1, "local_blocks": 1, "budget": 3,
    }  # fmt: skip
    compressed = jnp.ones((1, 2, 5, 8))
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2 KV heads"):
        select_blocks_multi_head(jnp.ones((1, 1, 3, 8)), compressed, one, one, **rules)
    with pytest.raises(ValueError, match=r"forecast has shape|compressed has shape"):
        select_blocks_forecast(jnp.ones((1, 1, 3, 8)), compressed, one, one, **rules)
