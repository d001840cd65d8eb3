"""Rows of a results file from an evaluation's predictions.

Names: suite/length/task/mode for a task's metric, suite/length/task.metric/mode for its others,
suite/length/mean/mode for means over tasks, and mode-baseline in place of mode for paired
differences. Scores are 0 to 100.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics as means
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from sparda_jax.evaluation import comparison
from sparda_jax.evaluation.comparison import Clusters, Difference
from sparda_jax.evaluation.kernel_benchmarks.harness import Row, Timing
from sparda_jax.evaluation.run import Cell, Prediction, Run
from sparda_jax.evaluation.statistics import Estimate
from sparda_jax.evaluation.tasks import reasoning
from sparda_jax.evaluation.tasks.base import Example, Scores, Task
from sparda_jax.evaluation.tasks.longbench import BUCKETS

# A mode may replace the baseline where it is surely no worse than this many points.
MARGIN = 1.0
DEPTHS = 10


@dataclasses.dataclass(frozen=True)
class ScoreRow(Row):
    """A row with more to say.

    Attributes:
        more: further fields of the row in the file.
    """

    more: dict[str, Any] = dataclasses.field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The row as it stands in the results file."""
        return super().as_json() | self.more


def make_row(
    name: str,
    estimate: Estimate,
    unit: str,
    better: Literal["lower", "higher"] = "higher",
    scale: float = 1.0,
    **more: Any,
) -> ScoreRow:
    """A row of an estimate, scaled."""
    low, high = estimate.low * scale, estimate.high * scale
    timing = Timing(estimate.value * scale, (low, high), estimate.n)
    return ScoreRow(name, timing, unit, better, more=more)


@dataclasses.dataclass(frozen=True)
class Scored:
    """A task's answers at one length, those of all seeds, with their scores.

    Attributes:
        task: see there.
        length: see `Cell`.
        keys: seed, example and repeat of each.
        clusters: examples of one cluster are not independent.
        examples: what was asked.
        predictions: what was answered.
        scores: of each answer.
    """

    task: Task
    length: int | None
    keys: list[str]
    clusters: list[str]
    examples: list[Example]
    predictions: list[Prediction]
    scores: list[Scores]

    @property
    def prefix(self) -> str:
        """Of the names of its rows."""
        return f"{self.task.groups[0].split('/')[0]}/{label(self.length)}"

    def values(self, metric: str | None = None) -> list[float]:
        """Scores of one metric; None: the task's own."""
        name = metric or next(iter(self.scores[0]))
        return [score[name] for score in self.scores]

    def grouped(self) -> Clusters:
        """The task's own metric by cluster."""
        return Clusters.of(self.values(), self.clusters)


def label(length: int | None) -> str:
    """A length in names of rows: 4K, 1000, full."""
    if length is None:
        return "full"
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def score(run: Run, cells: Sequence[tuple[Cell, Sequence[Example]]], mode: str) -> list[Scored]:
    """Scores of everything that one mode has predicted, by task and length.

    Raises:
        ValueError: predictions are missing.
    """
    found: dict[tuple[str, int | None], Scored] = {}
    for cell, examples in cells:
        key = cell.task.name, cell.length
        scored = found.setdefault(key, Scored(cell.task, cell.length, [], [], [], [], []))
        predictions, _ = run.predictions(cell, mode)
        by_key = {(p.id, p.repeat): p for p in predictions}
        for example, repeat in itertools.product(examples, range(run.answering.repeats)):
            if (example.id, repeat) not in by_key:
                raise ValueError(f"no {mode} answer to {cell.file}, example {example.id}")
            prediction = by_key[example.id, repeat]
            scored.keys.append(f"{cell.seed}/{example.id}/{repeat}")
            scored.clusters.append(f"{cell.seed}/{example.cluster or example.id}")
            scored.examples.append(example)
            scored.predictions.append(prediction)
            scored.scores.append(cell.task.score(example, prediction.text))
    return list(found.values())


def rows(scored: dict[str, list[Scored]], baseline: str, *, seed: int) -> Iterator[ScoreRow]:
    """All rows of all modes.

    Args:
        scored: by mode, see `score`.
        baseline: the mode that others are compared with.
        seed: of the resampling.
    """
    for mode, parts in scored.items():
        for part in parts:
            yield from _task_rows(part, mode, seed)
        yield from _means(parts, mode, seed)
    yield from _differences(scored, baseline, seed)


