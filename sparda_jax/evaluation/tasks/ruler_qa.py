"""RULER's two question-answering tasks, from the user's SQuAD and HotpotQA files.

`ruler/squad.json` (SQuAD 2.0, dev) and `ruler/hotpotqa.json` (dev, distractor), as published; see
spec/evaluation.md, sec. 1.7.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from sparda_jax.evaluation.tasks.base import Example, Scores, Sources, Task, generator
from sparda_jax.evaluation.tasks.metrics import match_any
from sparda_jax.evaluation.tasks.ruler import Drawn, Fit, clean


@dataclasses.dataclass(frozen=True)
class Question:
    """A question over documents of the corpus.

    Attributes:
        text: the question.
        answers: right ones.
        near: documents that come first, the right one (or ones) at the front.
        needed: how many of them may not be left out.
    """

    text: str
    answers: tuple[str, ...]
    near: tuple[int, ...]
    needed: int


def _read(sources: Sources, name: str) -> tuple[Any, str]:
    if sources.data is None:
        raise FileNotFoundError(f"ruler/{name} is needed, but no data folder was given")
    path = sources.data / "ruler" / name
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: the published file of this data set is expected")
    try:
        return json.loads(path.read_text("utf-8-sig")), str(path)
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None


def squad(sources: Sources) -> tuple[list[str], list[Question]]:
    """Distinct paragraphs, sorted, and the questions that can be answered.

    Raises:
        ValueError: a missing field.
    """
    found, path = _read(sources, "squad.json")
    try:
        articles = [[p["context"] for p in article["paragraphs"]] for article in found["data"]]
        corpus = sorted({context for article in articles for context in article})
        index = {context: i for i, context in enumerate(corpus)}
        questions = []
        for article, contexts in zip(found["data"], articles, strict=True):
            others = {index[context] for context in contexts}
            for paragraph in article["paragraphs"]:
                gold = index[paragraph["context"]]
                near = (gold, *sorted(others - {gold}))
                for qa in paragraph["qas"]:
                    if not qa["is_impossible"]:
                        answers = tuple(answer["text"] for answer in qa["answers"])
                        questions.append(Question(qa["question"], answers, near, needed=1))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: not in SQuAD's format: {error!r}") from None
    return corpus, questions


def hotpotqa(sources: Sources) -> tuple[list[str], list[Question]]:
    """Distinct documents (title, line end, text) and questions with the ten that each names.

    Raises:
        ValueError: a missing field.
    """
    found, path = _read(sources, "hotpotqa.json")
    try:
        named = [[f"{t}\n{''.join(s)}" for t, s in row["context"]] for row in found]
        corpus = sorted({document for documents in named for document in documents})
        index = {document: i for i, document in enumerate(corpus)}
        questions = [
            Question(row["question"], (row["answer"],), near := tuple(index[d] for d in documents),
                     needed=len(near))
            for row, documents in zip(found, named, strict=True)
        ]  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not in HotpotQA's format: {error!r}") from None
    return corpus, questions


_INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words."
)
Read = Callable[[Sources], tuple[list[str], list[Question]]]


def _examples(name: str, read: Read, sources: Sources) -> list[Example]:
    corpus, questions = read(sources)
    if sources.samples is not None and sources.samples > len(questions):
        raise ValueError(f"{name}: {sources.samples} samples of {len(questions)} questions")
    count = sources.samples or len(questions)
    sources = dataclasses.replace(sources, samples=1)
    examples = []
    for number, question in enumerate(questions[:count]):
        make = partial(_make, name, corpus, question, sources.seed)
        fit = Fit(name, 32, 5, least=question.needed, most=len(corpus), filled=False)
        (example,) = fit.examples(make, sources)
        examples.append(dataclasses.replace(example, id=str(number)))
    return examples


def _make(
    name: str,
    corpus: list[str],
    question: Question,
    seed: int,
    size: int,
    rng: np.random.Generator,
) -> Drawn:
    size = min(size, len(corpus))
    near = question.near[: question.needed]
    rest = rng.permutation(question.near[question.needed :])
    others = rng.permutation(np.setdiff1d(np.arange(len(corpus)), question.near))
    ids = [*near, *map(int, rest), *map(int, others)][:size]
    order = generator(seed, name, "order", size).permutation(size)
    documents = "\n\n".join(f"Document {n}:\n{corpus[ids[i]]}" for n, i in enumerate(order, 1))
    prompt = (
        f"{_INSTRUCTION}\n\nThe following are given documents.\n\n{documents}\n\n{_INSTRUCTION}\n\n"
        f"Question: {question.text}"
    )
    return Drawn(prompt, " Answer:", list(question.answers), {"documents": size})


def _score(example: Example, answer: str) -> Scores:
    return {"string_match": match_any(clean(answer), example.references)}


TASKS = {
    name: Task(
        name, ("ruler13", "ruler/qa"), partial(_examples, name, read), _score, True, sized=True
    )
    for name, read in (("qa_1", squad), ("qa_2", hotpotqa))
}
