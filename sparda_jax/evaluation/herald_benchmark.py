"""Tokens per second of block diffusion, mode by mode, each at the batches that are asked for.

All requests of a batch have the same random prompt, prefilled once: what is timed are turns, in
which every request gets one block of W tokens in exactly U denoising forwards and a commit.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from sparda_jax.config import ModelConfig, SamplingParams
from sparda_jax.diffusion.config import DenoiseParams
from sparda_jax.evaluation.kernel_benchmarks.harness import Row, Timing
from sparda_jax.herald.config import HeraldConfig, Mode
from sparda_jax.herald.cost import H200, Machine, Workload
from sparda_jax.herald.engine import HeraldEngine
from sparda_jax.herald.requests import Request
from sparda_jax.herald.session import HeraldSession
from sparda_jax.models.decoder import Decoder

# Of the limit that the cost model prints for a batch (issue: HERALD, speed).
SHARE_OF_LIMIT = 0.85


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        context: tokens of a sequence at the end of the last timed turn.
        steps: U.
        turns: timed, after one that compiles.
        modes: of the engine.
        batches: requests at a time; empty: what the cost model holds for best, per mode.
        machine: its rates and memory; `device_bytes` is the cap that is stated.
    """

    context: int
    steps: int = 20
    turns: int = 4
    modes: tuple[Mode, ...] = ("dense", "mage", "mage_offload", "herald_serial", "herald")
    batches: tuple[int, ...] = ()
    machine: Machine = H200


def estimates(
    model: ModelConfig, config: HeraldConfig, plan: Plan, report: Callable[[str], None]
) -> None:
    """Tells what the cost model expects, each mode at its best batch."""
    workload = Workload(model, config, plan.context, plan.steps, plan.machine)
    for mode in plan.modes:
        best = workload.best(mode)
        report(best.line() if best else f"{mode}: not one request fits")


def rows(
    model: Decoder,
    config: HeraldConfig,
    plan: Plan,
    *,
    prefix: str,
    report: Callable[[str], None],
) -> Iterator[Row]:
    """Runs every mode; a batch that does not fit ends its mode.

    Args:
        model: random weights do.
        config: budget, rule, key type; mode, batch and limits are set here.
        plan: what is run.
        prefix: of the rows' names.
        report: told each cost estimate, and what did not fit.
    """
    base: HeraldEngine | None = None
    for mode in plan.modes:
        workload = Workload(model.config, config, plan.context, plan.steps, plan.machine)
        best = workload.best(mode)
        batches = plan.batches or ((best.batch,) if best else ())
        weights = workload.weight_bytes()
        limited = dataclasses.replace(
            config,
            mode=mode,
            quantised_keys=config.quantised_keys and mode in ("herald", "herald_serial"),
            max_length=plan.context,
            device_kv_bytes=int(plan.machine.device_bytes - weights),
            host_kv_bytes=int(plan.machine.host_bytes),
        )
        base = base.with_config(limited) if base else HeraldEngine(model, config=limited)
        for batch in batches:
            report(workload.estimate(mode, batch).line())
            try:
                yield _row(base, plan, workload, batch, f"{prefix}/{mode}/B{batch}")
            except ValueError as error:
                report(f"{mode}, batch {batch}: {error}")
                break


def _row(engine: HeraldEngine, plan: Plan, workload: Workload, batch: int, name: str) -> Row:
    width, mode = engine.width, engine.config.mode
    new = (plan.turns + 1) * width
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, engine.model.config.vocab_size // 2, plan.context - new).tolist()
    sampling = SamplingParams(max_new_tokens=new)
    rule = DenoiseParams("low_confidence_static", steps=plan.steps)
    requests = [
        Request(number, prompt, sampling, rule, engine.model.config) for number in range(batch)
    ]
    sizes = engine.plan([prompt], [sampling])
    times = []
    with HeraldSession(engine, batch, sizes) as session:
        found = session.prefilled(requests[0])
        for request in requests:
            session.place(request, found)
        del found  # a whole prompt's KV
        session.turn()
        first = dataclasses.replace(session.report)
        for _ in range(plan.turns):
            begun = time.perf_counter()
            session.turn()
            times.append(time.perf_counter() - begun)
        told = session.report
    speeds = [batch * width / seconds for seconds in times]
    estimate = workload.estimate(mode, batch)
    stall = told.retrieval_stall_seconds - first.retrieval_stall_seconds
    details = {
        "batch": float(batch),
        "limit_tok_s": estimate.tokens_per_second,
        "stall_share": stall / sum(times),
        "scan_s": told.host_seconds.get("scan", 0.0) - first.host_seconds.get("scan", 0.0),
        "gather_s": told.host_seconds.get("gather", 0.0) - first.host_seconds.get("gather", 0.0),
        "scanned_bytes": float(told.scanned_bytes - first.scanned_bytes),
        "h2d_bytes": float(told.h2d_bytes - first.h2d_bytes),
        "effective_share": told.effective_share,
        "device_kv_bytes": float(told.device_kv_bytes),
        "host_kv_bytes": float(told.host_kv_bytes),
        "pinning_s": told.pinning_seconds,
    }
    target = SHARE_OF_LIMIT * estimate.tokens_per_second if mode == "herald" else None
    timing = Timing.of(speeds)
    return Row(name, timing, "tok/s", "higher", target=target, details=details)


def chart(events: Sequence[tuple[str, float, float]], columns: int = 100) -> list[str]:
    """One turn's events side by side, a line each, as text.

    Args:
        events: of `HeraldSession`.
        columns: of the chart.
    """
    begin = min(begun for _, begun, _ in events)
    whole = max(ended for _, _, ended in events) - begin
    lines = []
    for what, begun, ended in sorted(events, key=lambda event: event[1]):
        at = round((begun - begin) / whole * columns)
        size = max(round((ended - begun) / whole * columns), 1)
        span = f"{1e3 * (begun - begin):8.1f} to {1e3 * (ended - begin):8.1f} ms"
        lines.append(f"{what:<8} |{' ' * at}{'#' * size:<{columns - at + 1}}| {span}")
    return lines
