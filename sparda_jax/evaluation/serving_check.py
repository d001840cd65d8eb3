"""Random requests that come, go and are cancelled; and what must hold after them."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Iterator, Sequence

import numpy as np

from pallas_kernels.geometry import BlockGeometry
from sparda_jax.config import (
    EngineConfig,
    Mode,
    ModelConfig,
    Offload,
    RopeConfig,
    SamplingParams,
    SparseConfig,
)
from sparda_jax.engine.generate import Engine
from sparda_jax.engine.requests import Handle, Result
from sparda_jax.engine.scheduler import Scheduler
from sparda_jax.evaluation.kernel_benchmarks.harness import Row, Timing
from sparda_jax.forecast.projection import Forecast
from sparda_jax.models.decoder import Decoder

Asked = tuple[tuple[int, ...], SamplingParams]
# Share of requests that is cancelled, unless they end before; about a third then is.
DOOMED = 0.45


def draw_requests(count: int, vocabulary: int, length: int, seed: int) -> list[Asked]:
    """Random prompts that begin alike for some way, with random settings.

    Args:
        count: how many.
        vocabulary: V.
        length: tokens of prompt and answer together, at most.
        seed: of everything.
    """
    rng = np.random.default_rng(seed)
    stem = rng.integers(0, vocabulary, length)
    requests: list[Asked] = []
    for _ in range(count):
        new = int(rng.integers(1, 20))
        size = int(rng.integers(1, length - new + 1))
        prompt = stem[:size].copy()
        tail = int(rng.integers(0, min(size, 12)))
        prompt[size - tail :] = rng.integers(0, vocabulary, tail)
        params = SamplingParams(
            max_new_tokens=new,
            temperature=float(rng.choice([0.0, 0.7, 1.3])),
            top_k=int(rng.choice([0, 5])),
            top_p=float(rng.choice([1.0, 0.8])),
            min_p=float(rng.choice([0.0, 0.1])),
            seed=int(rng.integers(1000)),
            stop_token_ids=tuple(rng.integers(0, vocabulary, rng.integers(0, 4)).tolist()),
            logprobs=[None, 0, 2][rng.integers(3)],
        )
        requests.append((tuple(prompt.tolist()), params))
    return requests


def run_together(scheduler: Scheduler, requests: Sequence[Asked], seed: int) -> list[Handle]:
    """Submits requests at random times and cancels some at random points; runs all to their end.

    Args:
        scheduler: without a thread of its own.
        requests: in the order of their arrival.
        seed: of the times.
    """
    rng = np.random.default_rng(seed)
    waiting, handles = list(reversed(requests)), list[Handle]()
    end = {}  # step at which a request is cancelled
    steps = 0
    while waiting or scheduler.running or scheduler.waiting:
        for _ in range(rng.integers(0, 4)):
            if waiting:
                handle = scheduler.submit(*waiting.pop())
                handles.append(handle)
                if rng.random() < DOOMED:
                    # Most are cancelled in the queue, in prefill or soon after it.
                    end[handle] = steps + int(rng.integers(0, 6 + 2 * scheduler.waiting))
        for handle in [each for each, at in end.items() if at <= steps]:
            handle.cancel()
            del end[handle]
        scheduler.step()
        steps += 1
    return handles


def differences(got: Result, alone: Result) -> Iterator[str]:
    """What a result has otherwise than the same request alone; a cancelled one has less."""
    whole = got.finish_reason != "cancelled"
    count = len(alone.tokens) if whole else len(got.tokens)
    if got.tokens != alone.tokens[:count]:
        yield f"tokens {got.tokens}, alone {alone.tokens}"
    if whole and got.finish_reason != alone.finish_reason:
        yield f"ended by {got.finish_reason}, alone {alone.finish_reason}"
    if (got.likelihoods is None) != (alone.likelihoods is None):
        yield "log-probabilities only in one"
    for mine, other in zip(got.likelihoods or [], alone.likelihoods or [], strict=False):
        here, there = ([each.drawn, *(value for _, value in each.top)] for each in (mine, other))
        if not np.allclose(here, there, atol=1e-4):
            yield f"log-probabilities {mine}, alone {other}"


def leaks(scheduler: Scheduler, requests: int) -> Iterator[str]:
    """What an idle scheduler still holds, and counters that do not add up.

    Args:
        scheduler: that has run all its requests.
        requests: how many it accepted.
    """
    counters, rows = scheduler.counters, scheduler.rows
    for name, value in {
        "running": scheduler.running,
        "waiting": scheduler.waiting,
        "blocks_used": scheduler.blocks_used,
        "active rows": int(rows.active.sum()),
        "rows not free": rows.batch - scheduler.free_rows,
        "requests not accepted": requests - counters.requests,
        "requests not finished": counters.requests - counters.finished.total(),
    }.items():
        if value:
            yield f"{name}: {value}"


@dataclasses.dataclass
class Outcome:
    """Of one round.

    Attributes:
        results: of all requests.
        wrong: everything that should not be, in words.
    """

    results: list[Result]
    wrong: list[str]


def check_round(scheduler: Scheduler, alone: Scheduler, requests: Sequence[Asked]) -> Outcome:
    """Runs requests together and each alone, and compares.

    Args:
        scheduler: runs them together.
        alone: runs each by itself, all its other rows idle; reuses no prefix.
        requests: what to run.
    """
    before = scheduler.counters.requests
    handles = run_together(scheduler, requests, seed=len(requests) + before)
    results = [handle.result() for handle in handles]
    wrong = list(leaks(scheduler, before + len(requests)))
    for number, (asked, result) in enumerate(zip(requests, results, strict=True)):
        expected = alone.submit(*asked).result()
        wrong += [f"request {number}: {text}" for text in differences(result, expected)]
    return Outcome(results, wrong)


# Rounds in which programs are still compiled: some pairs of lengths are rare.
WARM_ROUNDS = 4
# Allocators keep some of what they were given; more than this in half an hour would be a leak.
SLACK_MIB = 64


def resident_mib() -> float:
    """Memory of this process that is in RAM, MiB."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclasses.dataclass