def _task_rows(part: Scored, mode: str, seed: int) -> Iterator[ScoreRow]:
    names = list(part.scores[0])
    for name in names:
        first = name == names[0]
        estimate = comparison.score(
            part.values(name), part.clusters, binary=first and part.task.binary, seed=seed
        )
        title = part.task.name if first else f"{part.task.name}.{name}"
        more = _counts(part) | {"metric": name} if first else {}
        yield make_row(f"{part.prefix}/{title}/{mode}", estimate, "score", scale=100, **more)
    if "math" in part.task.groups and (repeats := 1 + max(p.repeat for p in part.predictions)) > 1:
        for name, values in _repeated(part, repeats).items():
            estimate = comparison.score(values, list(map(str, range(len(values)))),
                                        binary=False, seed=seed)  # fmt: skip
            title = f"{part.task.name}.{name}"
            yield make_row(f"{part.prefix}/{title}/{mode}", estimate, "score", scale=100)


def _counts(part: Scored) -> dict[str, Any]:
    """What a score should not be read without."""
    predictions = part.predictions
    by_seed: dict[str, list[float]] = {}
    for key, value in zip(part.keys, part.values(), strict=True):
        by_seed.setdefault(key.split("/")[0], []).append(100 * value)
    more: dict[str, Any] = {
        "empty": sum(not p.text.strip() for p in predictions),
        "truncated": sum(bool({"truncated", "cut"} & _true(e.more)) for e in part.examples),
        "at_limit": sum(p.finish == "length" for p in predictions),
        "prompt_tokens": round(means.mean(p.prompt_tokens for p in predictions), 1),
        "answer_tokens": round(means.mean(p.tokens for p in predictions), 1),
        "seeds": {seed: round(means.mean(values), 2) for seed, values in by_seed.items()},
    }
    if len(by_seed) > 1:
        more["seed_deviation"] = round(means.stdev(more["seeds"].values()), 2)
    if all("answer_at" in example.more for example in part.examples):
        places = [int(min(e.more["answer_at"], 0.999) * DEPTHS) for e in part.examples]
        more["by_depth"] = _by(places, range(DEPTHS), part.values())
    if "longbench_e" in part.task.groups:
        lengths = [example.more["length"] for example in part.examples]
        buckets = [next(b for b, (lo, hi) in BUCKETS.items() if lo <= n < hi) for n in lengths]
        more["by_length"] = _by(buckets, BUCKETS, part.values())
    return more


def _true(more: Any) -> set[str]:
    return {name for name, value in more.items() if value}


def _by(keys: Sequence[Any], order: Any, values: Sequence[float]) -> dict[str, Any]:
    """[mean, n] of the values of each key."""
    groups = {key: [v for k, v in zip(keys, values, strict=True) if k == key] for key in order}
    return {str(k): [round(100 * means.mean(v), 1), len(v)] for k, v in groups.items() if v}


def _repeated(part: Scored, repeats: int) -> dict[str, list[float]]:
    """maj@k and pass@k of each problem."""
    majority, passed = [], []
    for start in range(0, len(part.keys), repeats):
        some = slice(start, start + repeats)
        example, right = part.examples[start], part.values()[some]
        integer = next(iter(part.scores[start])) == "accuracy"
        answers = [
            reasoning.final_answer(p.text, integer=integer)[0] for p in part.predictions[some]
        ]
        chosen = reasoning.majority(answers)
        text = "" if chosen is None else f"\\boxed{{{chosen}}}"
        majority.append(next(iter(part.task.score(example, text).values())))
        passed.append(reasoning.pass_at(repeats, int(sum(right)), repeats))
    return {f"maj@{repeats}": majority, f"pass@{repeats}": passed}


@dataclasses.dataclass(frozen=True)
class _Mean:
    """What a row of a mean is made of.

    Attributes:
        members: tasks.
        weights: of each.
    """

    members: list[Scored]
    weights: list[float]


def _in_groups(parts: Sequence[Scored]) -> dict[str, _Mean]:
    """Means by the name of their row: suite/length/mean, suite/length/group.

    HELMET's is one of categories, each the mean of its data sets (spec/evaluation.md, sec. 3).
    """
    groups: dict[str, list[Scored]] = {}
    for part in parts:
        for group in part.task.groups:
            suite, _, name = group.partition("/")
            key = f"{suite}/{label(part.length)}/{name or 'mean'}"
            groups.setdefault(key, []).append(part)
    found = {key: _Mean(m, [1.0] * len(m)) for key, m in groups.items() if len(m) > 1}
    for prefix in {key.rpartition("/")[0] for key in groups if key.startswith("helmet/")}:
        own = [members for key, members in groups.items() if key.startswith(f"{prefix}/")]
        if len(own) > 1:
            weighted = [(part, 1 / len(members)) for members in own for part in members]
            found[f"{prefix}/deterministic"] = _Mean(*map(list, zip(*weighted, strict=True)))
    return found


