"""Requests that come and go: each gets what it would get alone."""

import dataclasses
import threading
import time

import jax
import numpy as np
import pytest

import sparda_jax
from sparda_jax.config import SamplingParams
from sparda_jax.engine import generate
from sparda_jax.engine.requests import StopStrings
from sparda_jax.engine.scheduler import Scheduler
from sparda_jax.engine.service import QueueFullError, SchedulerConfig
from sparda_jax.evaluation.serving_check import check_round, differences, draw_requests, leaks

LENGTH = 96
ROWS = 3
MODES = [("sparda", "host"), ("sparse", "none")]


@pytest.fixture(scope="module")
def scheduler_of(make_engine):
    """Schedulers that share the programs of one engine a mode."""

    def make(mode="sparda", offload="host", **settings) -> Scheduler:
        engine = make_engine(
            mode=mode, offload=offload, max_length=LENGTH, top_logprobs=2, prefill_chunk=LENGTH
        )
        return Scheduler(engine, SchedulerConfig(rows=ROWS, **{"queue": 500} | settings))

    return make


def alone(scheduler, request):
    return scheduler.submit(*request).result()


def check_nothing_leaked(scheduler, requests):
    assert list(leaks(scheduler, requests)) == []
    assert set(scheduler._owners) == {None}
    assert not scheduler.step()


def compare(result, expected):
    assert list(differences(result, expected)) == []


@pytest.mark.parametrize("mode,offload", MODES)
def test_requests_that_come_and_go_equal_each_alone(scheduler_of, mode, offload):
    """Random lengths, settings, arrivals and cancellations, some prompts beginning alike.

    `scripts/soak.py` runs thousands.
    """
    count = 50
    requests = draw_requests(count, 97, LENGTH, seed=2)
    scheduler = scheduler_of(mode, offload, prefill_seconds=1e-4)
    outcome = check_round(scheduler, scheduler_of(mode, offload, prefix_reuse=False), requests)
    assert outcome.wrong == []
    reasons = [result.finish_reason for result in outcome.results]
    assert set(reasons) == {"stop", "length", "cancelled"}
    assert reasons.count("cancelled") >= count // 10
    assert scheduler.counters.cached_tokens > 0
    assert scheduler.counters.tokens == sum(len(result.tokens) for result in outcome.results)
    check_nothing_leaked(scheduler, count)


def test_the_engine_itself_takes_requests(scheduler_of):
    """`sparda_jax.Engine`: submit, step, iterators, cancel, drain; and the tokens of `generate`."""
    scheduler = scheduler_of()
    engine = scheduler.engine
    assert sparda_jax.Engine is generate.Engine  # tests of scripts may replace it for a while
    prompts = np.random.default_rng(9).integers(0, 97, (2, 60)).tolist()
    engine.serve(SchedulerConfig(rows=ROWS))
    one, two, gone = (engine.submit(each, greedy(10)) for each in (*prompts, prompts[0]))
    gone.cancel()
    assert engine.step()
    assert [token for piece in one for token in piece.tokens] == one.result().tokens
    engine.drain()
    assert (two.phase, gone.result().finish_reason) == ("done", "cancelled")
    with jax.transfer_guard("allow"):
        results, _ = engine.generate(prompts, greedy(10))
    assert [one.tokens, two.tokens] == [result.tokens for result in results]


def test_the_comparison_sees_differences(scheduler_of):
    """Guards the test above: another token, reason or probability is found."""
    scheduler = scheduler_of()
    result = alone(scheduler, ([1, 2, 3], greedy(4, logprobs=1)))
    assert list(differences(result, result)) == []
    likelihood = dataclasses.replace(result.likelihoods[0], drawn=-99.0)
    others = [
        {"tokens": [*result.tokens[:-1], result.tokens[-1] ^ 1]},
        {"tokens": result.tokens[:-1]},
        {"finish_reason": "stop"},
        {"likelihoods": None},
        {"likelihoods": [likelihood, *result.likelihoods[1:]]},
    ]
    for change in others:
        assert list(differences(dataclasses.replace(result, **change), result)), change
    assert list(leaks(scheduler, 2)) == ["requests not accepted: 1"]


