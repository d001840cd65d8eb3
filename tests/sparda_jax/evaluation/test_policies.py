"""Policies select what the deployed functions select, and forward passes are the model's own."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_selection.reference import choose_blocks
from sparda_jax.evaluation import policies
from sparda_jax.evaluation.policies import DENSE, Policy, forward
from sparda_jax.evaluation.selectors import mask_ids, take_best
from sparda_jax.forecast.forward import sparda_forward
from sparda_jax.sparse.forecast import select_prefill_forecast
from sparda_jax.sparse.infinigen import partial_keys, select_infinigen, speculate
from sparda_jax.sparse.infllm_v2 import select_prefill
from sparda_jax.sparse.mass import block_mass

LAYERS = 4


def test_one_mask_for_every_budget(tiny):
    """Against the selection kernels' rule, ties and empty blocks included."""
    rng = np.random.default_rng(0)
    scores = rng.integers(-3, 3, (3, 2, 40, 13)).astype(np.float32)
    scores[rng.uniform(size=scores.shape) < 0.3] = -np.inf
    positions = rng.integers(0, 52, (3, 40)).astype(np.int32)
    budgets = (3, 5, 9)
    mask = take_best(*map(jnp.asarray, (scores, positions, budgets)), tiny.sparse)
    ids = mask_ids(mask, 9)
    for row, budget in enumerate(budgets):
        expected = choose_blocks(
            jnp.asarray(scores[row : row + 1]),
            jnp.asarray(positions[row : row + 1] // 4),
            init_blocks=1,
            local_blocks=1,
            budget=budget,
            width=9,
        )
        np.testing.assert_array_equal(ids[row], expected.ids[0])


def test_mass_by_numpy():
    rng = np.random.default_rng(1)
    q, keys = rng.normal(size=(1, 5, 4, 8)), rng.normal(size=(1, 2, 12, 8))
    positions = np.array([[0, 3, 4, 7, 11]])
    left = np.array(block_mass(*map(jnp.asarray, (q, keys, positions)), block_size=4))
    for head, t in np.ndindex(4, 5):
        scores = keys[0, head // 2] @ q[0, t, head] / 8**0.5
        weights = np.exp(scores) * (np.arange(12) <= positions[0, t])
        left[0, head // 2, t] -= (weights / weights.sum()).reshape(3, 4).sum(1)
    np.testing.assert_allclose(left, 0, atol=1e-5)


def visited(tiny, policy, which, budgets=None):
    """Masks of `which` along the hidden states of `policy`, by layer, and the steps."""
    out = []
    limits = jnp.asarray([9, 9] if budgets is None else budgets)
    forward(
        tiny.model,
        policy,
        jnp.asarray(tiny.tokens),
        tiny.sparse,
        lengths=jnp.asarray(tiny.lengths),
        visit=lambda step: out.append((step, step.mask(which, limits, tiny.sparse))),
    )
    return out


def same_blocks(tiny, mask, ids):
    """Equal wherever the token is no padding; rounding may turn a near tie."""
    real = np.arange(76) < tiny.lengths[:, None]
    got = np.asarray(mask_ids(mask, ids.shape[-1]))
    equal = (got == np.asarray(ids)).all(-1)
    assert equal[np.broadcast_to(real[:, None], equal.shape)].mean() > 0.995


def test_selections_are_the_deployed_ones(tiny):
    sparse, lengths = tiny.sparse, jnp.asarray(tiny.lengths)
    every = {
        "sparse": policies.sparse_policy(LAYERS),
        "sparda": policies.sparda_policy(tiny.forecast),
        "ahead": policies.sparda_policy(tiny.forecast, lookahead=2),
        "infinigen": policies.infinigen_policy(tiny.skews),
    }
    runs = {name: visited(tiny, DENSE, policy) for name, policy in every.items()}
    normed = [step.state.source for step, _ in runs["sparse"]]
    for index, layer in enumerate(tiny.model.layers):
        state = runs["sparse"][index][0].state
        place = (state.positions, lengths, sparse, 19)
        own = select_prefill(state.q, state.compressed, *place).ids
        same_blocks(tiny, runs["sparse"][index][1], own)
        for name, back in (("sparda", 1), ("ahead", 2)):
            project = tiny.forecast.for_layer(index)
            queries = project(normed[max(index - back, 0)], state.cos, state.sin)
            ids = select_prefill_forecast(queries, state.compressed, *place).ids
            same_blocks(tiny, runs[name][index][1], ids)
        if index == 0:
            same_blocks(tiny, runs["infinigen"][0][1], own)
            continue
        skew = tiny.skews.layers[index]
        query = speculate(layer, skew, normed[index - 1], state.cos, state.sin)
        cache = partial_keys(state.keys, skew)
        seen = state.positions + 1
        ids = select_infinigen(query, cache, state.positions, seen, sparse, 19).ids
        same_blocks(tiny, runs["infinigen"][index][1], ids)


def test_forward_passes_are_the_models_own(tiny):
    tokens, lengths = jnp.asarray(tiny.tokens), jnp.asarray(tiny.lengths)
    sparda, _ = sparda_forward(
        tiny.model, tiny.forecast, tokens, sparse=tiny.sparse, lengths=lengths
    )
    expected = {
        "dense": tiny.model(tokens, lengths=lengths),
        "sparse": tiny.model(tokens, lengths=lengths, sparse=tiny.sparse),
        "sparda": sparda,
    }
    run = {
        "dense": DENSE,
        "sparse": policies.sparse_policy(LAYERS),
        "sparda": policies.sparda_policy(tiny.forecast),
    }
    real = np.arange(76) < tiny.lengths[:, None]
    for name, policy in run.items():
        x = forward(tiny.model, policy, tokens, tiny.sparse, lengths=lengths)
        ours, theirs = (np.asarray(z)[real] for z in (tiny.model.logits(x), expected[name]))
        # A near tie may fall the other way: that moves some tokens, not most of them.
        close = np.abs(ours - theirs).max(-1) < 1e-3
        assert close.mean() > (0.999 if name == "dense" else 0.9), name
    far = np.abs(np.asarray(expected["dense"] - expected["sparse"]))[real].max(-1)
    assert (far > 1e-2).mean() > 0.3


@pytest.mark.parametrize("name", ["sparda", "infinigen", "local", "random", "oracle"])
def test_all_blocks_are_dense_attention(tiny, name):
    policy = {
        "sparda": policies.sparda_policy(tiny.forecast),
        "infinigen": policies.infinigen_policy(tiny.skews),
        "local": policies.local_policy(LAYERS),
        "random": policies.random_policy(LAYERS),
        "oracle": policies.oracle_policy(LAYERS),
    }[name]
    tokens = jnp.asarray(tiny.tokens)
    whole = dataclasses.replace(tiny.sparse, budget_blocks=19)
    budgets = jnp.asarray([19, 9])
    dense, ours = (
        np.asarray(forward(tiny.model, p, tokens, whole, budgets=budgets)) for p in (DENSE, policy)
    )
    np.testing.assert_allclose(ours[0], dense[0], atol=1e-4)
    assert np.abs(ours[1] - dense[1]).max() > 1e-2  # the other row has a budget


def test_controls(tiny):
    (_, local), *_ = visited(tiny, DENSE, policies.local_policy(LAYERS), budgets=[5, 9])
    ids = np.asarray(mask_ids(local, 9))
    np.testing.assert_array_equal(ids[0, 0, 75], [0, 15, 16, 17, 18, -1, -1, -1, -1])
    np.testing.assert_array_equal(ids[1, 1, 52], [0, 6, 7, 8, 9, 10, 11, 12, 13])
    random = [np.asarray(mask) for _, mask in visited(tiny, DENSE, policies.random_policy(LAYERS))]
    assert (random[0].sum(-1)[:, :, 36:] == 9).all()
    late = random[0][0, 0, 72:76]  # one block, so the same candidates
    assert len({tuple(row) for row in late}) > 1 and (random[0] != random[1]).any()
    drawn = random[0][0, 0, 72:, 1:17].mean(0)  # 16 candidates, 6 places
    assert late[:, [0, 17, 18]].all() and 0 < drawn.mean() < 1


def test_lookahead_is_bounded():
    with pytest.raises(ValueError, match=r"lookahead must be in 1 \.\. 2, got 3"):
        Policy("far", (), 3)
