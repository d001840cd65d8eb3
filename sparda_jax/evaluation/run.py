"""An evaluation as a folder: prepared examples and predictions; stopped, it can go on.

    settings.json                     what decides the results; another one is refused
    predictions/<mode>/settings.json  likewise, of one mode
    examples/<cell>.jsonl             one example a line, the same for every mode
    predictions/<mode>/<cell>.jsonl   one batch a line, appended when it is done

How examples form batches depends on the examples alone, and a batch is the unit that is run again:
a run that was killed and restarted gives the same predictions, as the same programs see the same
rows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparda_jax.config import SamplingParams
from sparda_jax.evaluation.files import append_line, whole_lines, write_text
from sparda_jax.evaluation.generation import Answer, Answerer
from sparda_jax.evaluation.tasks.base import Example, Sources, Task, cut_middle, encode
from sparda_jax.tokenization import Tokenizer

# Tokens kept free beside prompt, template and answer where a prompt is cut.
_SPARE = 16
Report = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One task at one length with one seed.

    Attributes:
        task: see there.
        length: tokens; None: examples are as long as they are.
        seed: of the examples.
    """

    task: Task
    length: int | None
    seed: int

    @property
    def file(self) -> str:
        """Name of its files."""
        return f"{self.task.name}_{self.length or 'full'}_{self.seed}.jsonl"


