"""Tokens per second of block diffusion, mode by mode, each at the batches that are asked for.

All requests of a batch have the same random prompt, prefilled once: what is timed are turns, in
which every request gets one block of W tokens in exactly U denoising forwards and a commit. Modes
that keep the KV on the host share one store where their batches agree, since pinning takes long.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast, get_args

import numpy as np

from host_offload.row_store import RowStore
from sparda_jax.config import ModelConfig, SamplingParams
from sparda_jax.diffusion.config import DenoiseParams
from sparda_jax.evaluation.kernel_benchmarks.harness import Row, Timing
from sparda_jax.herald.config import HeraldConfig, Mode
from sparda_jax.herald.cost import H200, Machine, Workload
from sparda_jax.herald.engine import HeraldEngine
from sparda_jax.herald.report import Event
from sparda_jax.herald.requests import Request
from sparda_jax.herald.session import HeraldSession
from sparda_jax.models.decoder import Decoder

# Of the limit that the cost model prints for a batch (issue: HERALD, speed).
SHARE_OF_LIMIT = 0.85


@dataclasses.dataclass(frozen=True)
class Variant:
    """A mode and what of its settings differs, read from `mode[:option[,option]]`.

    Options: `int8` keys; `all` queries of a block; `run4` (8, 16) rows together; `B6` requests.

    Attributes:
        name: as given, the batch apart.
        mode: of the engine.
        quantised: scan int8 keys.
        every_query: choose by all queries of a block.
        run: rows chosen together.
        batch: requests; None: what the cost model holds for best.
    """

    name: str
    mode: Mode
    quantised: bool = False
    every_query: bool = False
    run: int = 1
    batch: int | None = None

    @classmethod
    def parse(cls, text: str) -> Variant:
        """From the command line.

        Raises:
            ValueError: an unknown mode or option.
        """
        mode, _, rest = text.partition(":")
        if mode not in get_args(Mode):
            raise ValueError(f"unknown mode {mode!r}, expected one of {', '.join(get_args(Mode))}")
        fields: dict[str, Any] = {}
        kept = []
        for option in filter(None, rest.split(",")):
            if option[0] == "B" and option[1:].isdigit():
                fields["batch"] = int(option[1:])
                continue
            kept.append(option)
            if option == "int8":
                fields["quantised"] = True
            elif option == "all":
                fields["every_query"] = True
            elif option.startswith("run") and option[3:].isdigit():
                fields["run"] = int(option[3:])
            else:
                raise ValueError(f"unknown option {option!r} of {text!r}")
        return cls("_".join([mode, *kept]), cast(Mode, mode), **fields)

    def applied(self, config: HeraldConfig) -> HeraldConfig:
        """The settings with these in place."""
        return dataclasses.replace(
            config,
            mode=self.mode,
            quantised_keys=self.quantised,
            queries="all" if self.every_query else None,
            rule=dataclasses.replace(config.rule, run=self.run),
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        context: tokens of a sequence, one block after the last timed turn.
        steps: U, each of them.
        turns: timed, after one that compiles.
        variants: modes of the engine.
        machine: its rates and memory; `device_bytes` is the cap that is stated.
    """

    context: int
    steps: tuple[int, ...] = (20,)
    turns: int = 4
    variants: tuple[Variant, ...] = ()
    machine: Machine = H200

    def workload(self, model: ModelConfig, config: HeraldConfig, steps: int) -> Workload:
        """For the cost model."""
        return Workload(model, config, self.context, steps, self.machine)


def estimates(
    model: ModelConfig, config: HeraldConfig, plan: Plan, report: Callable[[str], None]
) -> None:
    """Tells what the cost model expects, each mode at its best batch."""
    for variant in plan.variants:
        best = plan.workload(model, variant.applied(config), plan.steps[0]).best(variant.mode)
        report(best.line() if best else f"{variant.name}: not one request fits")


def rows(
    model: Decoder,
    config: HeraldConfig,
    plan: Plan,
    *,
    prefix: str,
    report: Callable[[str], None],
    timeline: Callable[[str, Sequence[Event]], None] = lambda name, events: None,
) -> Iterator[Row]:
    """Runs every variant; one that does not fit is told and left out.

    Args:
        model: random weights do.
        config: budget, rule, workers; mode, batch and limits are set here.
        plan: what is run.
        prefix: of the rows' names.
        report: told each cost estimate, and what did not fit.
        timeline: told the events of the last turn of every row.
    """
    engine: HeraldEngine | None = None
    kept: dict[str, RowStore] = {}
    for variant in plan.variants:
        own = variant.applied(config)
        workload = plan.workload(model.config, own, plan.steps[0])
        best = workload.best(variant.mode)
        batch = variant.batch or (best.batch if best else 1)
        limited = dataclasses.replace(
            own,
            max_length=plan.context,
            device_kv_bytes=int(plan.machine.device_bytes - workload.weight_bytes()),
            host_kv_bytes=int(plan.machine.host_bytes),
        )
        engine = engine.with_config(limited) if engine else HeraldEngine(model, config=limited)
        for steps in plan.steps:
            name = f"{prefix}/{variant.name}/B{batch}/U{steps}"
            report(plan.workload(model.config, own, steps).estimate(variant.mode, batch).line())
            try:
                row, events = _row(engine, plan, steps, batch, name, kept)
            except ValueError as error:
                report(f"{name}: {error}")
                break
            timeline(name, events)
            yield row


