"""KV that stays on the device in some layers, host KV in 8 bits, and copies that are late."""

import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest

from sparda_jax.config import EngineConfig, ModelConfig, SamplingParams, SparseConfig
from sparda_jax.engine import placement
from sparda_jax.evaluation.decode_modes import engine_config, plan_of
from sparda_jax.evaluation.decode_traces import Workload
from tests.delays import Delays

GREEDY = SamplingParams(max_new_tokens=40)


def tokens_of(engine, prompts):
    results, report = engine.generate(prompts, GREEDY)
    return [result.tokens for result in results], report


@pytest.mark.parametrize("budget,expected", [(100, 10), (99, 9), (70, 6), (21, 0), (20, 0), (5, 0)])
def test_as_many_layers_stay_as_the_budget_allows(budget, expected):
    config = EngineConfig(offload="auto", device_kv_bytes=budget)
    assert placement.resident_layers(config, 10, 10, 2) == expected
    assert placement.resident_layers(EngineConfig(offload="none"), 10, 10, 2) == 10
    assert placement.resident_layers(EngineConfig(offload="host"), 10, 10, 2) == 0
    with pytest.raises(ValueError, match="needs device_kv_bytes"):
        EngineConfig(offload="auto")


def test_the_cost_model():
    """MiniCPM4.1-8B, 16 x 128K: 16.4 GB of weights, 3.2 of slots, 2.1 of keys; 208 MB fetched."""
    model, sparse = (
        ModelConfig.preset("minicpm4.1-8b"),
        SparseConfig(local_blocks=32, budget_blocks=96),
    )

    def predict(config, resident, hit_rate=0.9):
        sizes = {"batch": 16, "context": 131072, "weight_bytes": 16_400_000_000, "itemsize": 2}
        return placement.estimate(
            model, sparse, config, resident=resident, hit_rate=hit_rate, **sizes
        )

    ahead = EngineConfig(mode="sparda", offload="host")
    offloaded = predict(ahead, 0)
    assert offloaded.compute == pytest.approx((16.4 + 3.22 + 2.15) / 4.1, rel=0.01)
    assert offloaded.fetch == pytest.approx(208 / 50, rel=0.01)
    assert offloaded.step == pytest.approx(offloaded.compute + offloaded.fetch / 32)
    serial = predict(EngineConfig(mode="sparse", offload="host"), 0)
    assert serial.step == pytest.approx(serial.compute + serial.fetch)
    assert predict(ahead, 1).step == pytest.approx(offloaded.compute)
    int8 = predict(dataclasses.replace(ahead, host_kv_dtype="int8"), 0)
    assert int8.fetch == pytest.approx(offloaded.fetch / 2)
    steps = [predict(ahead, resident, 0.5).step for resident in range(33)]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] <= predict(EngineConfig(mode="sparse"), 32).step
    line = placement.describe(ahead, 32, 1, 2**30, predict(ahead, 1))
    assert line.startswith("KV of 1 of 32 layers stays on the device (1.00 GiB, no limit)")


def test_placed_is_never_slower_than_what_else_fits():
    """By the cost model, over batches, contexts, hit rates and device budgets."""
    model, sparse = (
        ModelConfig.preset("minicpm4.1-8b"),
        SparseConfig(local_blocks=32, budget_blocks=96),
    )
    weights, kept = 16_400_000_000, {"sparda_placed": 0, "sparse_resident": 0}
    grid = itertools.product((1, 4, 16, 64), (16, 32, 128), (0.0, 0.5, 0.9, 1.0), (4, 16, 64, 256))
    for batch, context, hit_rate, gib in grid:
        workload = Workload(1024 * context, batch, hit_rate)

        def step(mode, workload=workload, budget=gib * 2**30):
            config = engine_config(workload, mode, budget)
            plan = plan_of(model, sparse, config, workload)
            if plan.device_kv_bytes > budget:
                return math.inf
            kept[mode] = kept.get(mode, 0) + (plan.resident_layers == model.num_layers)
            return placement.estimate(
                model,
                sparse,
                config,
                batch=workload.batch,
                context=workload.context,
                resident=plan.resident_layers,
                weight_bytes=weights,
                itemsize=2,
                hit_rate=workload.hit_rate,
            ).step

        placed = step("sparda_placed")
        for other in ("sparse_resident", "sparse_offload", "sparda"):
            assert placed <= step(other)
    # All of it stays exactly where it fits.
    assert kept["sparda_placed"] == kept["sparse_resident"] > 0


