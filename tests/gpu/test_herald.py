"""HERALD on a GPU: real pinned memory and streams; LLaDA2-like layers; dense layers; bfloat16."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from host_offload.cpu_selection import SelectionRule
from sparda_jax.config import DiffusionConfig, ModelConfig, MoeConfig, RopeConfig, SamplingParams
from sparda_jax.diffusion.config import DenoiseParams
from sparda_jax.diffusion.generate import BlockEngine
from sparda_jax.diffusion.plan import BlockEngineConfig
from sparda_jax.herald.config import MODES, Budget, HeraldConfig
from sparda_jax.herald.engine import HeraldEngine
from sparda_jax.models.decoder import Decoder

pytestmark = pytest.mark.gpu

SAMPLING = SamplingParams(max_new_tokens=70)
RULE = DenoiseParams("low_confidence_static", steps=4)
ALL = HeraldConfig(budget=Budget(share=1.0), prefill_chunk=256)


@pytest.fixture(scope="module")
def model() -> Decoder:
    """float32, so that tokens do not hang on the order of summation."""
    config = ModelConfig(
        family="llada2",
        vocab_size=509,
        hidden_size=128,
        intermediate_size=256,
        num_layers=3,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        rope=RopeConfig(64),
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        moe=MoeConfig(4, 2, 64, shared_intermediate_size=64, dense_layers=1),
        diffusion=DiffusionConfig(32, 508),
    )
    made = Decoder.random(config, seed=2)
    for layer in made.layers:
        layer.q.kernel[...] = layer.q.kernel[...] * 5
    return made


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 508, length).tolist() for length in (512, 331, 20)]


@pytest.fixture(scope="module")
def base(model) -> HeraldEngine:
    return HeraldEngine(model, config=ALL)


@pytest.fixture(scope="module", autouse=True)
def exact_products():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def dense_tokens(model, prompts) -> list[list[int]]:
    config = BlockEngineConfig(prefill_chunk=256)
    results, _ = BlockEngine(model, config=config).generate(prompts, SAMPLING, RULE)
    return [result.tokens for result in results]


def tokens(engine: HeraldEngine, prompts: list[list[int]]) -> list[list[int]]:
    results, _ = engine.generate(prompts, SAMPLING, RULE)
    assert all(result.finish_reason != "failed" for result in results)
    return [result.tokens for result in results]


@pytest.mark.parametrize("mode", MODES)
def test_all_rows_give_dense_tokens(base, prompts, dense_tokens, mode):
    engine = base.with_config(dataclasses.replace(ALL, mode=mode))
    assert tokens(engine, prompts) == dense_tokens


def test_leading_layers_can_attend_everything(base, prompts, dense_tokens):
    engine = base.with_config(dataclasses.replace(ALL, num_dense_layers=1))
    assert tokens(engine, prompts) == dense_tokens


def test_few_rows_give_the_same_tokens_again_and_again(base, prompts, dense_tokens):
    rule = SelectionRule(coverage=0.5)
    engine = base.with_config(dataclasses.replace(ALL, rule=rule))
    first = tokens(engine, prompts)
    assert first != dense_tokens
    for _ in range(3):
        assert tokens(engine, prompts) == first


def test_bfloat16_runs(model, prompts):
    small = Decoder.random(model.config, seed=2, dtype="bfloat16")
    engine = HeraldEngine(small, config=dataclasses.replace(ALL, budget=Budget(share=0.1)))
    results, report = engine.generate(prompts, SAMPLING, RULE)
    assert [len(result.tokens) for result in results] == [70] * 3
    assert 0.05 < report.effective_share < 0.7
