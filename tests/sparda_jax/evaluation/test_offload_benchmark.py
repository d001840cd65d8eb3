"""The trace decides the traffic: it must have the hit rate that it states."""

import dataclasses

import numpy as np
import pytest

from pallas_kernels.geometry import BlockGeometry
from sparda_jax.config import ModelConfig, RopeConfig, SparseConfig
from sparda_jax.evaluation import offload_benchmark
from sparda_jax.evaluation.decode_modes import engine_config, largest_batch, plan_of
from sparda_jax.evaluation.decode_traces import Workload, make_trace

SPARSE = SparseConfig(BlockGeometry(32, 16, 8), local_blocks=2, budget_blocks=14)
MODEL = ModelConfig(
    family="llama",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope=RopeConfig(8),
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    kv_importance=True,
)


@pytest.mark.parametrize("hit_rate", [1.0, 0.9, 0.75])
def test_trace_keeps_the_share_asked_for(hit_rate):
    workload = Workload(1027, 3, hit_rate)
    trace = make_trace(workload, SPARSE, 2, np.random.default_rng(0))
    assert trace.shape == (workload.steps, 3, 2, 14)
    kept = []
    for step, ids in enumerate(trace):
        own = (1027 + step) // 32
        for row in ids.reshape(-1, 14):
            assert np.all(np.diff(row) > 0)
            assert {0, own - 2, own - 1, own} <= set(row.tolist())
            assert row[-1] == own
        if step:
            pairs = zip(ids.reshape(-1, 14), trace[step - 1].reshape(-1, 14), strict=True)
            kept += [len(set(new[1:-3]) & set(old[1:-3])) / 10 for new, old in pairs]
    assert np.mean(kept) == pytest.approx(hit_rate, abs=0.01)


@pytest.fixture(autouse=True)
def known_bandwidth(monkeypatch):
    """Measuring it takes 8 GiB."""
    monkeypatch.setattr(offload_benchmark.Session, "copy_bandwidth", 1e10)


def test_the_engine_meets_the_hit_rate():
    workload = Workload(1024, 2, 0.8, calls=1, steps_per_call=12)
    modes = ["sparda_placed", "sparda_int8", "dense_resident"]
    found, kept = {}, 280_000
    for row in offload_benchmark.rows(
        MODEL, SPARSE, [workload], modes, prefix="x", limits=offload_benchmark.Memory(kept)
    ):
        assert row.unit == "tok/s" and row.timing.median > 0
        found[row.name.removeprefix("x/1K/B2/").removeprefix("hit0.8/")] = row.details
    assert list(found) == modes
    for mode, details in found.items():
        resident = mode == "dense_resident"
        # All that a resident layer selects is there.
        rate = {"dense_resident": 1.0, "sparda_placed": 0.9, "sparda_int8": 0.8}[mode]
        assert details["hit_rate"] == pytest.approx(rate, abs=0.03)
        assert (details["moved_mb_per_step"] == 0) == resident
        assert ("over_the_larger" in details) != resident
    # Requests x KV heads x free blocks x misses x numbers of a run, in one layer of 2 bytes each
    # (the other is resident) or in two layers of 1 byte.
    moved = 2 * 2 * 10 * 0.2 * (2 * 32 * 8) * 2 * 1e-6
    for mode in ("sparda_placed", "sparda_int8"):
        assert found[mode]["moved_mb_per_step"] == pytest.approx(moved, rel=0.3)
    assert found["sparda_placed"]["device_kv_gib"] <= kept / 2**30


def test_a_context_without_room_is_refused():
    limits = offload_benchmark.Memory()
    short = [Workload(256, 1, 0.9)]
    with pytest.raises(ValueError, match="256 tokens is too short"):
        next(offload_benchmark.rows(MODEL, SPARSE, short, ["sparda"], prefix="x", limits=limits))


@pytest.mark.parametrize("mode", ["sparse_resident", "sparda", "sparda_placed"])
def test_the_largest_batch_fits_and_one_more_does_not(mode):
    workload, device, host = Workload(1024, 1, 0.9), 2_000_000, 4_000_000

    def fits(batch):
        one = dataclasses.replace(workload, batch=batch)
        plan = plan_of(MODEL, SPARSE, engine_config(one, mode, device), one)
        return plan.device_kv_bytes <= device and plan.host_kv_bytes <= host

    batch = largest_batch(MODEL, SPARSE, workload, mode, device, host)
    assert fits(batch) and not fits(batch + 1)
    with pytest.raises(ValueError, match=r"no sequence of 1024 tokens fits in 9\.8 KiB"):
        largest_batch(MODEL, SPARSE, workload, mode, 10_000, host)
