"""Serving measured: throughput against offline, latencies against arrival rate, known prefixes."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np

from sparda_jax.config import EngineConfig, ModelConfig, SamplingParams, SparseConfig
from sparda_jax.engine.generate import Engine
from sparda_jax.engine.plan import plan_sizes
from sparda_jax.engine.requests import Handle
from sparda_jax.engine.scheduler import Scheduler
from sparda_jax.engine.service import SchedulerConfig
from sparda_jax.evaluation.kernel_benchmarks.harness import Row, Timing
from sparda_jax.forecast.projection import Forecast
from sparda_jax.models.decoder import Decoder

Say = Callable[[str], None]
ATTEMPTS = 3  # documents asked about, after one that compiles


@dataclass(frozen=True)
class Load:
    """What arrives.

    Attributes:
        prompt: tokens of each prompt, random.
        answer: tokens of each answer.
        requests: how many at saturation.
        rows: that decode at the same time.
        prefill_seconds: see `SchedulerConfig`.
        rates: Poisson arrivals, as shares of the requests a second at saturation.
        arrivals: requests at each of these rates.
        document: tokens of the documents that two questions are asked about; 0: none.
        offline: whether the same prompts are run by `Engine.generate`, too.
    """

    prompt: int
    answer: int
    requests: int
    rows: int
    prefill_seconds: float
    rates: Sequence[float]
    arrivals: int
    document: int
    offline: bool

    @property
    def length(self) -> int:
        """Tokens that a row must be able to hold."""
        return max(self.prompt + self.answer, self.document + 256 if self.document else 0)


def random_engine(shape: ModelConfig, sparse: SparseConfig, load: Load, chunk: int) -> Engine:
    """Random weights, bfloat16, mode "sparda", KV in a host pool of just the pages that are needed.

    Those are the blocks of a prompt and its answer in every row, or of two of the longest requests.

    Args:
        shape: of the model.
        sparse: selection rules.
        load: what arrives.
        chunk: tokens of a prefill chunk.
    """
    size, dtype = sparse.geometry.block_size, jnp.dtype("bfloat16")
    config = EngineConfig(
        mode="sparda", offload="host", prefill_chunk=chunk, max_length=load.length
    )
    row = -(-(load.prompt + load.answer) // size)
    blocks = max(load.rows * row, 2 * -(-load.length // size))
    pool = plan_sizes(
        shape, sparse, config, batch=1, padded_length=0, num_blocks=blocks, dtype=dtype
    )
    return Engine(
        Decoder.random(shape, dtype=dtype),
        sparse=sparse,
        config=dataclasses.replace(config, host_kv_bytes=pool.host_kv_bytes),
        forecast=Forecast.random(shape, dtype=dtype),
    )


@dataclass
class Arrival:
    """A request and when what happened, seconds of `time.perf_counter`.

    Attributes:
        due: it arrived.
        pieces: each of its pieces came.
        handle: of it.
    """

    due: float
    pieces: list[float] = field(default_factory=list)
    handle: Handle | None = None

    def submit(self, scheduler: Scheduler, prompt: Sequence[int], answer: int) -> None:
        """Hands it to the scheduler, a call later than it arrived."""
        note = lambda piece: self.pieces.append(time.perf_counter())
        params = SamplingParams(max_new_tokens=answer)
        self.handle = scheduler.submit(prompt, params, on_piece=note)

    @property
    def tokens(self) -> int:
        """Drawn."""
        return 0 if self.handle is None else len(self.handle.tokens)


def arrive(
    scheduler: Scheduler, prompts: Sequence[Sequence[int]], answer: int, rate: float, seed: int
) -> tuple[list[Arrival], float]:
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
    begun = time.perf_counter()
    arrivals = [Arrival(due) for due in (begun + np.cumsum(gaps) - gaps[0]).tolist()]
    waiting = list(zip(arrivals, prompts, strict=True))[::-1]
    while waiting or scheduler.running or scheduler.waiting:
        while waiting and waiting[-1][0].due <= time.perf_counter():
            arrival, prompt = waiting.pop()
            arrival.submit(scheduler, prompt, answer)
        if not scheduler.step() and waiting:
            time.sleep(max(waiting[-1][0].due - time.perf_counter(), 0))
    return arrivals, time.perf_counter() - begun


def latency_rows(name: str, arrivals: Sequence[Arrival], seconds: float) -> Iterator[Row]:
    """Tokens a second; time to first token, between tokens and pieces: median, 99th percentile."""
    rate = sum(each.tokens for each in arrivals) / seconds
    details = {"requests_per_second": len(arrivals) / seconds}
    yield Row(f"{name}/throughput", Timing.exact(rate), "tok/s", "higher", details=details)
    first = [each.pieces[0] - each.due for each in arrivals]
    between = [
        1e3 * (each.pieces[-1] - each.pieces[0]) / (each.tokens - 1)
        for each in arrivals
        if each.tokens > 1
    ]
    gaps = [
        1e3 * (later - sooner)
        for each in arrivals
        for sooner, later in itertools.pairwise(each.pieces)
    ]
    times = (("first_token", first, "s"), ("token", between, "ms"), ("piece_gap", gaps, "ms"))
    for what, values, unit in times:
        yield Row(f"{name}/{what}/median", Timing.of(values), unit, "lower")
        tail = float(np.percentile(values, 99))
        yield Row(f"{name}/{what}/p99", Timing.exact(tail, len(values)), unit, "lower")


def rows(engine: Engine, load: Load, prefix: str, say: Say) -> Iterator[Row]:
    """All rows, in order of worth: a run that is cut short keeps the first.

    Args:
        engine: offloaded or resident; its `max_length` covers `load.length`.
        load: what arrives.
        prefix: of the rows' names.
        say: told what is being done.
    """
    rng = np.random.default_rng(0)
    vocabulary = engine.model.config.vocab_size
    prompts = rng.integers(0, vocabulary, (load.requests, load.prompt)).tolist()
    config = SchedulerConfig(
        rows=load.rows,
        max_length=load.length,
        queue=load.requests,
        prefill_seconds=load.prefill_seconds,
        stop_tokens=1,
    )
    offline = None
    if load.offline:
        offline, details = offline_rate(engine, prompts[: load.rows], load.answer, say)
        yield Row(f"{prefix}/offline", Timing.exact(offline), "tok/s", "higher", details=details)
    scheduler = Scheduler(engine, config)
    scheduler.rows.compile()
    say(f"decode compiled, {engine.programs.compile_seconds:.0f} s in all")
    warm = rng.integers(0, vocabulary, (1, load.prompt)).tolist()
    arrive(scheduler, warm, load.answer, np.inf, 0)
    say(f"prefill compiled too, {engine.programs.compile_seconds:.0f} s in all")
    arrivals, seconds = arrive(scheduler, prompts, load.answer, np.inf, 0)
    stall = scheduler.counters.stalls
    say(f"saturated: {load.requests} requests in {seconds:.1f} s, {stall:.1f} s of stalls")
    yield from latency_rows(f"{prefix}/saturated", arrivals, seconds)
    if offline is not None:
        served = load.requests * load.answer / seconds / offline
        name = f"{prefix}/saturated_over_offline"
        yield Row(name, Timing.exact(served), "x", "higher", target=0.9)
    if load.document:
        name = f"{prefix}/prefix{load.document}"
        yield from prefix_rows(scheduler, vocabulary, load.document, name, say)
    known = scheduler.counters.cached_tokens
    for share in load.rates:
        fresh = rng.integers(0, vocabulary, (load.arrivals, load.prompt)).tolist()
        rate = share * load.requests / seconds
        arrivals, taken = arrive(scheduler, fresh, load.answer, rate, 1)
        say(f"{share:.0%} of that rate: {taken:.1f} s")
        yield from latency_rows(f"{prefix}/load{share:g}", arrivals, taken)
    assert scheduler.counters.cached_tokens == known  # random prompts have nothing in common


def offline_rate(
    engine: Engine, prompts: Sequence[Sequence[int]], answer: int, say: Say
) -> tuple[float, dict[str, float]]:
    """Tokens a second of one batch through `Engine.generate`, and the seconds that its parts took.

    Args:
        engine: whose host memory nobody else has: what one batch pinned, the next one takes again.
        prompts: one for each row.
        answer: tokens of each answer.
        say: told how long each run took.
    """
    params = SamplingParams(max_new_tokens=answer)
    times: dict[str, float] = {}
    for what in ("with compiling and pinning", "offline"):
        report = engine.generate(prompts, params)[1]
        times = {"prefill": report.prefill_seconds, "decode": report.decode_seconds}
        say(f"{what}: {times}")
    return len(prompts) * answer / sum(times.values()), times


def prefix_rows(
    scheduler: Scheduler, vocabulary: int, document: int, name: str, say: Say
) -> Iterator[Row]:
    """Two questions about one document: the second one's time to first token.

    Args:
        scheduler: idle.
        vocabulary: V.
        document: tokens.
        name: of the rows.
        say: told what is being done.
    """
    rng = np.random.default_rng(2)
    firsts: list[float] = []
    seconds: list[float] = []
    known = 0
    for attempt in range(ATTEMPTS + 1):
        text = rng.integers(0, vocabulary, document).tolist()
        for times, question in ((firsts, 20), (seconds, 40)):
            prompt = [*text, *rng.integers(0, vocabulary, question).tolist()]
            handle = scheduler.submit(prompt, SamplingParams(max_new_tokens=4))
            handle.result()
            known = handle.cached_tokens
            if attempt:  # the first ones compile
                times.append(handle.timing.first_token_seconds or 0.0)
    say(f"{document} tokens: {known} of them known; {firsts} s, then {seconds} s")
    first, second = Timing.of(firsts), Timing.of(seconds)
    details = {"known_tokens": float(known)}
    yield Row(f"{name}/first_question", first, "s", "lower")
    yield Row(f"{name}/second_question", second, "s", "lower", details=details)
    share = Timing.of([late / early for early, late in zip(firsts, seconds, strict=True)])
    yield Row(f"{name}/second_over_first", share, "x", "lower", target=0.05)