def _means(parts: Sequence[Scored], mode: str, seed: int) -> Iterator[ScoreRow]:
    for key, mean in _in_groups(parts).items():
        clusters = [part.grouped() for part in mean.members]
        estimate = comparison.average(clusters, seed=seed, weights=mean.weights)
        tasks = [part.task.name for part in mean.members]
        yield make_row(f"{key}/{mode}", estimate, "score", scale=100, tasks=tasks)


def _differences(scored: dict[str, list[Scored]], baseline: str, seed: int) -> Iterator[ScoreRow]:
    """Paired, of every two modes; p of the means also for as many as there are.

    Args:
        scored: by mode.
        baseline: what the others are compared with; then each with those named before it.
        seed: of the resampling.
    """
    family: list[tuple[str, Difference]] = []
    others = [mode for mode in scored if mode != baseline]
    pairs = [(mode, baseline) for mode in others]
    pairs += [(mode, before) for before, mode in itertools.combinations(others, 2)]
    for mode, base in pairs:
        parts = scored[mode]
        gaps: dict[int, Clusters] = {}
        for ours, theirs in zip(parts, scored[base], strict=True):
            if ours.keys != theirs.keys or [e.prompt for e in ours.examples] != [
                e.prompt for e in theirs.examples
            ]:
                raise ValueError(f"{mode} and {base} answered other {ours.task.name} examples")
            values = ours.values(), theirs.values()
            found = comparison.difference(*values, ours.clusters, seed=seed)
            name = f"{ours.prefix}/{ours.task.name}/{mode}-{base}"
            yield _difference_row(name, found)
            gap = [a - b for a, b in zip(*values, strict=True)]
            gaps[id(ours)] = Clusters.of(gap, ours.clusters)
        for key, mean in _in_groups(parts).items():
            clusters = [gaps[id(part)] for part in mean.members]
            found = comparison.average_difference(clusters, seed=seed, weights=mean.weights)
            family.append((f"{key}/{mode}-{base}", found))
    adjusted = comparison.holm([found.p for _, found in family])
    for (name, found), p in zip(family, adjusted, strict=True):
        noninferior = 100 * found.at_least > -MARGIN
        yield _difference_row(name, found, p_holm=_digits(p), not_worse_by_a_point=noninferior)


def _difference_row(name: str, found: Difference, **more: Any) -> ScoreRow:
    more = {"p": _digits(found.p), "at_least": round(100 * found.at_least, 2)} | more
    if found.mcnemar is not None:
        more["p_mcnemar"] = _digits(found.mcnemar)
    return make_row(name, found.estimate, "points", scale=100, **more)


def _digits(p: float) -> float:
    return float(f"{p:.3g}")


def meters(
    run: Run, cells: Sequence[tuple[Cell, Sequence[Example]]], mode: str
) -> Iterator[ScoreRow]:
    """Speed and hit rate by length; compile time is not in it."""
    lengths = list(dict.fromkeys(cell.length for cell, _ in cells))
    for length in lengths:
        total: dict[str, float] = {}
        for cell, _ in cells:
            if cell.length == length:
                for name, value in run.predictions(cell, mode)[1].items():
                    total[name] = total.get(name, 0) + value
        for part in ("prefill", "decode"):
            tokens, seconds = total.get(f"{part}_tokens", 0), total.get(f"{part}_seconds", 0)
            if seconds:
                name = f"meters/{label(length)}/{part}/{mode}"
                yield _plain(name, tokens / seconds, "tok/s", int(tokens))
        # Where the KV is resident nothing is fetched, and every block counts as a hit.
        if total.get("free_blocks") and total.get("cold_runs"):
            share = total["hit_blocks"] / total["free_blocks"]
            name = f"meters/{label(length)}/hit_rate/{mode}"
            yield _plain(name, share, "share", int(total["free_blocks"]))


def _plain(name: str, value: float, unit: str, n: int) -> ScoreRow:
    return make_row(name, Estimate(value, value, value, n), unit)
