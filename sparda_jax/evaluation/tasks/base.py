"""What a task is: examples, made or read from files, and a score of each answer."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparda_jax.tokenization import Tokenizer

Scores = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Example:
    """One question.

    Attributes:
        id: its name in its task, length and seed.
        prompt: what the user says, or the whole text where the model is not addressed.
        references: right answers; what "right" needs of them is the task's score.
        max_new_tokens: tokens of the answer at most.
        prefix: what the answer starts with: it stands behind the prompt, or behind the header of
            the assistant's turn, and is no part of the prediction.
        chat: the prompt is a user's turn where the model has a chat template.
        stop: text that ends the answer and is no part of it.
        cluster: examples of one cluster are not independent; "": its own.
        more: what else the score needs, as JSON.
    """

    id: str
    prompt: str
    references: tuple[str, ...]
    max_new_tokens: int
    prefix: str = ""
    chat: bool = True
    stop: tuple[str, ...] = ()
    cluster: str = ""
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The example as a line of a prepared file."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Example:
        """The inverse of `as_json`."""
        fields = dict(row)
        return cls(
            **fields | {"references": tuple(fields["references"]), "stop": tuple(fields["stop"])}
        )


@dataclasses.dataclass(frozen=True)
class Sources:
    """What examples are made from.

    Attributes:
        tokenizer: the model's.
        length: tokens of prompt and answer together at most.
        samples: examples of a task; None: all that its file has.
        seed: of everything drawn.
        texts: haystacks.
        data: folder with the tasks' files; None: none was given.
        chat: use the model's chat template where a task asks for it.
    """

    tokenizer: Tokenizer
    length: int
    samples: int | None
    seed: int
    texts: Sequence[str] = ()
    data: Path | None = None
    chat: bool = True

    def encode(self, example: Example) -> list[int]:
        """Token ids of an example's prompt, up to and with the answer's prefix."""
        return encode(example, self.tokenizer, chat=self.chat)


@dataclasses.dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name: "niah_single_1".
        groups: sets of tasks whose mean is reported, the largest first.
        examples: makes or reads its examples.
        score: of one answer, 0 to 1 by name of the metric; the first one is the task's.
        binary: the first metric is 0 or 1.
        sized: examples are made to fit `Sources.length`; otherwise they are as long as they are.
    """

    name: str
    groups: tuple[str, ...]
    examples: Callable[[Sources], list[Example]]
    score: Callable[[Example, str], Scores]
    binary: bool = False
    sized: bool = False


def encode(example: Example, tokenizer: Tokenizer, *, chat: bool) -> list[int]:
    """Token ids of an example's prompt.

    In a chat the prefix opens the assistant's turn, without blanks before it: its header ends in
    white space already.

    Args:
        example: see there.
        tokenizer: the model's.
        chat: use the chat template where the example asks for it.
    """
    if not (chat and example.chat):
        return tokenizer.encode(example.prompt + example.prefix)
    ids = tokenizer.encode_chat([{"role": "user", "content": example.prompt}])
    return ids + tokenizer.encode(example.prefix.lstrip(), add_special=False)


def generator(seed: int, *parts: object) -> np.random.Generator:
    """A random stream of its own for every combination of names.

    The first 8 bytes of sha256("seed|part|part...") seed it (spec/evaluation.md, sec. 7).
    """
    text = "|".join(map(str, (seed, *parts)))
    digest = hashlib.sha256(text.encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "big"))


def read_rows(
    sources: Sources, name: str, fields: Sequence[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of a task's file with their numbers, each checked.

    Args:
        sources: says where files lie.
        name: of the file in that folder; `.json` holds one list, others an object a line.
        fields: that every row has to have.

    Raises:
        FileNotFoundError: no such file; says where it was looked for and what it has to hold.
        ValueError: a row that is no JSON object, or lacks a field.
    """
    needs = f"JSON objects with {', '.join(fields)}"
    if sources.data is None:
        raise FileNotFoundError(f"{name} is needed ({needs}), but no data folder was given")
    path = sources.data / name
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}; expected {needs}")
    found = False
    for number, row in _objects(path):
        if not isinstance(row, dict):
            raise ValueError(f"{path}, row {number}: {type(row).__name__}, expected an object")
        missing = [field for field in fields if field not in row]
        if missing:
            raise ValueError(f"{path}, row {number}: no field {', '.join(map(repr, missing))}")
        found = True
        yield number, row
    if not found:
        raise ValueError(f"{path} holds nothing; expected {needs}")


def _objects(path: Path) -> Iterator[tuple[int, Any]]:
    text = path.read_text("utf-8-sig")
    whole = path.suffix == ".json"
    for number, line in enumerate([text] if whole else text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, row {number}: not JSON: {error}") from None
        if not whole:
            yield number, found
        elif isinstance(found, list):
            yield from enumerate(found, 1)
        else:
            raise ValueError(f"{path}: {type(found).__name__}, expected a list")


def chosen(sources: Sources, task: str, rows: list[Any]) -> list[Any]:
    """As many rows as are asked for, drawn without replacement, in the order of the file."""
    if sources.samples is None or sources.samples >= len(rows):
        return rows
    drawn = generator(sources.seed, task, "rows").choice(len(rows), sources.samples, replace=False)
    return [rows[i] for i in sorted(drawn)]


def cut_middle(tokenizer: Tokenizer, text: str, tokens: int) -> tuple[str, bool]:
    """A text of at most so many tokens: the first half of them and the last (LongBench).

    Args:
        tokenizer: counts.
        text: to shorten.
        tokens: limit; the two halves joined can differ by a token or two where they meet.

    Returns:
        The text, and whether it was cut.

    Raises:
        ValueError: a limit below 2.
    """
    if tokens < 2:
        raise ValueError(f"a text cannot be cut to {tokens} tokens")
    ids = tokenizer.encode(text, add_special=False)
    if len(ids) <= tokens:
        return text, False
    half = tokens // 2
    parts = (ids[:half], ids[-half:])
    return "".join(tokenizer.decode(part, skip_special=True) for part in parts), True