@dataclasses.dataclass(frozen=True)
class Answering:
    """How answers are drawn.

    Attributes:
        batch: prompts that run together.
        temperature: 0 is greedy.
        top_p: 1 keeps all tokens.
        repeats: answers to each question.
        max_new_tokens: limit besides the tasks' own; None: theirs.
        chat: use the model's chat template where a task asks for it.
        truncate: cut prompts that are too long in the middle.

    Raises:
        ValueError: repeats of greedy answers, which would all be the same; a size below 1.
    """

    batch: int = 8
    temperature: float = 0.0
    top_p: float = 1.0
    repeats: int = 1
    max_new_tokens: int | None = None
    chat: bool = True
    truncate: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.repeats > 1 and self.temperature == 0:
            raise ValueError(f"{self.repeats} greedy answers would be the same: set a temperature")

    def request(self, example: Example, seed: int, repeat: int) -> SamplingParams:
        """Settings of one answer; its random stream is its own."""
        text = f"{seed}|{example.id}|{repeat}|answer"
        stream = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
        return SamplingParams(
            max_new_tokens=self.new_tokens(example),
            temperature=self.temperature,
            top_p=self.top_p,
            seed=stream,
        )

    def new_tokens(self, example: Example) -> int:
        """Tokens of an answer at most."""
        limits = (example.max_new_tokens, self.max_new_tokens or example.max_new_tokens)
        return min(limits)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One answer.

    Attributes:
        id: of its example.
        repeat: which answer to it.
        text: the answer.
        prompt_tokens: of the prompt.
        tokens: of the answer.
        finish: see `Answer`.
    """

    id: str
    repeat: int
    text: str
    prompt_tokens: int
    tokens: int
    finish: str


@dataclasses.dataclass(frozen=True)
class Run:
    """A folder with an evaluation's work.

    Attributes:
        folder: see the module.
        answering: how answers are drawn.
        tokenizer: of the model.
        limit: tokens of prompt and answer together at most.
    """

    folder: Path
    answering: Answering
    tokenizer: Tokenizer
    limit: int

    def claim(self, settings: Mapping[str, Any], mode: str | None = None) -> None:
        """Writes the settings, or checks that the folder was made with them.

        Modes are claimed one by one, so that others can be added to a folder, or run beside one
        another.

        Args:
            settings: of the folder, or of one mode.
            mode: whose settings; None: the folder's.

        Raises:
            ValueError: it was made with others; names them.
        """
        place = self.folder if mode is None else self.folder / "predictions" / mode
        path = place / "settings.json"
        text = json.dumps(settings, indent=1, sort_keys=True, default=str)
        if path.exists():
            before, now = json.loads(path.read_text()), json.loads(text)
            keys = sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k))
            if keys:
                raise ValueError(
                    f"{place} was made with other settings: "
                    + "; ".join(f"{k} was {before.get(k)!r}, is {now.get(k)!r}" for k in keys)
                )
        else:
            write_text(path, text)

    def examples(self, cell: Cell, sources: Sources) -> list[Example]:
        """A cell's examples, made or read once and kept.

        Raises:
            FileNotFoundError: no data.
            ValueError: bad data, or prompts that are too long and may not be cut.
        """
        path = self.folder / "examples" / cell.file
        if path.exists():
            return [Example.from_json(json.loads(line)) for line in path.read_text().splitlines()]
        sources = dataclasses.replace(sources, length=cell.length or self.limit, seed=cell.seed)
        found = self._fitted(cell, cell.task.examples(sources))
        write_text(path, "".join(json.dumps(example.as_json()) + "\n" for example in found))
        return found

    def _fitted(self, cell: Cell, examples: list[Example]) -> list[Example]:
        answering, tokenizer = self.answering, self.tokenizer
        fitted, long, longest = [], 0, 0
        for example in examples:
            tokens = len(encode(example, tokenizer, chat=answering.chat))
            room = self.limit - answering.new_tokens(example)
            if tokens > room:
                long, longest = long + 1, max(longest, tokens)
                if answering.truncate:
                    bare = dataclasses.replace(example, prompt="")
                    template = len(encode(bare, tokenizer, chat=answering.chat))
                    prompt, _ = cut_middle(tokenizer, example.prompt, room - template - _SPARE)
                    more = {**example.more, "truncated": tokens}
                    example = dataclasses.replace(example, prompt=prompt, more=more)
            fitted.append(example)
        if long and not answering.truncate:
            raise ValueError(
                f"{long} of {len(examples)} prompts of {cell.task.name} exceed, with their "
                f"answers, the limit of {self.limit} tokens (the longest has {longest}); "
                "--truncate cuts them in the middle"
            )
        return fitted

    def predict(
        self, cell: Cell, mode: str, examples: Sequence[Example], answer: Answerer, report: Report
    ) -> None:
        """Runs the batches that are not done yet.

        Args:
            cell: see there.
            mode: under whose name predictions are kept.
            examples: of the cell.
            answer: generates.
            report: progress, a line a batch.
        """
        path = self._path(cell, mode)
        done = {record["batch"] for record in whole_lines(path)}
        work = self.batches(cell, examples)
        path.parent.mkdir(parents=True, exist_ok=True)
        for number, (rows, prompts, requests, stops) in enumerate(work):
            if number in done:
                continue
            answers, counters = answer(prompts, requests, stops)
            predictions = [
                _prediction(row, prompt, given)
                for row, prompt, given in zip(rows, prompts, answers, strict=False)
            ]
            record = {"batch": number, "counters": counters, "predictions": predictions}
            append_line(path, json.dumps(record, ensure_ascii=False))
            report(f"{mode} {path.stem}: {number + 1} of {len(work)} batches")

    def predictions(self, cell: Cell, mode: str) -> tuple[list[Prediction], dict[str, float]]:
        """What is there, sorted by example, and the counters of all batches."""
        found: list[Prediction] = []
        counters: dict[str, float] = {}
        for record in whole_lines(self._path(cell, mode)):
            found += [Prediction(**row) for row in record["predictions"]]
            for name, value in record["counters"].items():
                counters[name] = counters.get(name, 0) + value
        return found, counters

    def _path(self, cell: Cell, mode: str) -> Path:
        return self.folder / "predictions" / mode / cell.file

    def batches(self, cell: Cell, examples: Sequence[Example]) -> list[tuple]:
        """(example and repeat of each row, prompts, requests, stops), longest prompts first.

        The last batch is filled up with rows that end at once and count for nothing, so that it
        runs the program of the others.
        """
        answering = self.answering
        ids = [encode(example, self.tokenizer, chat=answering.chat) for example in examples]
        order = sorted(range(len(examples)), key=lambda i: -len(ids[i]))
        rows = [(i, repeat) for i in order for repeat in range(answering.repeats)]
        size = min(answering.batch, len(rows))
        batches = []
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            filler = [part[-1]] * (size - len(part))
            requests = [answering.request(examples[i], cell.seed, r) for i, r in part]
            requests += [SamplingParams(max_new_tokens=1)] * len(filler)
            batches.append(
                (
                    [(examples[i], repeat) for i, repeat in part],
                    [ids[i] for i, _ in (*part, *filler)],
                    requests,
                    [examples[i].stop for i, _ in (*part, *filler)],
                )
            )
        return batches


def _prediction(row: tuple[Example, int], prompt: Sequence[int], answer: Answer) -> dict[str, Any]:
    example, repeat = row
    return dataclasses.asdict(
        Prediction(example.id, repeat, answer.text, len(prompt), answer.tokens, answer.finish)
    )