def greedy(tokens, **settings):
    return SamplingParams(max_new_tokens=tokens, **settings)


def test_known_prefixes_are_found_and_change_no_token(scheduler_of):
    """A second question on a document, and one on it while the first is still running."""
    rng = np.random.default_rng(5)
    document = rng.integers(0, 97, 88).tolist()
    first, second = document + [1], document + [2, 3]
    fresh = scheduler_of(prefix_reuse=False)
    expected = [alone(fresh, (prompt, greedy(6))) for prompt in (first, second)]
    assert fresh.counters.cached_tokens == 0
    scheduler = scheduler_of()
    one = scheduler.submit(first, greedy(6))
    while one.phase != "decode":
        scheduler.step()
    beside = scheduler.submit(second, greedy(6))
    compare(beside.result(), expected[1])
    compare(one.result(), expected[0])
    # 88 tokens in common, of which the last 3 may depend on what follows: 3 pieces of 24, which
    # are no whole chunk. The rest is cut otherwise than from scratch.
    assert beside.cached_tokens == 72
    again = alone(scheduler, (first, greedy(6)))
    compare(again, expected[0])
    assert again.cached_tokens == 72
    assert scheduler.counters.cached_tokens == 2 * 72
    other = alone(scheduler, ([document[0] ^ 1, *document[1:]], greedy(6)))
    assert other.cached_tokens == 0


def test_a_turn_of_a_conversation_knows_the_last_answer(scheduler_of):
    """In mode "sparse" generated tokens attend as those of a prompt do, so theirs counts too."""
    rng = np.random.default_rng(6)
    scheduler = scheduler_of("sparse", "none")
    question = rng.integers(0, 97, 40).tolist()
    answer = alone(scheduler, (question, greedy(20)))
    turn = [*question, *answer.tokens, *rng.integers(0, 97, 10).tolist()]
    result = alone(scheduler, (turn, greedy(8)))
    assert result.cached_tokens == 48
    compare(result, alone(scheduler_of("sparse", "none", prefix_reuse=False), (turn, greedy(8))))


def test_one_failing_request_ends_alone(scheduler_of):
    """Logits that are not finite, a callback that raises, a client that goes."""
    scheduler = scheduler_of()
    engine = scheduler.engine
    rng = np.random.default_rng(7)
    prompts = rng.integers(0, 97, (3, 30)).tolist()
    expected = [alone(scheduler_of(prefix_reuse=False), (each, greedy(20))) for each in prompts]

    def raises(piece):
        raise KeyError("the client's own bug")

    good = scheduler.submit(prompts[0], greedy(20))
    bad = scheduler.submit(prompts[1], greedy(20))
    while bad.phase != "decode":
        scheduler.step()
    row = scheduler._owners.index(bad)
    with jax.transfer_guard("allow"):
        layers = list(scheduler.rows.state.layers)
        tail = layers[0].tail.at[row].set(np.nan)
        layers[0] = dataclasses.replace(layers[0], tail=tail)
        scheduler.rows.state = dataclasses.replace(scheduler.rows.state, layers=tuple(layers))
    assert bad.result().finish_reason == "failed"
    assert bad.result().error == "the model's logits were not finite"
    third = scheduler.submit(prompts[2], greedy(20), on_piece=raises)
    assert third.result().finish_reason == "failed"
    assert third.result().error == 'KeyError: "the client\'s own bug"'
    compare(good.result(), expected[0])
    # The row of the failed request serves the next one, and nothing of it is taken for known.
    for prompt, result in zip(prompts, expected, strict=True):
        compare(alone(scheduler, (prompt, greedy(20))), result)
    check_nothing_leaked(scheduler, 6)
    assert scheduler.counters.finished == {"length": 4, "failed": 2}
    assert scheduler.broken is None
    assert engine.programs.compilations > 0