class Soak:
    """Many rounds, and what memory and programs did meanwhile.

    Attributes:
        name: of the rows.
        scheduler: that runs them together.
        requests: so far.
        wrong: everything that should not be.
        seconds: that it took.
        memory: resident after each round, MiB.
        programs: compiled so far, after each round.
        reasons: how many requests ended by each.
    """

    name: str
    scheduler: Scheduler
    requests: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    memory: list[float] = dataclasses.field(default_factory=list)
    programs: list[int] = dataclasses.field(default_factory=list)
    reasons: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def add(self, outcome: Outcome, seconds: float) -> None:
        """Counts a round that ended so many seconds after the beginning."""
        self.requests += len(outcome.results)
        self.wrong += outcome.wrong
        self.seconds = seconds
        self.reasons.update(result.finish_reason for result in outcome.results)
        self.memory.append(resident_mib())
        self.programs.append(self.scheduler.rows.compilations[0])

    def line(self) -> str:
        """Where it stands."""
        counts = f"{self.requests} requests in {self.seconds:.0f} s, {self.memory[-1]:.0f} MiB"
        return f"{counts}, {self.programs[-1]} programs, {len(self.wrong)} wrong"

    def rows(self) -> Iterator[Row]:
        """For a results file; growth counts from when the first rounds have compiled."""
        memory = self.memory[WARM_ROUNDS:] or self.memory
        programs = self.programs[WARM_ROUNDS:] or self.programs
        counters = self.scheduler.counters
        details = {
            "seconds": self.seconds,
            "cancelled_share": self.reasons["cancelled"] / self.requests,
            "tokens": float(counters.tokens),
            "cached_tokens": float(counters.cached_tokens),
        }
        count = Timing.exact(self.requests)
        yield Row(f"{self.name}/requests", count, "requests", "higher", details=details)
        wrong = Timing.exact(len(self.wrong), self.requests)
        yield Row(f"{self.name}/wrong", wrong, "findings", "lower", target=0)
        yield Row(f"{self.name}/resident_memory", Timing.of(memory), "MiB", "lower")
        grown = Timing.exact(memory[-1] - memory[0], len(memory))
        yield Row(f"{self.name}/memory_growth", grown, "MiB", "lower", target=SLACK_MIB)
        new = Timing.exact(programs[-1] - programs[0], len(programs))
        details = {"programs": float(programs[-1])}
        yield Row(
            f"{self.name}/program_growth", new, "programs", "lower", target=0, details=details
        )


def tiny_engine(mode: Mode, offload: Offload, length: int) -> Engine:
    """A random model of two layers whose sequences span many small blocks.

    Args:
        mode: see `EngineConfig`; not "infinigen", which needs calibration.
        offload: likewise.
        length: tokens of a sequence.
    """
    config = ModelConfig(
        family="llama",
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope=RopeConfig(16),
        max_position_embeddings=length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    return Engine(
        Decoder.random(config, seed=3),
        sparse=SparseConfig(
            geometry=BlockGeometry(8, 4, 2), init_blocks=1, local_blocks=2, budget_blocks=6
        ),
        config=EngineConfig(
            mode=mode, offload=offload, prefill_chunk=64, steps_per_call=4, top_logprobs=2
        ),
        forecast=Forecast.random(config, seed=4) if mode == "sparda" else None,
    )
