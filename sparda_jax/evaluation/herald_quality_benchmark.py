"""Quality of HERALD's modes as rows: text, a broad-context task, generation, needles.

The broad-context task: a list of words drawn from a few dozen by Zipf's law, in another order of
frequency in every window. What comes next can only be told from how often each word came before,
all over the window, so a few rows can hardly do. For both kinds of windows `gain_kept` says what
share of the context's worth a mode keeps:

    gain_kept = (bound_near - bound_mode) / (bound_near - bound_dense)
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from sparda_jax.config import SamplingParams
from sparda_jax.diffusion.config import DenoiseParams
from sparda_jax.evaluation import herald_quality, herald_selection, needles
from sparda_jax.evaluation.agreement import equal_share
from sparda_jax.evaluation.herald_quality import Scores
from sparda_jax.evaluation.herald_windows import QualityPlan, Windows
from sparda_jax.evaluation.kernel_benchmarks.harness import Row, Timing
from sparda_jax.evaluation.statistics import mean, ratio
from sparda_jax.evaluation.tables import make_row
from sparda_jax.herald.config import Budget, HeraldConfig, Mode
from sparda_jax.herald.engine import HeraldEngine
from sparda_jax.models.decoder import Decoder
from sparda_jax.tokenization import Tokenizer

SECTIONS = ("text", "words", "selection", "generation", "needles")
_WORDS = re.findall(
    r"\w+",
    "river stone cloud bread glass horse paper light water green music table apple night "
    "sugar house metal plant chair queen tiger ocean coffee window garden silver",
)


@dataclasses.dataclass(frozen=True)
class BenchmarkPlan:
    """What is run.

    Attributes:
        quality: of the teacher-forced sections.
        sections: of `SECTIONS`.
        length: tokens of a window, a multiple of the prefill chunk.
        windows: of each teacher-forced section.
        batch: windows at a time.
        generate_shares: budgets of generation and needles.
        generate_modes: besides dense.
        prompts: of generation, of `length` tokens each.
        new_tokens: generated after each.
        threshold: of the generation's confidence: at 0.9 this model decides one token at a time.
        needle_lengths: tokens.
        needles: samples of each length and task.
        seconds: begin no further batch of a section after.
    """

    quality: QualityPlan = dataclasses.field(default_factory=QualityPlan)
    sections: tuple[str, ...] = SECTIONS
    length: int = 2048
    windows: int = 64
    batch: int = 16
    generate_shares: tuple[float, ...] = (0.05, 0.2)
    generate_modes: tuple[Mode, ...] = ("mage", "herald", "infinigen")
    prompts: int = 16
    new_tokens: int = 96
    threshold: float = 0.7
    needle_lengths: tuple[int, ...] = (512, 1024)
    needles: int = 16
    seconds: float = float("inf")


def rows(
    model: Decoder,
    tokenizer: Tokenizer,
    documents: Sequence[np.ndarray],
    plan: BenchmarkPlan,
    report: Callable[[str], None],
) -> Iterator[Row]:
    """All sections.

    Args:
        model: for block diffusion.
        tokenizer: its own.
        documents: token ids of held-out texts, long ones are cut into windows.
        plan: what is run.
        report: told of progress.
    """
    text = text_windows(documents, plan.length, plan.windows)
    if "text" in plan.sections:
        yield from _teacher_forced(model, text, "text", plan, report)
    if "words" in plan.sections:
        lists = word_lists(tokenizer, plan.length, plan.windows, plan.quality.seed)
        yield from _teacher_forced(model, lists, "words", plan, report)
    if "selection" in plan.sections:
        report("selection")
        whole = Windows(model, text[: plan.batch], plan.quality)
        yield from herald_selection.rows(whole, f"herald_quality/selection/{plan.length}")
    if "generation" in plan.sections:
        yield from _generation(model, text[: plan.prompts], plan, report)
    if "needles" in plan.sections:
        haystacks = [tokenizer.decode(document.tolist()) for document in documents[:8]]
        yield from _needles(model, tokenizer, haystacks, plan, report)


def text_windows(documents: Sequence[np.ndarray], length: int, count: int) -> np.ndarray:
    """Windows spread over texts, `int32[count, length]`; at most one in `length` tokens.

    Raises:
        ValueError: the texts hold fewer.
    """
    starts = [
        (number, at)
        for number, document in enumerate(documents)
        for at in range(0, len(document) - length + 1, length)
    ]
    if len(starts) < count:
        raise ValueError(f"the texts hold {len(starts)} windows of {length} tokens, not {count}")
    picked = [starts[len(starts) * i // count] for i in range(count)]
    return np.array([documents[n][at : at + length] for n, at in picked], np.int32)


def word_lists(tokenizer: Tokenizer, length: int, count: int, seed: int) -> np.ndarray:
    """Lists of words, each window with its own frequencies, `int32[count, length]`."""
    out = []
    for window in range(count):
        rng = np.random.default_rng((seed, window))
        words = rng.permutation(_WORDS)
        weights = 1.0 / np.arange(1, len(words) + 1)
        drawn = rng.choice(words, length, p=weights / weights.sum())
        tokens = tokenizer.encode(" ".join(drawn), add_special=False)
        out.append(tokens[:length])
    return np.array(out, np.int32)


def _teacher_forced(
    model: Decoder,
    windows: np.ndarray,
    section: str,
    plan: BenchmarkPlan,
    report: Callable[[str], None],
) -> Iterator[Row]:
    begun = time.monotonic()
    parts: list[Scores] = []
    rng = np.random.default_rng(plan.quality.seed)
    for at in range(0, len(windows), plan.batch):
        if parts and time.monotonic() - begun > plan.seconds:
            report(f"{section}: ended after {at} of {len(windows)} windows")
            break
        whole = Windows(model, windows[at : at + plan.batch], plan.quality)
        tell = lambda line, at=at: report(f"{section}, window {at} on, {line}")
        parts.append(herald_quality.measure(whole, rng, tell))
    scores = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    yield from score_rows(scores, f"herald_quality/{section}/{plan.length}")


def score_rows(scores: Scores, prefix: str) -> Iterator[Row]:
    """Rows of meters; the intervals are over windows, those of differences paired."""
    dense, near = scores["dense", 1.0, "bound"], scores["near", 0.0, "bound"]
    yield make_row(f"{prefix}/dense/bound", mean(dense), "nats", "lower")
    for (mode, share, meter), values in scores.items():
        if mode == "dense":
            continue
        name = f"{prefix}/{mode}/{100 * share:g}%"
        if meter in ("agreement", "recall", "mass"):
            yield make_row(f"{name}/{meter}", mean(values), "share", "higher")
        elif meter == "kl":
            yield make_row(f"{name}/kl", mean(values), "nats", "lower")
        else:
            yield make_row(f"{name}/bound_over_dense", mean(values - dense), "nats", "lower")
            if mode != "near" and mean(near - dense).low > 0:  # or there is nothing to keep
                kept = ratio(near - values, near - dense)
                yield make_row(f"{name}/gain_kept", kept, "share", "higher")


def _engines(model: Decoder, plan: BenchmarkPlan) -> Iterator[tuple[str, HeraldEngine]]:
    """Dense, and every mode at every budget."""
    base = HeraldEngine(model, config=HeraldConfig(mode="dense"))
    yield "dense", base
    for share in plan.generate_shares:
        for mode in plan.generate_modes:
            config = dataclasses.replace(base.config, mode=mode, budget=Budget(share))
            yield f"{mode}/{100 * share:g}%", base.with_config(config)


def _generation(
    model: Decoder, prompts: np.ndarray, plan: BenchmarkPlan, report: Callable[[str], None]
) -> Iterator[Row]:
    """Forwards a block and how often drafts come true, in free generation."""
    sampling = SamplingParams(max_new_tokens=plan.new_tokens, stop_token_ids=())
    rule = dataclasses.replace(DenoiseParams.of_family(model.config), threshold=plan.threshold)
    dense: list[list[int]] = []
    for name, engine in _engines(model, plan):
        report(f"generation, {name}")
        results, told = engine.generate(prompts.tolist(), sampling, rule)
        tokens = [result.tokens for result in results]
        dense = dense or tokens
        prefix = f"herald_quality/generation/{plan.length}/{name}"
        steps, count = told.steps_per_block, told.blocks
        yield Row(f"{prefix}/steps", Timing.exact(steps, count), "forwards", "lower")
        same = [equal_share([a], [b]) for a, b in zip(tokens, dense, strict=True)]
        yield make_row(f"{prefix}/tokens_as_dense", mean(np.array(same)), "share", "higher")
        if told.drafted:
            agreement = Timing.exact(told.draft_agreement, told.drafted)
            yield Row(f"{prefix}/draft_agreement", agreement, "share", "higher")


def _needles(
    model: Decoder,
    tokenizer: Tokenizer,
    haystacks: Sequence[str],
    plan: BenchmarkPlan,
    report: Callable[[str], None],
) -> Iterator[Row]:
    """Values found in greedy generation after the answer's prefix."""
    tasks: tuple[needles.Task, ...] = ("single", "multivalue")
    rule = DenoiseParams.of_family(model.config)
    for name, engine in _engines(model, plan):
        for task in tasks:
            for length in plan.needle_lengths:
                report(f"needles, {name}, {task}, {length}")
                drawn = needles.samples(
                    task, tokenizer, haystacks, length, plan.needles, plan.quality.seed
                )
                prompts = [list(sample.tokens[: sample.spans[0][0]]) for sample in drawn]
                longest = max(len(s.tokens) - s.spans[0][0] for s in drawn)
                sampling = SamplingParams(max_new_tokens=longest + 8)
                results, _ = engine.generate(prompts, sampling, rule)
                found = [
                    np.mean([_holds(result.tokens, sample.tokens[a:b]) for a, b in sample.spans])
                    for sample, result in zip(drawn, results, strict=True)
                ]
                row = f"herald_quality/needles/{task}/{length}/{name}"
                yield make_row(row, mean(np.array(found)), "share", "higher")


def _holds(text: Sequence[int], part: Sequence[int]) -> bool:
    """Whether tokens hold others one after the other."""
    size = len(part)
    return any(tuple(text[i : i + size]) == tuple(part) for i in range(len(text) - size + 1))
