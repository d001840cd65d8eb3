"""The fused head: the same figures as from whole logits, which never stand in memory."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.config import ModelConfig, RopeConfig, SamplingParams
from sparda_jax.diffusion.confidence import confidence
from sparda_jax.engine.state import SamplingState, sampling_fields
from sparda_jax.models import Decoder

VOCABULARY, MASK, BATCH, ROWS, TILE = 50, 7, 3, 8, 10
GREEDY = SamplingParams()


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request):
    config = ModelConfig(
        family="llama",
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        rope=RopeConfig(head_dim=8),
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        tie_word_embeddings=request.param,
    )
    return Decoder.random(config)


def run(model, x, requests, step=0):
    sampling = SamplingState(**sampling_fields(requests))
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    steps = jnp.full(len(requests), step)
    return jax.jit(confidence, static_argnames=("mask_token_id", "tile"))(
        model, x, MASK, sampling, positions, steps, tile=TILE
    )


def hidden(seed, rows=ROWS):
    return np.random.default_rng(seed).standard_normal((BATCH, rows, 16)).astype(np.float32)


def plain(model, x):
    logits = np.asarray(model.logits(x), np.float64)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return logits, weights / weights.sum(-1, keepdims=True)


def test_greedy_against_whole_logits(model):
    x = hidden(0)
    # Where the mask token is the likeliest, the next one is taken.
    row = np.asarray(model.embedding[...] if model.head is None else model.head.kernel[...].T)
    x[0, 0] = 5 * row[MASK]
    found = run(model, x, [GREEDY] * BATCH)
    logits, probability = plain(model, x)
    assert logits[0, 0].argmax() == MASK
    logits[..., MASK] = -np.inf
    token = logits.argmax(-1)
    np.testing.assert_array_equal(found.token, token)
    chosen = np.take_along_axis(probability, token[..., None], -1)[..., 0]
    np.testing.assert_allclose(found.probability, chosen, rtol=2e-5)
    entropy = -(probability * np.log(probability)).sum(-1)
    np.testing.assert_allclose(found.entropy, entropy, rtol=2e-5, atol=1e-6)
    assert found.finite.all()


def test_one_bad_row_is_seen_and_stays_alone(model):
    x = hidden(1)
    clean = run(model, x, [GREEDY] * BATCH)
    x[1, 2] = np.nan
    found = run(model, x, [GREEDY] * BATCH)
    expected = np.ones((BATCH, ROWS), bool)
    expected[1, 2] = False
    np.testing.assert_array_equal(found.finite, expected)
    for name in ("token", "probability", "entropy"):
        ours, theirs = (np.asarray(getattr(one, name))[expected] for one in (found, clean))
        np.testing.assert_array_equal(ours, theirs)


def test_draws_follow_the_filtered_softmax(model):
    """4,096 draws a request, one row each: shares within five standard errors."""
    x = np.repeat(hidden(2, rows=1), 4096, axis=1)
    requests = [
        SamplingParams(temperature=0.7, seed=1),
        SamplingParams(temperature=1.3, top_k=5, seed=2),
        SamplingParams(temperature=1.0, top_p=0.6, seed=3),
    ]
    found = run(model, x, requests)
    logits, probability = plain(model, x[:, :1])
    for row, request in enumerate(requests):
        scaled = logits[row, 0] / request.temperature
        scaled[MASK] = -np.inf
        order = np.argsort(-scaled)
        weights = np.exp(scaled - scaled.max())
        if request.top_k:
            weights[order[request.top_k :]] = 0
        share = weights / weights.sum()
        if request.top_p < 1:
            before = np.cumsum(share[order]) - share[order]
            share[order[before >= request.top_p]] = 0
            share /= share.sum()
        counts = np.bincount(np.asarray(found.token[row]), minlength=VOCABULARY) / 4096
        assert (np.abs(counts - share) <= 5 * np.sqrt(share * (1 - share) / 4096) + 3 / 4096).all()
        # Confidence is of the plain softmax, whatever the temperature and the filters.
        plain_share = probability[row, 0][np.asarray(found.token[row])]
        np.testing.assert_allclose(found.probability[row], plain_share, rtol=2e-5)


def test_a_request_draws_the_same_in_any_company(model):
    x = hidden(3)
    own = SamplingParams(temperature=1.0, seed=9)
    alone = run(model, x, [GREEDY, own, GREEDY])
    narrow = SamplingParams(temperature=2.0, top_k=3, seed=4)
    company = run(model, x, [narrow, own, narrow])
    np.testing.assert_array_equal(alone.token[1], company.token[1])
    other_step = run(model, x, [GREEDY, own, GREEDY], step=1)
    assert (alone.token[1] != other_step.token[1]).any()


def test_logits_of_all_rows_never_stand_in_memory(model):
    sampling = SamplingState(**sampling_fields([GREEDY] * BATCH))
    positions, step = jnp.zeros((BATCH, ROWS), jnp.int32), jnp.zeros(BATCH, jnp.int32)
    run = jax.jit(confidence, static_argnames=("mask_token_id", "tile"))
    lowered = run.lower(model, hidden(0), MASK, sampling, positions, step, tile=TILE)
    text = lowered.compile().as_text()
    head = {f"{VOCABULARY},16", f"16,{VOCABULARY}"}
    shapes = set(re.findall(r"f32\[([\d,]+)\]", text)) - head
    sizes = [np.prod([int(size) for size in shape.split(",")]) for shape in shapes]
    assert 8 * VOCABULARY <= max(sizes) < 11 * VOCABULARY  # tiles of 8 rows, at most 10
