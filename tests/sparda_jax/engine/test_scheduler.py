"""Requests that come and go: each gets what it would get alone."""

import numpy as np
import pytest

from sparda_jax.config import SamplingParams
from sparda_jax.engine.scheduler import Scheduler, SchedulerConfig

LENGTH = 96
ROWS = 3
MODES = [("sparda", "host"), ("sparse", "none")]


@pytest.fixture(scope="module")
def scheduler_of(make_engine):
    """Schedulers that share the programs of one engine a mode."""

    def make(mode="sparda", offload="host", **settings) -> Scheduler:
        engine = make_engine(
            mode=mode, offload=offload, max_length=LENGTH, top_logprobs=2, prefill_chunk=48
        )
        return Scheduler(engine, SchedulerConfig(rows=ROWS, **{"queue": 500} | settings))

    return make


def draw_requests(count, seed, *, families=4):
    """Random prompts, some of which begin alike, with random settings."""
    rng = np.random.default_rng(seed)
    stems = rng.integers(0, 97, (families, LENGTH))
    requests = []
    for _ in range(count):
        new = int(rng.integers(1, 20))
        size = int(rng.integers(1, LENGTH - new + 1))
        prompt = stems[rng.integers(families), :size].copy()
        tail = int(rng.integers(0, min(size, 12)))
        prompt[size - tail :] = rng.integers(0, 97, tail)
        params = SamplingParams(
            max_new_tokens=new,
            temperature=float(rng.choice([0.0, 0.7, 1.3])),
            top_k=int(rng.choice([0, 5])),
            top_p=float(rng.choice([1.0, 0.8])),
            min_p=float(rng.choice([0.0, 0.1])),
            seed=int(rng.integers(1000)),
            stop_token_ids=tuple(rng.integers(0, 97, rng.integers(0, 4)).tolist()),
            logprobs=[None, 0, 2][rng.integers(3)],
        )
        requests.append((tuple(prompt.tolist()), params))
    return requests


def alone(scheduler, request):
    return scheduler.submit(*request).result()


def check_nothing_leaked(scheduler, requests):
    """All rows are free, no request is forgotten, and the counters add up."""
    counters = scheduler.counters
    assert scheduler.running == scheduler.waiting == scheduler.blocks_used == 0
    assert not scheduler.rows.active.any()
    assert sorted(scheduler._free) == list(range(scheduler.config.rows))
    assert set(scheduler._owners) == {None}
    assert counters.requests == counters.finished.total() == requests
    assert not scheduler.step()


def compare(result, expected, *, whole=True):
    count = len(expected.tokens) if whole else len(result.tokens)
    assert result.tokens == expected.tokens[:count]
    assert (result.likelihoods is None) == (expected.likelihoods is None)
    for mine, theirs in zip(result.likelihoods or [], expected.likelihoods or [], strict=False):
        assert mine.drawn == pytest.approx(theirs.drawn, abs=1e-4)
        np.testing.assert_allclose(
            [value for _, value in mine.top], [value for _, value in theirs.top], atol=1e-4
        )
    if whole:
        assert result.finish_reason == expected.finish_reason


@pytest.mark.parametrize("mode,offload", MODES)
def test_requests_that_come_and_go_equal_each_alone(scheduler_of, mode, offload):
    """Random lengths, settings, arrivals and cancellations, some prompts beginning alike."""
    count = 50
    rng = np.random.default_rng(1)
    requests = draw_requests(count, seed=2)
    fresh = scheduler_of(mode, offload, prefix_reuse=False)
    expected = [alone(fresh, request) for request in requests]
    assert {result.finish_reason for result in expected} == {"stop", "length"}
    check_nothing_leaked(fresh, count)
    scheduler = scheduler_of(mode, offload, prefill_seconds=1e-4)
    handles, waiting = [], list(requests)
    doomed = set(rng.choice(count, count // 3, replace=False).tolist())
    while waiting or scheduler.running or scheduler.waiting:
        for _ in range(rng.integers(0, 4)):
            if waiting:
                handles.append(scheduler.submit(*waiting.pop(0)))
        if rng.random() < 0.5:
            index = int(rng.integers(max(len(handles), 1)))
            if index in doomed and index < len(handles):
                handles[index].cancel()
        scheduler.step()
    reasons = []
    for handle, result in zip(handles, expected, strict=True):
        got = handle.result()
        reasons.append(got.finish_reason)
        compare(got, result, whole=got.finish_reason != "cancelled")
    assert reasons.count("cancelled") >= count // 10
    check_nothing_leaked(scheduler, count)
    assert scheduler.counters.cached_tokens > 0
    assert scheduler.counters.tokens == sum(len(handle.tokens) for handle in handles)
