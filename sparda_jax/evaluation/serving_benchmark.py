"""Serving measured: throughput against offline, latencies against arrival rate, known prefixes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sparda_jax.config import SamplingParams
from sparda_jax.engine.generate import Engine
from sparda_jax.engine.requests import Handle
from sparda_jax.engine.scheduler import Scheduler
from sparda_jax.engine.service import SchedulerConfig
from sparda_jax.evaluation.kernel_benchmarks.harness import Row, Timing

Say = Callable[[str], None]


@dataclass(frozen=True)
class Load:
    """What arrives.

    Attributes:
        prompt: tokens of each prompt, random.
        answer: tokens of each answer.
        requests: how many in a measurement.
        rows: that decode at the same time.
        prefill_seconds: see `SchedulerConfig`.
    """

    prompt: int
    answer: int
    requests: int
    rows: int
    prefill_seconds: float


def poisson(
    scheduler: Scheduler, prompts: Sequence[Sequence[int]], answer: int, rate: float, seed: int
) -> tuple[list[Handle], float]:
    """Submits prompts at Poisson times and runs them to their end.

    Args:
        scheduler: idle, without a thread of its own.
        prompts: token ids.
        answer: tokens of each answer.
        rate: requests a second; infinite: all at once.
        seed: of the times.

    Returns:
        The requests, and seconds from the first arrival to the last token.
    """
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(prompts))
    times = np.cumsum(gaps) - gaps[0]
    handles: list[Handle] = []
    begun = time.perf_counter()
    while len(handles) < len(prompts) or scheduler.running or scheduler.waiting:
        now = time.perf_counter() - begun
        while len(handles) < len(prompts) and times[len(handles)] <= now:
            params = SamplingParams(max_new_tokens=answer)
            handles.append(scheduler.submit(prompts[len(handles)], params))
        if not scheduler.step() and len(handles) < len(prompts):
            time.sleep(max(times[len(handles)] - (time.perf_counter() - begun), 0))
    return handles, time.perf_counter() - begun


def latency_rows(name: str, handles: Sequence[Handle], seconds: float) -> Iterator[Row]:
    """Throughput, time to first token and time between tokens, median and 99th percentile."""
    tokens = sum(len(handle.tokens) for handle in handles)
    rate = tokens / seconds
    yield Row(f"{name}/throughput", Timing.exact(rate), "tok/s", "higher")
    first = [handle.timing.first_token_seconds or 0.0 for handle in handles]
    between = [
        1e3 * handle.timing.decode_seconds / (len(handle.tokens) - 1)
        for handle in handles
        if len(handle.tokens) > 1
    ]
    for what, values, unit in (("first_token", first, "s"), ("between_tokens", between, "ms")):
        yield Row(f"{name}/{what}/median", Timing.of(values), unit, "lower")
        tail = float(np.percentile(values, 99))
        yield Row(f"{name}/{what}/p99", Timing.exact(tail, len(values)), unit, "lower")


def rows(
    engine: Engine, load: Load, rates: Sequence[float], document: int, prefix: str, say: Say
) -> Iterator[Row]:
    """All rows; the arrival rates are shares of what the engine did at saturation.

    Args:
        engine: offloaded or resident; `max_length` covers prompt and answer, and the document.
        load: what arrives.
        rates: shares of the saturated request rate.
        document: tokens of the document that two questions are asked about; 0: none.
        prefix: of the rows' names.
        say: told what is being done.
    """
    rng = np.random.default_rng(0)
    vocabulary = engine.model.config.vocab_size
    prompts = rng.integers(0, vocabulary, (load.requests, load.prompt)).tolist()
    params = SamplingParams(max_new_tokens=load.answer)
    engine.generate(prompts[: load.rows], params)  # compiles
    _, report = engine.generate(prompts[: load.rows], params)
    offline = load.rows * load.answer / (report.prefill_seconds + report.decode_seconds)
    say(f"offline, prefill included: {offline:.1f} tok/s")
    yield Row(f"{prefix}/offline", Timing.exact(offline), "tok/s", "higher")
    length = max(load.prompt + load.answer, document + 256)
    config = SchedulerConfig(
        rows=load.rows,
        max_length=length,
        queue=load.requests,
        prefill_seconds=load.prefill_seconds,
        prefix_reuse=False,
    )
    scheduler = Scheduler(engine, config)
    poisson(scheduler, prompts[:1], load.answer, np.inf, 0)  # compiles
    handles, seconds = poisson(scheduler, prompts, load.answer, np.inf, 0)
    served = load.requests * load.answer / seconds
    say(f"served at saturation: {served:.1f} tok/s")
    yield Row(
        f"{prefix}/saturated",
        Timing.exact(served),
        "tok/s",
        "higher",
        target=0.9 * offline,
    )
    yield from latency_rows(f"{prefix}/saturated", handles, seconds)
    for share in rates:
        rate = share * load.requests / seconds
        handles, taken = poisson(scheduler, prompts, load.answer, rate, 1)
        say(f"{share:.0%} of that rate: {taken:.1f} s")
        yield from latency_rows(f"{prefix}/load{share:g}", handles, taken)
    del scheduler
    if document:
        yield from prefix_rows(engine, document, f"{prefix}/prefix{document}", say)


def prefix_rows(engine: Engine, document: int, name: str, say: Say) -> Iterator[Row]:
    """Two questions about one document: the second one's time to first token."""
    rng = np.random.default_rng(2)
    vocabulary = engine.model.config.vocab_size
    scheduler = Scheduler(engine, SchedulerConfig(rows=2, max_length=document + 256))
    firsts: list[float] = []
    seconds: list[float] = []
    for attempt in range(4):
        text = rng.integers(0, vocabulary, document).tolist()
        for times, question in ((firsts, 20), (seconds, 40)):
            prompt = [*text, *rng.integers(0, vocabulary, question).tolist()]
            handle = scheduler.submit(prompt, SamplingParams(max_new_tokens=4))
            handle.result()
            if attempt:  # the first ones compile
                times.append(handle.timing.first_token_seconds or 0.0)
        say(f"{document} tokens: {handle.cached_tokens} of them known to the second question")
    first, second = Timing.of(firsts), Timing.of(seconds)
    yield Row(f"{name}/first_question", first, "s", "lower")
    yield Row(f"{name}/second_question", second, "s", "lower", target=0.05 * first.median)
