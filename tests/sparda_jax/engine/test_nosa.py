"""NOSA in the engine: the bias and the second stage are the same whichever way it runs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.config import EngineConfig, SamplingParams
from sparda_jax.engine.plan import check_settings
from sparda_jax.forecast.forward import sparda_logits
from sparda_jax.models import Decoder

NEW_TOKENS = 20
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS)


@pytest.fixture(scope="module")
def nosa(model):
    important = Decoder.random(dataclasses.replace(model.config, kv_importance=True), seed=3)
    with jax.transfer_guard("allow"):
        for layer in important.layers:
            layer.importance.scale.set_value(jnp.array([3.0, 2.0]))
    return important


@pytest.fixture(scope="module")
def two_stages(sparse):
    return dataclasses.replace(sparse, query_blocks=5)


@pytest.mark.parametrize(
    ("mode", "offload"), [("dense", "none"), ("sparse", "none"), ("sparda", "host")]
)
def test_decode_follows_the_whole_sequence_forward(
    make_engine, nosa, two_stages, forecast, prompts, mode, offload
):
    generation = make_engine(two_stages, nosa, mode=mode, offload=offload).prepare(prompts, GREEDY)
    generation.prefill()
    list(generation)
    generated = [result.tokens for result in generation.results()]
    assert generation.report.device_kv_bytes == generation.plan.device_kv_bytes
    sequences = [prompt + tokens for prompt, tokens in zip(prompts, generated, strict=True)]
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    padded = np.zeros((len(sequences), max(lengths)), np.int32)
    for row, sequence in enumerate(sequences):
        padded[row, : len(sequence)] = sequence

    def forward(model, forecast, tokens, lengths):
        if mode == "sparda":
            return sparda_logits(model, forecast, tokens, lengths=lengths, sparse=two_stages)
        return model(tokens, lengths=lengths, sparse=two_stages if mode == "sparse" else None)

    with jax.transfer_guard("allow"):
        drawn = np.asarray(jax.jit(forward)(nosa, forecast, padded, lengths)).argmax(-1)
    for row, (prompt, tokens) in enumerate(zip(prompts, generated, strict=True)):
        expected = drawn[row, len(prompt) - 1 : len(prompt) + len(tokens) - 1]
        np.testing.assert_array_equal(expected, tokens)


def test_infinigen_does_not_do_the_second_stage(two_stages):
    with pytest.raises(NotImplementedError, match="'infinigen' with query_blocks 5"):
        check_settings(EngineConfig(mode="infinigen"), two_stages)
