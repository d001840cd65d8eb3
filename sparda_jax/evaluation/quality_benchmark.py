"""The whole quality evaluation: which policies run in which settings, from files to rows."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from sparda_jax.config import SparseConfig
from sparda_jax.evaluation import policies as make
from sparda_jax.evaluation import quality
from sparda_jax.evaluation.kernel_benchmarks.harness import Row
from sparda_jax.evaluation.policies import Policy
from sparda_jax.evaluation.quality import Report, Setting
from sparda_jax.forecast.data import read_documents
from sparda_jax.forecast.files import load_forecast
from sparda_jax.forecast.projection import Forecast
from sparda_jax.models.decoder import Decoder
from sparda_jax.sparse.infinigen import calibrate
from sparda_jax.tokenization import Tokenizer

# Blocks before the query's own that are forced where budgets are percentages: at 6.25 % the
# model's own eight would leave no free block.
LOCAL_BLOCKS = 3
# For needles fewer still: 6.25 % of 64 blocks are four.
NEEDLE_LOCAL_BLOCKS = 1
# Text under the model's own policy and under percentages, by both kinds of meters; the noise of
# bfloat16 (every block selected, by another attention than the dense one); needles.
SECTIONS = (
    "selection",
    "selection_percent",
    "language",
    "language_percent",
    "language_fine",
    "language_noise",
    "needles",
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        length: tokens of long documents, evaluated on the model's own grid.
        fine_length: tokens of short ones, on smaller blocks, since of the model's own nearly all
            would be forced or selected.
        percents: budgets, of the context.
        blocks: of a context whose budgets are percentages: of 64 tokens each at 8K, of 16 at 2K.
        needle_lengths: tokens of needle prompts.
        needle_blocks: of a needle prompt, if blocks of 64 tokens would be fewer.
        samples: needles of each task, length and seed.
        seeds: of the needles.
        calibration_rows: InfiniGen is calibrated on so many windows.
        calibration_length: of so many tokens.
        row_tokens: tokens of one forward pass over needles.
        dense_finds: needles are compared where dense attention finds at least this share.
        every: selections are counted at two neighbouring tokens in every so many; 1: all.
        sections: of `SECTIONS`.
        seconds: a section takes no further document or task after so long; None: it takes all.
        workers: sections, and lengths of needles, that run side by side: one compiles while others
            compute.

    Raises:
        ValueError: an unknown section.
    """

    length: int = 8192
    fine_length: int = 2048
    percents: tuple[float, ...] = (50, 25, 12.5, 6.25)
    blocks: int = 128
    needle_lengths: tuple[int, ...] = (1024, 2048, 4096)
    needle_blocks: int = 64
    samples: int = 16
    seeds: tuple[int, ...] = (0, 1, 2)
    calibration_rows: int = 4
    calibration_length: int = 2048
    row_tokens: int = 1 << 17
    dense_finds: float = 0.8
    every: int = 1
    sections: tuple[str, ...] = SECTIONS
    seconds: float | None = None
    workers: int = 1

    def __post_init__(self) -> None:
        for name in self.sections:
            if name not in SECTIONS:
                raise ValueError(f"unknown section {name!r}, expected one of {', '.join(SECTIONS)}")

    def setting(self, length: int, percents: tuple[float, ...]) -> Setting:
        """Budgets in percent of a text of `length` tokens."""
        return Setting.of_percents(length, length // self.blocks, LOCAL_BLOCKS, percents)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What it is run on.

    Attributes:
        model: the decoder.
        tokenizer: its tokenizer.
        sparse: the model's own policy.
        documents: held-out ones, token ids.
        haystacks: texts that needles are hidden in.
        calibration: text for InfiniGen, token ids, not held out.
        forecasts: projections evaluated everywhere, by name; the first should be "sparda".
        variants: projections and lookahead, evaluated on the model's own policy alone, by name.
    """

    model: Decoder
    tokenizer: Tokenizer
    sparse: SparseConfig
    documents: Sequence[np.ndarray]
    haystacks: Sequence[str]
    calibration: np.ndarray
    forecasts: dict[str, Forecast]
    variants: dict[str, tuple[Forecast, int]]


def read_inputs(
    model: Decoder,
    tokenizer: Tokenizer,
    *,
    text: Sequence[Path],
    haystacks: Sequence[Path],
    calibration: Sequence[Path],
    forecasts: Sequence[str],
    variants: Sequence[str],
    documents: int,
    plan: Plan,
) -> Inputs:
    """Reads what the command line names.

    Args:
        model: the decoder.
        tokenizer: its tokenizer.
        text: held-out documents; see `read_documents`.
        haystacks: documents for needles, likewise.
        calibration: text for InfiniGen, likewise.
        forecasts: "NAME=PATH" each.
        variants: "NAME=PATH" or "NAME=PATH@LOOKAHEAD" each; the path "random" is an untrained one.
        documents: held-out documents to use at most; those that are too short are left out.
        plan: see there.

    Raises:
        ValueError: no document is long enough, or too little calibration text.
    """
    encode = lambda text: tokenizer.encode(text, add_special=False)
    read = lambda paths: read_documents(paths, encode)
    found = [d for d in read(text) if len(d) >= plan.length][:documents]
    if not found:
        raise ValueError(f"no held-out document has {plan.length} tokens")
    rows, length = plan.calibration_rows, plan.calibration_length
    tokens = np.concatenate([np.zeros(0, np.int32), *read(calibration)])
    if len(tokens) < rows * length:
        raise ValueError(f"{len(tokens)} tokens of calibration text, {rows * length} are needed")
    loaded, sparse = {}, SparseConfig()
    for name, path in _pairs(forecasts):
        loaded[name], policy = load_forecast(path, model)
        sparse = policy or sparse
    others = {}
    for name, path in _pairs(variants):
        path, _, ahead = path.partition("@")
        if path == "random":
            forecast = Forecast.random(model.config, dtype=model.dtype)
        else:
            forecast, _ = load_forecast(path, model, lookahead=int(ahead or 1))
        others[name] = forecast, int(ahead or 1)
    texts = [tokenizer.decode(document) for document in read(haystacks)]
    windows = tokens[: rows * length].reshape(rows, length)
    return Inputs(model, tokenizer, sparse, found, texts, windows, loaded, others)


def _pairs(items: Sequence[str]) -> Iterator[tuple[str, str]]:
    for item in items:
        name, found, path = item.partition("=")
        if not found:
            raise ValueError(f"expected NAME=PATH, got {item!r}")
        yield name, path


def rows(inputs: Inputs, plan: Plan, report: Report) -> Iterator[Row]:
    """All rows, as they are done.

    Args:
        inputs: see there.
        plan: see there.
        report: progress, a line at a time.

    Raises:
        ValueError: two policies of one name.
    """
    model, count = inputs.model, inputs.model.config.num_layers
    report(f"{len(inputs.documents)} documents, {len(inputs.haystacks)} haystacks")
    skews = calibrate(model, jnp.asarray(inputs.calibration))
    report(f"InfiniGen calibrated on {inputs.calibration.size} tokens, {skews.channels} channels")
    sparse = make.sparse_policy(count)
    sparda = [make.sparda_policy(f, name) for name, f in inputs.forecasts.items()]
    others = [make.infinigen_policy(skews), make.local_policy(count), make.random_policy(count)]
    variants = [make.sparda_policy(f, name, n) for name, (f, n) in inputs.variants.items()]
    everywhere = [sparse, *sparda, *others]
    names = [policy.name for policy in (*everywhere, *variants)]
    if len(set(names)) < len(names):
        raise ValueError(f"two policies of one name: {', '.join(names)}")
    name, forecast = next(iter(inputs.forecasts.items()))
    bounds = make.bound_policies(forecast, name)
    asked = _Policies(everywhere, variants, make.oracle_policy(count), bounds)
    yield from _side_by_side(
        [
            part
            for section in plan.sections
            for part in _section(section, inputs, plan, asked, report)
        ],
        plan.workers,
    )


def _side_by_side(streams: Sequence[Iterator[Row]], workers: int) -> Iterator[Row]:
    """Rows of all streams as they come, a stream on a thread.

    Raises:
        Exception: what a stream raised, once the others under way have ended.
    """
    found: queue.SimpleQueue[Row | BaseException | None] = queue.SimpleQueue()

    def drain(stream: Iterator[Row]) -> None:
        try:
            for row in stream:
                found.put(row)
            found.put(None)
        except BaseException as error:
            found.put(error)

    with ThreadPoolExecutor(workers) as pool:
        for stream in streams:
            pool.submit(drain, stream)
        for _ in streams:
            while (row := found.get()) is not None:
                if isinstance(row, BaseException):
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise row
                yield row


def _edges(length: int) -> tuple[int, ...]:
    """Quarters of the context by doubling: an eighth, a quarter, a half, all."""
    return (0, length // 8, length // 4, length // 2, length)


@dataclasses.dataclass(frozen=True)
class _Policies:
    everywhere: list[Policy]  # the first is sparse
    variants: list[Policy]
    oracle: Policy
    bounds: list[Policy]


def _section(
    section: str, inputs: Inputs, plan: Plan, asked: _Policies, report: Report
) -> Iterator[Iterator[Row]]:
    """Rows of one of `SECTIONS`, in parts that can run side by side."""
    model, own = inputs.model, Setting.of_policy(plan.length, inputs.sparse)
    rest: dict[str, Any] = {"report": report, "seconds": plan.seconds}
    if section == "needles":
        for length in plan.needle_lengths:
            size = min(64, length // plan.needle_blocks)
            yield quality.needle_rows(
                model,
                asked.everywhere,
                inputs.tokenizer,
                inputs.haystacks,
                Setting.of_percents(length, size, NEEDLE_LOCAL_BLOCKS, plan.percents),
                samples=plan.samples,
                seeds=plan.seeds,
                row_tokens=plan.row_tokens,
                dense_finds=plan.dense_finds,
                **rest,
            )
        return
    if section in ("selection", "language"):
        setting, policies = own, [*asked.everywhere, *asked.variants, asked.oracle]
        policies += asked.bounds if section == "selection" else []
    elif section == "language_noise":
        setting, policies = plan.setting(plan.length, (100,)), asked.everywhere[:1]
    else:
        length = plan.fine_length if section == "language_fine" else plan.length
        setting, policies = plan.setting(length, plan.percents), asked.everywhere
    edges = _edges(setting.length)
    if section.startswith("selection"):
        by_layer = setting is own
        yield quality.selection_rows(
            model, policies, asked.everywhere[0], inputs.documents, setting,
            edges=edges, by_layer=by_layer, every=plan.every, **rest,
        )  # fmt: skip
    else:
        yield quality.language_rows(model, policies, inputs.documents, setting, edges=edges, **rest)