def test_a_layer_that_stays_changes_no_token(make_engine, prompts):
    resident, _ = tokens_of(make_engine(mode="sparda"), prompts)
    offloaded = make_engine(mode="sparda", offload="host")
    _, all_fetched = tokens_of(offloaded, prompts)
    whole = make_engine(mode="sparda").prepare(prompts, GREEDY).plan.device_kv_bytes
    budget = offloaded.prepare(prompts, GREEDY).plan.device_kv_bytes + whole // 2
    engine = make_engine(mode="sparda", offload="auto", device_kv_bytes=budget)
    generation = engine.prepare(prompts, GREEDY)
    assert generation.plan.resident_layers == 1
    generation.prefill()
    list(generation)
    assert [result.tokens for result in generation.results()] == resident
    report = generation.report
    assert 0 < report.fetched_runs < all_fetched.fetched_runs
    assert report.device_kv_bytes == generation.plan.device_kv_bytes <= budget
    assert report.host_kv_bytes == generation.plan.host_kv_bytes == report.full_kv_bytes // 2
    assert generation.pool.layers[0] is None


def test_when_all_fits_nothing_is_offloaded(make_engine, prompts):
    engine = make_engine(mode="sparda", offload="auto", device_kv_bytes=2**40)
    plan = engine.prepare(prompts, GREEDY).plan
    assert (plan.resident_layers, plan.slots, plan.host_kv_bytes) == (2, 0, 0)


@pytest.mark.parametrize("fetch", ["program", "eager"])
def test_host_kv_in_8_bits(make_engine, prompts, fetch):
    """Prompt and write-backs are stored within half a scale; a quarter of the bytes moves."""
    exact, plain = tokens_of(make_engine(offload="host"), prompts)
    kept = make_engine().prepare(prompts, GREEDY)
    kept.prefill()
    engine = make_engine(offload="host", host_kv_dtype="int8", fetch=fetch)
    generation = engine.prepare(prompts, GREEDY)
    generation.prefill()
    for index, cache in enumerate(kept.state.layers):
        blocks = np.asarray(jax.device_get(cache.blocks))
        stored = generation.pool.layers[index]
        wide = (
            generation.pool.view(index) * np.asarray(jax.device_get(stored.scales))[..., None, None]
        )
        limit = np.abs(blocks).max((-2, -1), keepdims=True) / 127
        assert np.all(np.abs(wide - blocks) <= 0.51 * limit)
    list(generation)
    report = generation.report
    assert report.host_kv_bytes == generation.plan.host_kv_bytes == report.full_kv_bytes // 4
    assert report.run_bytes == plain.run_bytes // 4
    assert report.written_back_runs == plain.written_back_runs
    same = [
        np.mean(np.array(result.tokens) == tokens)
        for result, tokens in zip(generation.results(), exact, strict=True)
    ]
    assert np.mean(same) > 0.5


@pytest.mark.parametrize("fetch", ["program", "eager"])
def test_random_delays_change_no_token(make_engine, prompts, monkeypatch, fetch):
    """Host queues are late in both; inside a program that is compiled for it, its phases too."""
    if fetch == "program":
        expected, _ = tokens_of(make_engine(mode="sparda"), prompts)
    else:
        engine = make_engine(offload="host", host_kv_dtype="int8", fetch="eager")
        expected, _ = tokens_of(engine, prompts)
    delays = Delays(monkeypatch, seed=1)
    if fetch == "program":
        engine = make_engine(mode="sparda", offload="host", fresh=True)
    assert tokens_of(engine, prompts)[0] == expected
    assert delays.sleeps > 50
    # Two layers: each projects, fetches and attends.
    assert delays.traced == (6 if fetch == "program" else 0)