def _session(
    engine: HeraldEngine, plan: Plan, steps: int, batch: int, kept: dict[str, RowStore]
) -> HeraldSession:
    """A batch that is prefilled; its store is kept, and filled if it is new."""
    new = (plan.turns + 2) * engine.width  # so that a block follows the last timed one
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, engine.model.config.vocab_size // 2, plan.context - new).tolist()
    sampling = SamplingParams(max_new_tokens=new)
    rule = DenoiseParams("low_confidence_static", steps=steps)
    requests = [Request(n, prompt, sampling, rule, engine.model.config) for n in range(batch)]
    sizes = engine.plan([prompt], [sampling])
    store = kept.get("store")
    wants = any(v.quantised for v in plan.variants)
    if engine.config.policy.offload:
        shape = engine.layout(batch, sizes).store(wants)
        if store is None or not store.shape.holds(shape):
            kept.clear()
            store = None  # before another one is made
            store = RowStore(shape, engine.device, budget=engine.config.host_kv_bytes)
    session = HeraldSession(engine, batch, sizes, store)
    found = session.prefilled(requests[0])
    if "store" in kept:
        found = dataclasses.replace(found, rows=())  # the same prompt's are there
    for request in requests:
        session.place(request, found)
    if store is not None:
        kept["store"] = store
    return session


def _row(
    engine: HeraldEngine,
    plan: Plan,
    steps: int,
    batch: int,
    name: str,
    kept: dict[str, RowStore],
) -> tuple[Row, list[Event]]:
    width, mode = engine.width, engine.config.mode
    times: list[float] = []
    lasted: dict[str, list[float]] = {"GPU": [], "ahead": [], "commit": []}
    with _session(engine, plan, steps, batch, kept) as session:
        session.turn()
        first = dataclasses.replace(session.report, host_seconds={**session.report.host_seconds})
        for _ in range(plan.turns):
            begun = time.perf_counter()
            session.turn()
            times.append(time.perf_counter() - begun)
            for what, begin, end in session.events:
                if what in lasted:
                    lasted[what].append(end - begin)
        told, events = session.report, session.events
    estimate = plan.workload(engine.model.config, engine.config, steps).estimate(mode, batch)
    spent = lambda part: told.host_seconds.get(part, 0.0) - first.host_seconds.get(part, 0.0)
    stall = told.retrieval_stall_seconds - first.retrieval_stall_seconds
    details = {
        "batch": float(batch),
        "turn_ms": 1e3 * statistics.median(times),
        "gpu_ms": 1e3 * statistics.median(lasted["GPU"]),
        **{
            f"{what}_ms": 1e3 * statistics.median(lasted[what] or [0.0])
            for what in ("ahead", "commit")
        },
        "stall_ms": 1e3 * stall / plan.turns,
        "stall_share": stall / sum(times),
        "limit_tok_s": estimate.tokens_per_second,
        "limit_gpu_ms": 1e3 * estimate.device,
        "limit_cpu_ms": 1e3 * estimate.scan,
        "limit_pcie_ms": 1e3 * estimate.copy,
        **{
            f"{part}_thread_s": spent(part) / plan.turns
            for part in ("query", "scan", "gather", "copy")
        },
        "scanned_bytes": float(told.scanned_bytes - first.scanned_bytes) / plan.turns,
        "h2d_bytes": float(told.h2d_bytes - first.h2d_bytes) / plan.turns,
        "effective_share": told.effective_share,
        "device_kv_bytes": float(told.device_kv_bytes),
        "host_kv_bytes": float(told.host_kv_bytes),
        "pinning_s": told.pinning_seconds,
        "compile_s": told.compile_seconds,
    }
    target = SHARE_OF_LIMIT * estimate.tokens_per_second if mode == "herald" else None
    timing = Timing.of([batch * width / seconds for seconds in times])
    return Row(name, timing, "tok/s", "higher", target=target, details=details), events


# Lanes of a picture, by what ran.
_LANES = {
    "GPU": ("GPU", "denoising"),
    "scan": ("CPU workers", "scan and choice"),
    "gather": ("CPU workers, gather", "gather"),
    "copy": ("copy engine", "copy to device"),
    "ahead": ("calling thread", "launch of the lookahead"),
    "swap": ("calling thread", "swap, waits included"),
    "commit": ("calling thread", "commit"),
}


def timeline_rows(
    name: str, events: Sequence[Event]
) -> tuple[list[Row], list[tuple[str, str, float, float]]]:
    """One turn for a results file: time by lane, and events that `scripts/report.py` draws.

    Args:
        name: of the row that was timed.
        events: of its last turn.

    Returns:
        Rows, and (lane, what, start, duration) in microseconds.
    """
    first = min(begun for _, begun, _ in events)
    order = list(_LANES)
    shown = [
        (*_LANES[what], round(1e6 * (begun - first), 1), round(1e6 * (ended - begun), 1))
        for what, begun, ended in sorted(events, key=lambda e: (order.index(e[0]), e[1]))
    ]
    rows = []
    for lane in dict.fromkeys(lane for lane, *_ in shown):
        times = [duration for one, _, _, duration in shown if one == lane]
        timing = Timing(sum(times), (min(times), max(times)), len(times))
        rows.append(Row(f"timeline/{name}/{lane}", timing, "us", "lower"))
    return rows, shown
