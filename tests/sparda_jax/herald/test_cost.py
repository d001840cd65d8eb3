"""The cost model against figures worked out by hand; settings and records of requests."""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import pytest

from host_offload.cpu_selection import SelectionRule
from sparda_jax.config import ModelConfig, SamplingParams
from sparda_jax.diffusion.config import DenoiseParams
from sparda_jax.evaluation.herald_benchmark import Variant
from sparda_jax.evaluation.herald_host_benchmark import HostPlan, measured
from sparda_jax.evaluation.herald_host_benchmark import rows as host_rows
from sparda_jax.herald.config import Budget, HeraldConfig
from sparda_jax.herald.cost import H200, Workload, choose_mode
from sparda_jax.herald.requests import Request

from .conftest import make_model

SDAR = ModelConfig.preset("sdar-8b-chat-b32")
CAPPED = dataclasses.replace(H200, device_bytes=80e9)


def workload(context: int, machine=CAPPED, **fields) -> Workload:
    return Workload(SDAR, HeraldConfig(**fields), context, 20, machine)


def test_scan_of_one_request_and_block():
    """36 layers x 8 heads x 32,768 keys of 256 B are 2.25 GiB."""
    fast = dataclasses.replace(CAPPED, gather_rate=1e15)
    found = workload(32768, fast).estimate("herald", 4)
    assert found.scan == pytest.approx(4 * 2.25 * 2**30 / CAPPED.scan_rate, rel=1e-4)
    small = workload(32768, fast, quantised_keys=True).estimate("herald", 4)
    assert small.scan == pytest.approx(4 * 1.125 * 2**30 / CAPPED.quantised_rate, rel=1e-4)


def test_modes_add_up_or_run_side_by_side():
    case = workload(32768)
    ahead, serial = case.estimate("herald", 8), case.estimate("herald_serial", 8)
    assert ahead.seconds == max(ahead.device, ahead.scan, ahead.copy)
    assert serial.seconds == pytest.approx(serial.device + serial.scan + serial.copy)
    assert ahead.limit == "scan" and ahead.device > serial.device
    assert case.estimate("mage_offload", 8).scan > 4 * serial.scan
    # 5 % of 144 KiB a token.
    assert serial.copy == pytest.approx(8 * 1639 * 144 * 1024 / 52e9, rel=1e-3)


def test_batches_end_where_memory_does():
    case = workload(32768)
    # 80 GB less 16.4 of weights in 4.5 GiB a request; the host's 220 GiB likewise.
    assert case.largest_batch("dense") == 13
    assert case.largest_batch("herald") == 48
    assert workload(32768, dataclasses.replace(CAPPED, device_bytes=1e9)).best("dense") is None


def test_auto_stays_resident_where_offload_does_not_pay():
    mode, lines = choose_mode(workload(2048), 4)
    assert mode == "dense" and lines[-1] == "mode dense: limited by GPU"
    mode, lines = choose_mode(workload(65536), 16)
    assert mode == "herald" and "limited by scan" in lines[-1]
    with pytest.raises(ValueError, match="65536 tokens"):
        choose_mode(workload(65536), 400)


def test_budget():
    assert Budget().count(1000) == 50 and Budget().count(1001) == 51 and Budget().count(0) == 0
    assert Budget(rows=64).count(40) == 40 and Budget(rows=64).count(400) == 64
    assert Budget().count(1024, run=16) == 64


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "hera"}, "hera"),
        ({"budget": Budget(), "init_rows": 6, "rule": SelectionRule(run=4)}, "6"),
        ({"mode": "mage", "quantised_keys": True}, "mage"),
        ({"patience": 0}, "0"),
    ],
)
def test_settings_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        HeraldConfig(**fields)


def test_settings_are_compared_with_the_model():
    with pytest.raises(ValueError, match="40 exceeds the 36"):
        HeraldConfig(num_dense_layers=40).check(SDAR)
    with pytest.raises(NotImplementedError, match="32 do not divide KV blocks of 48"):
        HeraldConfig(kv_block=48).check(SDAR)
    with pytest.raises(ValueError, match="without block diffusion"):
        HeraldConfig().check(ModelConfig.preset("minicpm4.1-8b"))
    with pytest.raises(ValueError, match="share"):
        Budget(share=0)


def test_request_is_cut_at_stop_tokens_and_the_limit():
    model = dataclasses.replace(
        SDAR, diffusion=dataclasses.replace(SDAR.diffusion, block_size=4, logit_shift=True)
    )
    sampling = SamplingParams(max_new_tokens=6, stop_token_ids=(9,))
    request = Request(0, [1, 2, 3, 4, 5], sampling, DenoiseParams(), model)
    assert (request.start, request.aligned, request.limit) == (4, 4, 11)
    assert request.has_next  # the block from 8 on, of which 8 is handed over
    assert request.gain_block(np.array([5, 6, 7, 8]), 3) == [6, 7, 8, 3]
    request.start += 4
    assert not request.has_next
    assert request.gain_block(np.array([3, 9, 2, 2]), -1) == [9]
    assert request.reason == "stop" and request.result().tokens == [6, 7, 8, 3, 9]
    request.fail("too late")
    assert request.error is None


def test_what_a_benchmark_is_asked_for():
    variant = Variant.parse("herald:int8,run4,all,B6")
    assert (variant.name, variant.batch) == ("herald_int8_run4_all", 6)
    config = dataclasses.replace(variant, every_query=False).applied(HeraldConfig())
    assert config.quantised_keys and config.rule.run == 4 and config.queries is None
    for text in ("heralds", "herald:int4"):
        with pytest.raises(ValueError, match=text.split(":")[-1]):
            Variant.parse(text)


def test_measured_rates_take_the_place_of_assumed_ones():
    rows = [
        {"name": "herald_host/x/32K/scan/bf16/native/threads8", "median": 60.0},
        {"name": "herald_host/x/32K/scan/bf16/native/threads16", "median": 70.0},
        {"name": "herald_host/x/32K/gather/run4/native/threads16", "median": 40.0},
    ]
    assert measured(rows, H200) == dataclasses.replace(H200, scan_rate=70e9)


def test_host_benchmark_runs_to_its_end():
    makers = ("portable", "native") if shutil.which("c++") else ("portable",)
    plan = HostPlan(320, 2, 1, workers=(2,), runs=(4,), implementations=makers, repetitions=2)
    model = dataclasses.replace(make_model().config, head_dim=32)
    found = {row.name: row.timing.median for row in host_rows(model, plan, "h")}
    expected = ["h/read/threads2"]
    for made in makers:
        for kind in ("bf16", "int8"):
            scans = "scan", "scan_beside_copies"
            expected += [f"h/{what}/{kind}/{made}/threads2" for what in scans]
        expected.append(f"h/gather/run4/{made}/threads2")
        expected += [f"h/retrieval/{kind}/{made}/run4/threads2" for kind in ("bf16", "int8")]
    assert list(found) == expected
    assert all(0 < value < float("inf") for value in found.values())
