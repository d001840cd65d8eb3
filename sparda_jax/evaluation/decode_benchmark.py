"""Time of decode steps through the engine, against the time to read the weights once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from sparda_jax.config import EngineConfig, SamplingParams
from sparda_jax.engine.generate import Engine
from sparda_jax.engine.report import Report
from sparda_jax.evaluation.kernel_benchmarks.harness import Row, Timing
from sparda_jax.forecast.projection import Forecast
from sparda_jax.models.decoder import Decoder

# (name, settings) of the engines compared.
MODES: dict[str, dict[str, str]] = {
    "dense": {"mode": "dense"},
    "sparse": {"mode": "sparse"},
    "sparse_host_program": {"mode": "sparse", "offload": "host"},
    "sparse_host_eager": {"mode": "sparse", "offload": "host", "fetch": "eager"},
    "sparda_host_program": {"mode": "sparda", "offload": "host"},
}


def read_weights(model: Decoder, repetitions: int) -> list[float]:
    """Milliseconds that numpy needs to sum every parameter once, each repetition."""
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(model)]
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        for array in arrays:
            array.sum()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def step_times(
    engine: Engine, prompt: list[int], steps: int, repetitions: int
) -> tuple[list[float], Report]:
    """Milliseconds a decode step takes, averaged over ``steps``, each repetition; compiled before.

    The timed steps follow the prompt, so the context grows from ``len(prompt)`` by ``steps``.

    Returns:
      The times, and the report of the last run.
    """
    times = []
    for _ in range(repetitions + 1):
        _, report = engine.generate([prompt], SamplingParams(max_new_tokens=steps + 1))
        times.append(1e3 * report.decode_seconds / report.steps)
    return times[1:], report


def rows(
    model: Decoder,
    forecast: Forecast,
    tokens: list[int],
    *,
    context: int,
    modes: Sequence[str] | None = None,
    steps: int = 64,
    repetitions: int = 3,
) -> Iterator[Row]:
    """Rows of the benchmark.

    Args:
      model: parameters.
      forecast: its projections.
      tokens: text to take prompts from, at least ``context`` tokens.
      context: tokens of the long prompt.
      modes: names in `MODES`; None: all.
      steps: timed steps per repetition.
      repetitions: of everything.
    """
    short = EngineConfig(mode="dense", max_length=256)
    prompt = tokens[: 256 - steps - 1]
    # Alternately, so that both meet the same state of the machine.
    engine = Engine(model, config=short)
    reads, decodes = [], []
    for _ in range(repetitions):
        reads += read_weights(model, 1)
        decodes += step_times(engine, prompt, steps, 1)[0]
    read = Timing.of(reads)
    yield Row("decode/weights_read_by_numpy", read, "ms", "lower")
    yield Row("decode/dense/256", Timing.of(decodes), "ms", "lower", target=2 * read.median)
    for name in modes or MODES:
        config = EngineConfig(**MODES[name])  # type: ignore[arg-type]
        weights = forecast if config.mode == "sparda" else None
        engine = Engine(model, config=config, forecast=weights)
        times, report = step_times(engine, tokens[:context], steps, repetitions)
        details = None
        if config.offload != "none":
            assert report.hit_rate is not None  # steps were run
            blocks = engine.sparse.geometry.num_blocks(context + steps + 1)
            details = {
                "hit_rate": report.hit_rate,
                "share_of_context": engine.sparse.budget_blocks / int(blocks),
            }
        row = f"decode/{name}/{context}"
        yield Row(row, Timing.of(times), "ms", "lower", details=details)
