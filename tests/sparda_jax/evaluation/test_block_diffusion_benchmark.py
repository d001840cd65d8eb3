"""Figures of the block-diffusion benchmark, worked out by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.checkpoints.safetensors import load_safetensors
from sparda_jax.config import ModelConfig
from sparda_jax.evaluation.block_diffusion_speed import Rates, SpeedPlan, speed_rows, step_floor
from sparda_jax.evaluation.sample_quality import distinct_share, perplexity


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
    config = ModelConfig.preset("sdar-8b-chat-b32")
    weights = 36 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288) + 4096 * 151936
    rates = Rates(4e12, 7e14)
    floor = lambda *sizes, **more: step_floor(config, *sizes, rates, **more).seconds
    # One request: every weight once, 2 bytes each, and the keys and values of the context.
    cached = 36 * 2 * 1024 * 32032 * 2
    assert floor(1, 32, 32000) == pytest.approx((2 * weights + cached) / 4e12)
    # Many requests: the products decide, and attention's bytes.
    cached = 64 * 36 * 2 * 1024 * 32 * 2
    assert floor(64, 32, 0) == pytest.approx(2 * 64 * 32 * weights / 7e14 + cached / 4e12)
    config = ModelConfig.preset("llada2.0-mini")
    with pytest.raises(ValueError, match="must be counted"):
        floor(1, 32, 0)
    # Each expert more is 19 layers' bytes more.
    more = floor(1, 32, 0, touched=101.0) - floor(1, 32, 0, touched=100.0)
    assert more == pytest.approx(19 * 3 * 2048 * 512 * 2 / 4e12)


def test_speed_of_a_small_mixture_of_experts(data_dir):
    """All rows of one cell, on the CPU: the program that is timed, what the floor is made of."""
    folder = data_dir / "block_diffusion" / "llada2_tiny"
    config = load_safetensors(folder).config
    facts = dataclasses.replace(config.diffusion, block_size=8, mask_token_id=250)
    config = dataclasses.replace(config, diffusion=facts, num_layers=2)
    plan = SpeedPlan("tiny", [64], [1], steps=3, repetitions=1)
    speed, step, busy = speed_rows(config, plan, Rates(1e10, 1e10))
    assert speed.name == "block_diffusion/tiny/64/B1/U3"
    wanted = 8 / (4e-3 * step.details["step_ms"])  # 8 tokens in three forwards and a commit
    assert speed.timing.median == pytest.approx(wanted)
    assert step.timing.median == pytest.approx(step.details["step_ms"] / step.details["floor_ms"])
    each = config.moe.experts_per_token
    assert each <= step.details["experts_touched"] <= min(8 * each, config.moe.num_experts)
    assert busy.timing.median > 0
