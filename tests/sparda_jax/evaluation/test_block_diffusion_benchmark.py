"""Figures of the block-diffusion benchmark, worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.config import ModelConfig
from sparda_jax.evaluation.block_diffusion_benchmark import MATMUL, step_floor
from sparda_jax.evaluation.sample_quality import distinct_share, perplexity
from sparda_jax.presets import PRESETS


def test_distinct_share():
    assert distinct_share([[1, 1, 1, 1], [1, 2, 3, 4]], 1) == pytest.approx((0.25 + 1) / 2)
    assert distinct_share([[1, 2, 1, 2]], 2) == pytest.approx(2 / 3)


def test_perplexity_counts_the_continuation_alone(tiny):
    prompts, texts = tiny.tokens[:, :5].tolist(), tiny.tokens[:, 5:14].tolist()
    log_p = jax.nn.log_softmax(jax.jit(lambda m: m(jnp.asarray(tiny.tokens[:, :14])))(tiny.model))
    own = [log_p[b, i - 1, tiny.tokens[b, i]] for b in range(2) for i in range(5, 14)]
    expected = np.exp(-np.mean(np.asarray(own, np.float64)))
    assert perplexity(tiny.model, prompts, texts) == pytest.approx(expected, rel=1e-4)


def test_floor_of_a_step():
    config = ModelConfig.from_huggingface(PRESETS["sdar-8b-chat-b32"])
    weights = 36 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288) + 4096 * 151936
    rate = 4e12
    # One request, no prefix: every weight once, 2 bytes each.
    assert step_floor(config, 1, 32, 0, rate) == pytest.approx(2 * weights / rate)
    cached = 36 * 2 * 1024 * 32000 * 2
    expected = (2 * weights + cached) / rate
    assert step_floor(config, 1, 32, 32000, rate) == pytest.approx(expected)
    # Many requests: the products decide.
    assert step_floor(config, 64, 32, 0, rate) == pytest.approx(2 * 64 * 32 * weights / MATMUL)
    experts = ModelConfig.from_huggingface(PRESETS["llada2.0-mini"])
    few, many = (step_floor(experts, batch, 32, 0, rate) for batch in (1, 8))
    assert few < many < 8 * few
