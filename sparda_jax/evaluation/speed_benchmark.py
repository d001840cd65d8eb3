"""Does an evaluation run as fast as the engine alone? The same prompts, by both, on a wall clock.

The engine's arm is what the other benchmarks of checkpoints time (`Engine.generate`); the
evaluation's is a cell of `scripts/evaluate.py`: its batches, texts, stop texts and files on disk.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sparda_jax.engine.generate import Engine
from sparda_jax.evaluation.generation import EngineAnswerer
from sparda_jax.evaluation.kernel_benchmarks.harness import Row, Timing
from sparda_jax.evaluation.run import Answering, Cell, Run
from sparda_jax.evaluation.tasks.base import Sources, Task
from sparda_jax.tokenization import Tokenizer

# Of the engine's tokens a second, asked of the evaluation.
TARGET = 0.9


@dataclasses.dataclass(frozen=True)
class Work:
    """What is answered.

    Attributes:
        task: whose prompts.
        length: tokens of prompt and answer.
        batch: prompts that run together.
        batches: of a repetition.
        repetitions: timed ones of each arm, in turn, after one that compiles.
    """

    task: Task
    length: int
    batch: int
    batches: int = 2
    repetitions: int = 3


def _seconds(work: Callable[[], int]) -> tuple[float, int]:
    start = time.perf_counter()
    tokens = work()
    return time.perf_counter() - start, tokens


def rows(
    name: str, engine: Engine, tokenizer: Tokenizer, work: Work, texts: Sequence[str]
) -> Iterator[Row]:
    """Tokens a second of both arms, prefill included, and the share that the evaluation keeps.

    Args:
        name: of the rows.
        engine: in any mode.
        tokenizer: of its model.
        work: see there.
        texts: for the task.
    """
    limit = engine.model.config.max_position_embeddings
    count, folder = work.batch * work.batches, Path(tempfile.mkdtemp())
    answering = Answering(batch=work.batch, chat=tokenizer.chat_template is not None)
    cell, run = Cell(work.task, work.length, 42), Run(folder, answering, tokenizer, limit)
    examples = run.examples(cell, Sources(tokenizer, 0, count, 42, texts, chat=answering.chat))

    def evaluate() -> int:
        shutil.rmtree(folder / "predictions", ignore_errors=True)
        answer = EngineAnswerer(engine, tokenizer)
        run.predict(cell, "timed", examples, answer, lambda line: None)
        return sum(prediction.tokens for prediction in run.predictions(cell, "timed")[0])

    def generate() -> int:
        ends, tokens = tuple(tokenizer.eos_token_ids), 0
        for part, prompts, asked, _ in run.batches(cell, examples):
            requests = [dataclasses.replace(request, stop_token_ids=ends) for request in asked]
            results, _ = engine.generate(prompts, requests)
            tokens += sum(len(result.tokens) for result in results[: len(part)])
        return tokens

    try:
        for arm in (evaluate, generate):
            arm()
        timed = [[_seconds(arm) for arm in (evaluate, generate)] for _ in range(work.repetitions)]
    finally:
        shutil.rmtree(folder)
    ours, alone = (
        [tokens / seconds for seconds, tokens in arm] for arm in zip(*timed, strict=True)
    )
    yield Row(f"{name}/evaluation", Timing.of(ours), "tok/s", "higher")
    yield Row(f"{name}/engine", Timing.of(alone), "tok/s", "higher")
    share = Timing.of([a / b for a, b in zip(ours, alone, strict=True)])
    yield Row(f"{name}/evaluation_over_engine", share, "x", "higher", target=TARGET)
