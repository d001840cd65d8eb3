"""Meters against numpy, statistics, and the rows that come of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.evaluation import policies, quality, statistics
from sparda_jax.evaluation.language import bucket_sizes, document_scores
from sparda_jax.evaluation.policies import DENSE, forward
from sparda_jax.evaluation.selection_quality import count, document_counts, sampled_tokens
from sparda_jax.evaluation.selectors import take_best

LAYERS = 4


def test_counts_by_numpy(tiny):
    rng = np.random.default_rng(0)
    blocks, count_, budget = 10, 40, 5
    positions = np.arange(count_, dtype=np.int32)[None]
    draw = lambda: np.array(
        take_best(
            jnp.asarray(rng.normal(size=(1, 2, count_, blocks)), jnp.float32),
            jnp.asarray(positions),
            jnp.asarray([budget]),
            tiny.sparse,
        )
    )
    mask, reference = draw(), draw()
    mass = rng.uniform(size=mask.shape).astype(np.float32)
    edges = (0, 24, 40)
    got = count(*map(jnp.asarray, (mask, reference, mass, positions, [budget])), tiny.sparse, edges)
    wanted = {field.name: np.zeros(2) for field in dataclasses.fields(got)}
    for head, t in np.ndindex(2, count_):
        candidates = set(range(1, t // 4 - 1))
        if len(candidates) <= budget - 3:
            continue
        pick = lambda m, t=t, head=head: set(np.flatnonzero(m[0, head, t]))
        free, theirs = pick(mask) & candidates, pick(reference) & candidates
        best = sorted(candidates, key=lambda j, t=t, head=head: -mass[0, head, t, j])[: budget - 3]
        amount = lambda ids, t=t, head=head: sum(mass[0, head, t, j] for j in ids)
        parts = {
            "recalled": len(free & theirs),
            "reference": len(theirs),
            "mass": amount(free),
            "oracle_mass": amount(best),
            "covered": amount(pick(mask)),
            "whole": 1,
            "hits": len(free & pick(mask, t=t - 1)),
            "free_after_first": len(free),
        }
        for name, value in parts.items():
            wanted[name][int(t >= 24)] += value
    assert wanted["reference"].min() > 0
    for name, values in wanted.items():
        np.testing.assert_allclose(getattr(got, name), values, rtol=1e-5, err_msg=name)


@pytest.fixture(scope="module")
def every(tiny):
    return [
        policies.sparse_policy(LAYERS),
        policies.oracle_policy(LAYERS),
        policies.local_policy(LAYERS),
    ]


def test_documents_and_budgets_stay_apart(tiny, every):
    """The oracle has all the mass, the reference all of its own blocks, a window moves rarely."""
    edges = (0, 40, 76)
    found = document_counts(tiny.model, every, every[0], tiny.tokens[0], tiny.sparse, (5, 9), edges)
    for counts in found.values():
        assert counts.mass.shape == (2, LAYERS, 2)
        assert (counts.mass <= counts.oracle_mass * (1 + 1e-5)).all()
    np.testing.assert_allclose(found["oracle"].mass, found["oracle"].oracle_mass, rtol=1e-5)
    np.testing.assert_array_equal(found["sparse"].recalled, found["sparse"].reference)
    assert (found["local"].recalled < found["local"].reference).any()
    # A window of recent blocks: all hits, whether it moves with this token or not.
    np.testing.assert_array_equal(found["local"].hits, found["local"].free_after_first)
    choice = [sum(max(0, t // 4 - 2) > budget - 3 for t in range(40, 76)) for budget in (5, 9)]
    np.testing.assert_array_equal(found["local"].whole[:, 0, 1], 2 * np.array(choice))


def test_some_tokens_count_as_all_do(tiny, every):
    tokens = sampled_tokens(40, 8)
    assert len(tokens) == 10 and (np.diff(tokens)[::2] == 1).all()
    assert (tokens // 8 == np.repeat(np.arange(5), 2)).all()
    arguments = (tiny.model, every[:1], every[0], tiny.tokens[0, :40], tiny.sparse, (5,))
    # Buckets of one token each: what is counted at a token does not depend on the others.
    edges = tuple(range(20, 41))
    whole = document_counts(*arguments, edges)["sparse"]
    some = document_counts(*arguments, edges, every=8)["sparse"]
    tokens, seconds = (part[part >= 20] - 20 for part in (tokens, tokens[1::2]))
    assert some.whole.sum() == whole.whole[..., tokens].sum() > 0
    for name in ("reference", "mass", "oracle_mass", "covered"):
        left, right = getattr(some, name), np.zeros_like(whole.whole)
        right[..., tokens] = getattr(whole, name)[..., tokens]
        np.testing.assert_allclose(left, right, rtol=1e-4, err_msg=name)
    second = np.zeros_like(whole.hits)
    second[..., seconds] = whole.hits[..., seconds]
    assert second.sum() > 0
    np.testing.assert_array_equal(some.hits, second)
    with pytest.raises(ValueError, match="a pair in every 0 tokens"):
        sampled_tokens(76, 0)


def test_likelihood_and_divergence_by_numpy(tiny, every):
    document, edges = tiny.tokens[0], (0, 40, 76)
    got = document_scores(tiny.model, every[:1], document, tiny.sparse, (9, 5), edges)
    row = jnp.asarray(document)[None]

    def log_probabilities(policy, budget):
        x = forward(tiny.model, policy, row, tiny.sparse, budgets=jnp.asarray([budget]))
        return np.asarray(jax.nn.log_softmax(tiny.model.logits(x)), np.float64)[0, :-1]

    dense = log_probabilities(DENSE, 9)
    for index, budget in enumerate((9, 5)):
        ours = log_probabilities(every[0], budget)
        log_p = np.take_along_axis(ours, document[1:, None], 1)[:, 0]
        kl = (np.exp(dense) * (dense - ours)).sum(-1)
        assert kl.sum() > 0.01
        expected = [[v[:40].sum(), v[40:].sum()] for v in (log_p, kl)]
        np.testing.assert_allclose(got["sparse"][index], expected, rtol=2e-3)
    assert np.abs(got["dense"][0, 1]).max() < 1e-5
    np.testing.assert_array_equal(bucket_sizes(76, edges), [40, 35])


def test_ratio_and_its_interval():
    rng = np.random.default_rng(1)
    covered = 0
    for trial in range(100):
        wholes = rng.integers(50, 150, 40)
        got = statistics.ratio(rng.binomial(wholes, 0.3), wholes, seed=trial)
        covered += got.low <= 0.3 <= got.high
    assert 85 <= covered <= 100 and got.n == 40
    assert statistics.ratio(np.array([1.0, 3.0]), np.array([2.0, 2.0])).value == 1.0
    two = statistics.ratio(np.array([[1.0, 3.0], [1.0, 1.0]]), np.array([[2.0, 4.0], [2.0, 4.0]]))
    assert two.value == 0.5  # of 2/4 and 4/8
    shift = statistics.mean(np.full(5, 2.5))
    assert (shift.value, shift.low, shift.high) == (2.5, 2.5, 2.5)
    with pytest.raises(ValueError, match="nothing was counted"):
        statistics.ratio(np.zeros(3), np.zeros(3))
    with pytest.raises(ValueError, match=r"\(3,\), \(2,\)"):
        statistics.ratio(np.zeros(3), np.ones(2))


def test_rows(tiny, every):
    """Names, targets and values of a whole text evaluation."""
    run = [*every, policies.sparda_policy(tiny.forecast)]
    setting = quality.Setting.of_policy(76, dataclasses.replace(tiny.sparse, budget_blocks=6))
    lines = []
    rest = {"edges": (0, 48, 76), "report": lines.append}
    rows = [
        *quality.selection_rows(
            tiny.model, run, run[0], tiny.tokens, setting, by_layer=True, every=1, **rest
        ),
        *quality.language_rows(tiny.model, run, tiny.tokens, setting, **rest),
    ]
    by_name = {row.name: row.as_json() for row in rows}
    assert len(by_name) == len(rows) and len(lines) == 4
    mass = by_name["selection/76_policy/own/mass/sparda"]
    assert mass["target"] == 0.95 and not mass["meets"] and 0 < mass["median"] < 0.95
    layers = [by_name[f"selection/76_policy/own/mass/sparda/layer_{i:02d}"] for i in range(LAYERS)]
    np.testing.assert_allclose(np.mean([r["median"] for r in layers]), mass["median"], rtol=1e-3)
    assert by_name["selection/76_policy/own/mass/oracle"]["median"] == 1
    dense = by_name["language/76_policy/100%/perplexity/dense"]["median"]
    sparse = by_name["language/76_policy/own/perplexity/sparse"]["median"]
    gap = by_name["language/76_policy/own/gap/sparse"]["median"]
    np.testing.assert_allclose(np.log(sparse / dense), gap, atol=2e-3)
    kl = {n: by_name[f"language/76_policy/own/kl/{n}"]["median"] for n in ("sparse", "local")}
    over = by_name["language/76_policy/own/kl_over_sparse/local"]["median"]
    np.testing.assert_allclose(kl["local"] - kl["sparse"], over, rtol=1e-2)


def test_settings():
    setting = quality.Setting.of_percents(2048, 16, 3, (50, 25, 12.5, 6.25))
    assert setting.budgets == (64, 32, 16, 8) and setting.name == "2K_P16"
    assert setting.labels == ("50%", "25%", "12.5%", "6.25%")
    assert setting.sparse.geometry.kernel_size == 8
    with pytest.raises(ValueError, match=r"6.25 % of 1024 tokens are 4 blocks of 16; 5 are forced"):
        quality.Setting.of_percents(1024, 16, 3, (50, 6.25))
