"""Tasks, lengths, seeds and modes together: from settings to the rows of a results file."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

from sparda_jax.engine.generate import Engine
from sparda_jax.evaluation import position, tables
from sparda_jax.evaluation.generation import Answerer
from sparda_jax.evaluation.run import Cell, Report, Run
from sparda_jax.evaluation.tables import ScoreRow
from sparda_jax.evaluation.tasks.base import Sources, Task

# Of the bootstrap, not of the examples.
RESAMPLING_SEED = 0


@dataclasses.dataclass(frozen=True)
class Suite:
    """What is evaluated.

    Attributes:
        tasks: see there.
        lengths: of tasks that are made to measure, tokens.
        seeds: of the examples.
        modes: to run; see `baseline`.

    Raises:
        ValueError: nothing to do, or lengths missing.
    """

    tasks: Sequence[Task]
    lengths: Sequence[int]
    seeds: Sequence[int]
    modes: Sequence[str]

    def __post_init__(self) -> None:
        for name in ("seeds", "modes"):
            values = list(getattr(self, name))
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must be given, each once, got {values}")
        sized = [task.name for task in self.tasks if task.sized]
        if sized and not self.lengths:
            raise ValueError(f"{sized[0]} is made to a length: give lengths")

    @property
    def baseline(self) -> str:
        """What the other modes are compared with: dense, or else the first."""
        return "dense" if "dense" in self.modes else self.modes[0]

    def cells(self) -> list[Cell]:
        """All that is to be answered, the same length together."""
        sized = [
            Cell(task, length, seed)
            for length in self.lengths
            for task in self.tasks
            if task.sized
            for seed in self.seeds
        ]
        whole = [
            Cell(task, None, seed) for task in self.tasks if not task.sized for seed in self.seeds
        ]
        return sized + whole


def run_tasks(
    suite: Suite,
    run: Run,
    sources: Sources,
    answerer: Callable[[str], Answerer],
    report: Report,
) -> Iterator[ScoreRow]:
    """Answers what is not answered yet and scores all of it.

    Args:
        suite: see there.
        run: the folder.
        sources: what examples are made from.
        answerer: makes what answers in a mode; called when there is work for it.
        report: progress.

    Raises:
        FileNotFoundError: a task without its data, before any work.
        ValueError: bad data, likewise.
    """
    if not (cells := suite.cells()):
        return
    prepared = [(cell, run.examples(cell, sources)) for cell in cells]
    report(f"{sum(len(examples) for _, examples in prepared)} examples in {len(cells)} cells")
    for mode in suite.modes:
        made = functools.cache(functools.partial(answerer, mode))
        answer = lambda prompts, requests, stops, made=made: made()(prompts, requests, stops)
        for cell, examples in prepared:
            run.predict(cell, mode, examples, answer, report)
    scored = {mode: tables.score(run, prepared, mode) for mode in suite.modes}
    yield from tables.rows(scored, suite.baseline, seed=RESAMPLING_SEED)
    for mode in suite.modes:
        yield from tables.meters(run, prepared, mode)


def run_perplexity(
    suite: Suite,
    run: Run,
    tokens: Callable[[int], Sequence[Sequence[int]]],
    documents: int,
    engine: Callable[[str], Engine],
    report: Report,
) -> Iterator[ScoreRow]:
    """Perplexity by position in every mode whose prompt attention is its own, and KL from one.

    Args:
        suite: its lengths and modes.
        run: the folder.
        tokens: documents to take the first tokens of, by how many these are.
        documents: how many to use at most.
        engine: makes one of a mode; called when there is work for it.
        report: progress.

    Raises:
        ValueError: documents that are all too short.
    """
    modes = [mode for mode in suite.modes if mode != "infinigen"]
    if len(modes) < len(suite.modes):
        report("perplexity: infinigen reads a prompt as sparse does, so it has no row of its own")
    baseline = suite.baseline if suite.baseline in modes else modes[0]
    for length in suite.lengths:
        chosen = position.documents_of(tokens(length), length, documents)
        sums = {}
        make = functools.cache(engine)
        for mode in modes:
            base = None if mode == baseline else functools.partial(make, baseline)
            name = f"perplexity_{length}" + ("" if base is None else f"_from_{baseline}")
            sums[mode] = position.run_documents(
                run.folder / "predictions" / mode / f"{name}.jsonl",
                chosen,
                functools.partial(make, mode),
                run.answering.batch,
                report,
                base,
            )
        yield from position.rows(sums, chosen, run.tokenizer, baseline, RESAMPLING_SEED)