def test_what_never_fits_is_refused_with_numbers(scheduler_of, make_engine):
    scheduler = scheduler_of(queue=0)
    with pytest.raises(
        ValueError, match="90 tokens and asks for 7 more: 97 exceed the limit of 96"
    ):
        scheduler.submit([1] * 90, greedy(7))
    with pytest.raises(ValueError, match="the prompt is empty"):
        scheduler.submit([], greedy(1))
    with pytest.raises(ValueError, match="9 stop tokens, at most 8"):
        scheduler.submit([1], greedy(1, stop_token_ids=tuple(range(9))))
    with pytest.raises(ValueError, match="3 likeliest tokens asked for, at most 2"):
        scheduler.submit([1], greedy(1, logprobs=3))
    with pytest.raises(ValueError, match="need a tokenizer"):
        scheduler.submit([1], greedy(1), stop=["a"])
    handles = [scheduler.submit([1, 2], greedy(2)) for _ in range(ROWS)]
    with pytest.raises(QueueFullError, match="3 requests wait and 0 of 3 rows are in use"):
        scheduler.submit([1], greedy(1))
    assert [len(handle.result().tokens) for handle in handles] == [2] * ROWS
    assert scheduler.counters.refused == 6
    check_nothing_leaked(scheduler, ROWS)
    with pytest.raises(ValueError, match="max_length 97 exceeds the engine's limit of 96"):
        Scheduler(scheduler.engine, SchedulerConfig(max_length=97))
    with pytest.raises(ValueError, match="denoising settings are for models of block diffusion"):
        scheduler.submit([1], greedy(1), denoise=object())
    small = make_engine(**SMALL, host_kv_bytes=scheduler.rows.plan.host_kv_bytes // (2 * ROWS))
    with pytest.raises(ValueError, match=r"12 blocks, with rows of 12, .*; 6 such blocks"):
        Scheduler(small, SchedulerConfig(rows=3))


SMALL = {"mode": "sparda", "offload": "host", "max_length": LENGTH, "prefill_chunk": 64}


def test_a_pool_of_few_pages_serves_as_many_requests_as_it_holds(scheduler_of, make_engine):
    """Three rows, pages for one and a half: short requests run together, long ones in turn."""
    whole = scheduler_of(prefix_reuse=False)
    engine = make_engine(
        **SMALL, top_logprobs=2, host_kv_bytes=whole.rows.plan.host_kv_bytes // ROWS // 2 * 3
    )
    scheduler = Scheduler(engine, SchedulerConfig(rows=ROWS, prefill_seconds=60))
    assert scheduler.rows.blocks == 18
    rng = np.random.default_rng(8)
    stem = rng.integers(0, 97, 60).tolist()
    asked = [(rng.integers(0, 97, size).tolist(), greedy(10)) for size in (30, 20, 25, 80, 80, 10)]
    asked += [(stem + [number], greedy(12)) for number in range(3)]
    handles = [scheduler.submit(*each) for each in asked]
    most, together, shared = 0, 0, False
    while scheduler.step():
        most = max(most, scheduler.blocks_used)
        together = max(together, scheduler.running)
        running = [each for each in handles if each.phase == "decode"]
        shared |= scheduler.blocks_used < sum(-(-each.most_tokens // 8) for each in running)
    assert together == 3 and 12 < most <= 18
    assert shared  # pages of the stem, by two requests at once
    for each, handle in zip(asked, handles, strict=True):
        compare(handle.result(), alone(whole, each))
    check_nothing_leaked(scheduler, len(asked))
    pages = scheduler.rows.pages
    assert pages.free + pages.used(range(ROWS)) == 18


def test_rows_of_which_some_layers_stay_on_the_device(scheduler_of, make_engine):
    """With a budget for the first layer of all rows: as many layers stay as for a batch."""
    resident, offloaded = (
        scheduler_of("sparse", where).rows.plan.device_kv_bytes for where in ("none", "host")
    )
    budget = (resident + offloaded) // 2
    settings = SMALL | {
        "mode": "sparse", "offload": "auto", "top_logprobs": 2, "prefill_chunk": LENGTH
    }  # fmt: skip
    engine = make_engine(**settings, device_kv_bytes=budget)
    scheduler = Scheduler(engine, SchedulerConfig(rows=ROWS, queue=500))
    assert scheduler.rows.plan.resident_layers == 1
    requests = draw_requests(12, 97, LENGTH, seed=5)
    assert check_round(scheduler, scheduler_of("sparse", "none"), requests).wrong == []
    with pytest.raises(ValueError, match=r"device_kv_bytes.*; [3-9] such rows would fit"):
        Scheduler(engine, SchedulerConfig(rows=40))


def test_ten_thousand_wait_and_all_end(scheduler_of):
    """A long queue costs nothing but itself; closing ends it and nobody waits for ever."""
    scheduler = scheduler_of(queue=10_000)
    handles = [scheduler.submit([1, 2, 3], greedy(40)) for _ in range(10_000)]
    results = []
    with jax.transfer_guard("allow"):  # the setting of this thread does not reach others
        waiter = threading.Thread(target=lambda: results.append(handles[-1].result()))
        scheduler.start()
        waiter.start()
        handles[5000].cancel()
        while not handles[ROWS].tokens:
            time.sleep(0.001)
        scheduler.close()
        waiter.join(10)
    assert not waiter.is_alive()
    assert results[0].finish_reason == "interrupted"
    assert handles[5000].result().finish_reason == "cancelled"
    assert handles[0].result().finish_reason == "length"
    check_nothing_leaked(scheduler, 10_000)
    with pytest.raises(RuntimeError, match="shutting down"):
        scheduler.submit([1], greedy(1))


def test_cancelled_in_prefill_and_in_the_queue(scheduler_of):
    scheduler = scheduler_of(prefill_seconds=1e-6)
    busy = scheduler.submit([5] * 20, greedy(30))
    while busy.phase != "decode":
        scheduler.step()
    long, queued = (scheduler.submit([6] * 90, greedy(4)) for _ in range(2))
    scheduler.step()
    assert (long.phase, queued.phase) == ("prefill", "queued")
    long.cancel()
    queued.cancel()
    queued.cancel()
    for handle in (long, queued):
        assert handle.result().finish_reason == "cancelled"
        assert handle.tokens == []
    assert len(busy.result().tokens) == 30
    scheduler.drain()
    check_nothing_leaked(scheduler, 3)
    assert scheduler.counters.prompt_tokens == 20


def test_running_requests_wait_no_longer_than_the_budget(scheduler_of):
    """With a budget below one unit, every step runs one unit and one decode call."""
    scheduler = scheduler_of(prefill_seconds=1e-6)
    alone(scheduler, ([7] * 90, greedy(2)))  # compiled
    busy = scheduler.submit([5] * 20, greedy(40))
    while busy.phase != "decode":
        scheduler.step()
    long = scheduler.submit([8] * 90, greedy(6))
    steps, before = 0, len(busy.tokens)
    while long.phase != "decode":
        scheduler.step()
        steps += 1
    units = len(scheduler.engine.layers)  # of a chunk each; at the end the insertion
    assert steps == units + 1
    assert len(busy.tokens) - before == 4 * steps
    assert busy.phase == "decode"
    assert scheduler.counters.stalls > 0
    long.cancel()
    busy.cancel()
    scheduler.drain()


@pytest.mark.parametrize(
    "text,stops,expected,found",
    [
        ("hello", (), "hello", False),
        ("hello world", ("o w",), "hell", True),
        ("hello", ("lo!",), "hello", False),
        ("aabaab", ("aab",), "", True),
        ("xaabx", ("aac", "ab"), "xa", True),
        ("abc", ("c", "bc"), "a", True),
    ],
)
def test_stop_strings(text, stops, expected, found):
    class Characters:
        push = staticmethod(chr)
        flush = staticmethod(lambda: "")

    stream = StopStrings(Characters(), stops)
    pieces = [stream.push(ord(character)) for character in text]
    assert "".join(pieces) + stream.flush() == expected
    assert stream.found == found
    shown = ""
    for piece, end in zip(pieces, range(1, len(text) + 1), strict=True):
        shown += piece
        assert text[:end].startswith(shown)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="a stop string is empty"):
        StopStrings(None, ["a", ""])
