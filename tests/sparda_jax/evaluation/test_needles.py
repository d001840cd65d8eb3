"""Needles stand in the text, fit the length, and are found when the model says them."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.evaluation import needles, policies, quality
from sparda_jax.evaluation.policies import DENSE, forward

TEXT = " ".join(
    f"Sentence number {i} speaks of {word}, at some length and to no end."
    for i, word in enumerate(["rivers", "stones", "a long road", "winter"] * 60)
)


@pytest.mark.parametrize("task", needles.TASKS)
def test_samples(task, default_tokenizer):
    drawn = needles.samples(task, default_tokenizer, [TEXT], 700, 6, seed=3)
    again = needles.samples(task, default_tokenizer, [TEXT], 700, 6, seed=3)
    assert [s.tokens for s in drawn] == [s.tokens for s in again]
    assert len({s.tokens for s in drawn}) == 6
    other = needles.samples(task, default_tokenizer, [TEXT], 700, 6, seed=4)
    assert drawn[0].tokens != other[0].tokens
    for sample in drawn:
        assert 0.9 * 700 < len(sample.tokens) <= 700
        assert sample.spans[-1][1] == len(sample.tokens)
        said = [default_tokenizer.decode(sample.tokens[a:b]) for a, b in sample.spans]
        before = default_tokenizer.decode(sample.tokens[: sample.spans[0][0]])
        context = before[: before.index("<|im_end|>", before.index(TEXT[:8]))]
        assert len(set(said)) == {"single": 1, "multikey": 1, "multivalue": 4, "tracking": 5}[task]
        for value in said:
            assert value[0] == " " and value in context
        if task == "multikey":
            assert context.count("special magic numbers for") == 4
            key = before.rsplit("special magic number for ", 1)[1].split(" ")[0]
            assert f"numbers for {key} is:{said[0]}." in context
        if task == "tracking":
            chain = zip(said[1:], said[:-1], strict=True)
            assert all(f"VAR{b} = VAR{a}." in context for b, a in chain)
            order = [context.index(f"VAR{name} =") for name in said]
            assert order == sorted(order)


def test_no_room_and_unknown_tasks(default_tokenizer):
    with pytest.raises(ValueError, match="60 tokens leave no room: the question alone takes"):
        needles.samples("single", default_tokenizer, [TEXT], 60, 1, seed=0)
    with pytest.raises(ValueError, match="unknown task 'none'"):
        needles.samples("none", default_tokenizer, [TEXT], 700, 1, seed=0)
    with pytest.raises(ValueError, match="at least one text"):
        needles.samples("single", default_tokenizer, [], 700, 1, seed=0)


def test_found_by_the_models_own_words(tiny):
    """Two samples of unequal length: one whose value the model would say, one spoilt."""
    tokens = [int(t) for t in tiny.tokens[0, :60]]

    def log_probabilities():
        row = jnp.asarray([tokens + [0] * (70 - len(tokens))])  # padding is inert
        x = forward(tiny.model, DENSE, row, tiny.sparse)
        return np.asarray(jax.nn.log_softmax(tiny.model.logits(x)))[0]

    for _ in range(4):
        tokens.append(int(log_probabilities()[len(tokens) - 1].argmax()))
    good = needles.Sample(tuple(tokens), ((60, 62), (62, 64)), (0.5,))
    spoilt = [*tokens[:62], (tokens[62] + 1) % 40]
    bad = needles.Sample(tuple(spoilt), ((60, 62), (62, 63)), (0.5,))
    right, likely = needles.found(tiny.model, DENSE, [good, bad], 70, tiny.sparse, (9, 5))
    np.testing.assert_array_equal(right, [[1.0, 0.5]])  # dense attention has no budget
    log_p = log_probabilities()
    value = [sum(log_p[i - 1, tokens[i]] for i in range(a, b)) for a, b in good.spans]
    np.testing.assert_allclose(likely[0, 0], np.mean(value), rtol=1e-4)
    local = policies.local_policy(4)
    right, _ = needles.found(tiny.model, local, [good, bad], 70, tiny.sparse, (9, 3))
    assert right.shape == (2, 2)
    whole = dataclasses.replace(tiny.sparse, budget_blocks=18)
    right, _ = needles.found(tiny.model, local, [good, bad], 70, whole, (18,))
    np.testing.assert_array_equal(right, [[1.0, 0.5]])


def test_policies_run_where_dense_finds(tiny, monkeypatch):
    good = needles.Sample(tuple(int(t) for t in tiny.tokens[0, :50]), ((48, 50),), (0.1,))
    monkeypatch.setattr(needles, "samples", lambda *_, **__: [good, good])
    setting = SimpleNamespace(
        name="x", length=50, sparse=tiny.sparse, budgets=(9, 5), labels=("50%", "25%")
    )
    ran = []

    def found(model, policy, batch, length, sparse, budgets):
        ran.append((policy.name, len(batch)))
        value = 1.0 if policy is DENSE else 0.25
        rows = 1 if policy is DENSE else len(budgets)
        return np.full((rows, len(batch)), value), np.full((rows, len(batch)), -1.0)

    monkeypatch.setattr(needles, "found", found)
    run = [policies.sparse_policy(4), policies.local_policy(4)]
    call = lambda least: {
        row.name: row.timing.median
        for row in quality.needle_rows(
            tiny.model, run, None, ["x"], setting,
            samples=2, seeds=(0,), row_tokens=100, report=lambda line: None, dense_finds=least,
        )
    }  # fmt: skip
    rows = call(0.8)
    assert ran[:3] == [("dense", 1), ("dense", 1), ("sparse", 1)]  # 100 tokens: one sample
    assert rows["needle/x/100%/single/dense"] == 1.0
    assert rows["needle/x/25%/single/local"] == 0.25
    assert rows["needle/x/25%/single_over_sparse/local"] == 0.0
    assert not any(name.endswith(("sparse", "local")) for name in call(1.5))
