"""The bound of block diffusion against every mask set, one by one, without a cache."""

import itertools
import math

import jax
import numpy as np
import pytest

from sparda_jax.diffusion.generate import BlockEngine
from sparda_jax.diffusion.plan import BlockEngineConfig
from sparda_jax.diffusion.reference import _distribution
from sparda_jax.evaluation.likelihood_bound import BoundScorer, masks_of, strata

MASK, WIDTH = 39, 8


@pytest.fixture(scope="module")
def engine_of(block_model):
    def make(width, **facts):
        config = BlockEngineConfig(kv_block=16, prefill_chunk=32)
        return BlockEngine(block_model(width, **facts), config=config)

    return make


def by_hand(model, context, continuation):
    """The sum over all sets, each from a forward over the whole sequence."""
    facts, ids = model.config.diffusion, [*context, *continuation]
    shift = int(facts.logit_shift)
    distribution, total = _distribution(model, 48), 0.0
    for start in range(len(context) // WIDTH * WIDTH, len(ids), WIDTH):
        places = [i for i in range(start, start + WIDTH) if len(context) <= i < len(ids)]
        if shift and places[0] == start:
            row = distribution(ids[:start], start - WIDTH, clean=True)[-1]
            total += math.log(row[ids[start]])
            places = places[1:]
        for size in range(1, len(places) + 1):
            weight = 1 / (size * math.comb(len(places), size))
            for chosen in itertools.combinations(places, size):
                hidden = {*chosen, *range(places[-1] + 1, start + WIDTH)}
                block = [MASK if i in hidden else ids[i] for i in range(start, start + WIDTH)]
                rows = distribution(ids[:start] + block, start, clean=False)
                total += weight * sum(math.log(rows[i - shift - start][ids[i]]) for i in chosen)
    return total


@pytest.mark.parametrize("facts", [{}, {"logit_shift": True, "causal_clean": True}])
def test_all_sets(engine_of, tiny, facts):
    """Two blocks, the first with the context's tail; a whole block after a whole context."""
    engine, ids = engine_of(WIDTH, **facts), tiny.tokens[0].tolist()
    pairs = [(ids[:13], ids[13:20]), (ids[20:36], ids[36:40]), (ids[:16], ids[16:24])]
    few, scorer = BoundScorer(engine, draws=16)(pairs), BoundScorer(engine, draws=64, seed=3)
    for (context, continuation), bound in zip(pairs[:2], few, strict=False):
        assert bound.error == 0 and bound.draws == 16
        assert bound.value == pytest.approx(by_hand(engine.model, context, continuation), abs=1e-4)
    if not facts:  # drawn: right within its own error, and not a question of its neighbours
        drawn, alone = scorer(pairs)[2], scorer([pairs[2]] * 3)[0]
        exact = scorer(pairs, draws=256)[2]
        assert alone.value == pytest.approx(drawn.value, abs=1e-4)
        assert exact.error == 0 < drawn.error < 0.1 * abs(exact.value)
        assert abs(drawn.value - exact.value) < 4 * drawn.error


def test_blocks_of_one_token_are_autoregressive(engine_of, tiny):
    engine = engine_of(1, logit_shift=True, causal_clean=True)
    ids = tiny.tokens[1, :20].tolist()
    (bound,) = BoundScorer(engine, draws=16)([(ids[:12], ids[12:])])
    logits = np.asarray(jax.jit(lambda m, x: m(x))(engine.model, np.asarray([ids])), np.float64)[0]
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = sum(log_p[i - 1, ids[i]] for i in range(12, 20))
    assert (bound.value, bound.error) == (pytest.approx(expected, abs=1e-4), 0)


def test_masks():
    """Draws average to what all sets give: the weight of each position is the same."""
    rng = np.random.default_rng(0)
    assert sorted(strata(8, 8, rng)) == list(range(1, 9))
    totals = np.zeros(20)
    for group, chosen, weight in masks_of(range(20), 8000, rng):
        assert 0 <= group < 1000
        totals[list(chosen)] += weight / 1000
    np.testing.assert_allclose(totals, 1, atol=0.15)
    every = sum(weight for _, chosen, weight in masks_of((3, 5, 6), 7, rng) if 5 in chosen)
    assert every == pytest.approx(1)


def test_refusals(engine_of):
    engine = engine_of(WIDTH)
    with pytest.raises(ValueError, match="draws 12 is not a multiple of 8 of at least 16"):
        BoundScorer(engine, draws=12)
    with pytest.raises(ValueError, match="pair 0 has 0 tokens of context and 1 of continuation"):
        BoundScorer(engine)([([], [1])])
