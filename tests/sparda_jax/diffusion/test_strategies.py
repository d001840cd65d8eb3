"""Which masks a step replaces: every rule against plain lists, and settings that are refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.config import DiffusionConfig, ModelConfig, RopeConfig
from sparda_jax.diffusion.config import (
    STRATEGIES,
    DenoiseParams,
    RuleState,
    diffusion_of,
    rule_fields,
)
from sparda_jax.diffusion.reference import choose_plainly
from sparda_jax.diffusion.strategies import candidates, choose

WIDTH = 16


def test_every_rule_against_plain_lists():
    rng = np.random.default_rng(0)
    params, rows = [], []
    for strategy in STRATEGIES:
        for steps in (None, 1, 5, 16):
            for sub_block in (None, 4):
                for _ in range(4):
                    params.append(
                        DenoiseParams(
                            strategy,
                            steps,
                            threshold=float(rng.choice([0.3, 0.7, 1.0])),
                            entropy_bound=float(rng.choice([0.1, 1.5, 4.0])),
                            sub_block=sub_block,
                        )
                    )
                    # Coarse values, so that some are equal.
                    sure, unsure = rng.integers(1, 9, (2, WIDTH)) / 8
                    masked = rng.random(WIDTH) < rng.choice([0.2, 0.9])
                    masked[rng.integers(WIDTH)] = True
                    rows.append((sure, unsure, masked, rng.integers(0, 16)))
    sure, unsure, masked, step = (np.array(part) for part in zip(*rows, strict=True))
    rule = RuleState(**rule_fields(params, WIDTH))
    open_, sub = jax.jit(candidates)(masked, rule.sub_block)
    found = jax.jit(choose)(sure, unsure, open_, step, rule)
    for row, one in enumerate(params):
        left = np.flatnonzero(masked[row]).tolist()
        if one.sub_block:
            left = [i for i in left if i // one.sub_block == left[0] // one.sub_block]
            assert sub[row] == left[0] // one.sub_block
        expected = choose_plainly(left, sure[row], unsure[row], int(step[row]), WIDTH, one)
        assert np.flatnonzero(found[row]).tolist() == expected, (one, row)
        assert expected


def test_a_row_without_masks_decides_nothing():
    rule = RuleState(**rule_fields([DenoiseParams(name) for name in STRATEGIES], WIDTH))
    shape = (len(STRATEGIES), WIDTH)
    none = jnp.zeros(shape, bool)
    step = jnp.zeros(len(STRATEGIES), jnp.int32)
    assert not jax.jit(choose)(jnp.ones(shape), jnp.zeros(shape), none, step, rule).any()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"strategy": "best"}, "unknown strategy 'best'"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"threshold": 0.0}, r"threshold must be in \(0, 1\], got 0"),
        ({"threshold": 1.1}, r"threshold must be in \(0, 1\], got 1.1"),
        ({"threshold": float("nan")}, "threshold must be in"),
        ({"entropy_bound": 0.0}, "entropy_bound must be positive"),
        ({"sub_block": 0}, "sub_block must be at least 1"),
    ],
)
def test_impossible_settings(fields, words):
    with pytest.raises(ValueError, match=words):
        DenoiseParams(**fields)


def test_settings_that_do_not_fit_the_block():
    with pytest.raises(ValueError, match="20 denoising steps exceed the block size of 16"):
        rule_fields([DenoiseParams(steps=20)], WIDTH)
    with pytest.raises(ValueError, match="sub_block 5 does not divide block size 16"):
        rule_fields([DenoiseParams(sub_block=5)], WIDTH)


def test_editing_is_refused():
    with pytest.raises(NotImplementedError, match=r"edit_threshold 0\.5: token editing"):
        DenoiseParams(edit_threshold=0.5)


def test_a_model_without_a_mask_token():
    config = ModelConfig(
        family="llama",
        vocab_size=40,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        rope=RopeConfig(head_dim=8),
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        diffusion=DiffusionConfig(4, None),
    )
    with pytest.raises(ValueError, match="this llama checkpoint names no mask token"):
        diffusion_of(config)
    with pytest.raises(ValueError, match="a llama model without block diffusion"):
        diffusion_of(dataclasses.replace(config, diffusion=None))
