"""Limits are checked before work begins, with the value and the limit in the message."""

import dataclasses

import pytest

from sparda_jax.config import EngineConfig, SamplingParams, SparseConfig
from sparda_jax.engine.generate import Engine

ONE = SamplingParams(max_new_tokens=4)


@pytest.mark.parametrize(
    "prompts,message",
    [
        ([], "no prompt"),
        ([[1, 2], []], "prompt 1 is empty"),
        ([[1] * 253], "253 tokens and asks for 4 more: 257 exceed the limit of 256"),
        ([[1, 97]], "token 97, outside the vocabulary of 97"),
        ([[-1]], "token -1, outside"),
    ],
)
def test_bad_prompts(make_engine, prompts, message):
    with pytest.raises(ValueError, match=message):
        make_engine().prepare(prompts, ONE)


def test_one_setting_for_all_or_one_for_each(make_engine):
    with pytest.raises(ValueError, match="2 prompts but 1 sampling settings"):
        make_engine().prepare([[1], [2]], [ONE])


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"device_kv_bytes": 1000}, r"on the device needs .* device KV budget .* allows 1000 B"),
        ({"host_kv_bytes": 1000}, r"on the host needs .* host KV budget .* allows 1000 B"),
    ],
)
def test_budgets_too_small(make_engine, settings, message):
    engine = make_engine(offload="host", **settings)
    with pytest.raises(ValueError, match=message):
        engine.prepare([[1] * 100], ONE)


def test_free_host_memory_is_a_limit(make_engine, monkeypatch):
    monkeypatch.setattr("host_offload.memory.available_host_bytes", lambda: 2048)
    with pytest.raises(ValueError, match=r"free host memory allows 2.0 KiB"):
        make_engine(offload="host").prepare([[1] * 100], ONE)


def test_planned_bytes_are_the_bytes_used(make_engine, prompts):
    for settings in (
        {"mode": "dense"},
        {"mode": "sparse"},
        {"offload": "host"},
        {"mode": "infinigen", "offload": "host"},
        {"offload": "host", "host_kv_dtype": "int8"},
    ):
        generation = make_engine(**settings).prepare(prompts, ONE)
        generation.prefill()
        assert generation.report.device_kv_bytes == generation.plan.device_kv_bytes
        assert generation.report.host_kv_bytes == generation.plan.host_kv_bytes


def test_steps_per_call_must_not_exceed_the_block(model, sparse):
    with pytest.raises(ValueError, match="steps_per_call 9 exceeds the block size 8"):
        Engine(model, sparse=sparse, config=EngineConfig(offload="host", steps_per_call=9))


def test_dense_offload_is_refused(model):
    with pytest.raises(NotImplementedError, match="use mode 'sparse'"):
        Engine(model, config=EngineConfig(mode="dense", offload="host"))


def test_unknown_mode():
    with pytest.raises(ValueError, match="unknown mode 'spares'"):
        EngineConfig(mode="spares")


def test_budget_below_the_forced_blocks():
    with pytest.raises(ValueError, match="budget of 9 blocks is smaller than the 10 forced"):
        SparseConfig(budget_blocks=9)
    assert dataclasses.replace(SparseConfig(), budget_blocks=10).budget_tokens == 640


def test_sparda_needs_forecast_weights_and_local_blocks(model, sparse, forecast):
    config = EngineConfig(mode="sparda")
    with pytest.raises(ValueError, match="mode 'sparda' needs Forecast weights"):
        Engine(model, sparse=sparse, config=config)
    with pytest.raises(ValueError, match="mode 'sparse' takes no Forecast weights"):
        Engine(model, sparse=sparse, forecast=forecast)
    without = dataclasses.replace(sparse, local_blocks=0)
    with pytest.raises(ValueError, match="local_blocks >= 1"):
        Engine(model, sparse=without, config=config, forecast=forecast)


def test_lengths_in_steps_share_their_sizes(make_engine):
    """Prompts of 70 to 90 tokens are planned alike, and never smaller than without steps."""
    plan = lambda length, **settings: make_engine(**settings).prepare([[1] * length], ONE).plan
    stepped = [plan(length, length_step=32) for length in (70, 80, 90)]
    assert len(set(stepped)) == 1
    assert stepped[0].padded_length >= 96 and stepped[0].padded_length % 32 == 0
    exact = plan(90)
    assert exact.padded_length <= stepped[0].padded_length
    assert exact.num_blocks <= stepped[0].num_blocks
    assert plan(70).num_blocks < stepped[0].num_blocks
