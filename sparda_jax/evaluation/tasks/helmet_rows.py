"""HELMET-style questions from rows of their files (spec/evaluation.md, sec. 3.2, 3.3).

Our own wording of the published structure. Each reader turns the files of one kind of data set into
questions: what stands before the context, the context, what stands behind it, and the lead-in of
the answer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparda_jax.evaluation.tasks.base import Sources, generator, read_rows

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Question:
    """One row as a prompt in parts.

    Attributes:
        before: instruction and demonstrations.
        context: what is cut, at its end, where the prompt is too long.
        after: the question.
        lead_in: what the answer starts with.
        references: right answers.
        cluster: rows of one question are not independent.
        more: for the score.
    """

    before: str
    context: str
    after: str
    lead_in: str
    references: tuple[str, ...]
    cluster: str = ""
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _local_seed(text: str, seed: int = 0) -> int:
    """(sha256(text) + seed) mod 2^31: the same demonstrations for a question in every run."""
    return (int(hashlib.sha256(text.encode()).hexdigest(), 16) + seed) % 2**31


def _sampled(rows: Sequence[Row], key: str, sources: Sources, count: int) -> list[Row]:
    """All rows of `count` of the questions, which may come once for each gold position."""
    names = list(dict.fromkeys(str(row[key]) for row in rows))
    count = min(sources.samples or count, len(names))
    drawn = generator(sources.seed, key, len(names)).choice(len(names), count, replace=False)
    kept = {names[i] for i in drawn}
    return [row for row in rows if str(row[key]) in kept]


def _rows(sources: Sources, name: str, fields: Sequence[str]) -> list[Row]:
    return [row for _, row in read_rows(sources, f"helmet/{name}", fields)]


def _documents(row: Row) -> str:
    return "\n\n".join(f"Document (Title: {c['title']}): {c['text']}" for c in row["ctxs"])


def _demonstrations(demos: Sequence[Row], key: str, name: str, count: int = 2) -> list[Row]:
    """Two others, shuffled by the question itself, none twice."""
    order = np.random.default_rng(_local_seed(name)).permutation(len(demos))
    kept: dict[str, Row] = {}
    for i in order:
        if len(kept) < count and (other := str(demos[i][key])) != name:
            kept.setdefault(other, demos[i])
    return list(kept.values())


_SHORT = (
    "Use the given documents to write a concise and short answer to the question. Write your "
    "answer in the following format:\nAnswer: [answer]\n\n"
)


def kilt(sources: Sources, test: str, demos: str, *, popular: bool = False) -> list[Question]:
    """Questions over retrieved passages; `popular` keeps those with log10(s_pop) < 3."""
    fields = ("question", "answers", "ctxs")
    rows = _rows(sources, test, (*fields, "s_pop") if popular else fields)
    shown = _rows(sources, demos, fields)
    if popular:
        rows = [row for row in rows if np.log10(max(row["s_pop"], 1)) < 3]
    questions = []
    for row in _sampled(rows, "question", sources, 100):
        examples = (
            f"{_documents(demo)}\n\nQuestion: {demo['question']}\nAnswer: {demo['answers'][0]}\n\n"
            for demo in _demonstrations(shown, "question", row["question"])
        )
        questions.append(
            Question(
                _SHORT + "\n".join(examples) + "\n",
                _documents(row),
                f"\n\nQuestion: {row['question']}",
                "Answer:",
                tuple(row["answers"]),
                cluster=row["question"],
            )
        )
    return questions


def json_kv(sources: Sources, test: str) -> list[Question]:
    """The value of a key in a long JSON object."""
    rows = _rows(sources, test, ("context", "question", "answer", "demos"))
    questions = []
    for row in _sampled(rows, "question", sources, 100):
        demos = "\n\n".join(
            f"Key: {key}\nCorresponding value:{value}" for key, value in row["demos"][:2]
        )
        questions.append(
            Question(
                "",
                row["context"],
                "\n\nExtract the value corresponding to the specified key in the JSON object "
                f"above.\n\n{demos}\n\nKey: {row['question']}",
                "Corresponding value:",
                (row["answer"],),
                cluster=row["question"],
            )
        )
    return questions


def needles(sources: Sources, test: str) -> list[Question]:
    """RULER's needles in HELMET's rows."""
    questions = []
    for row in _rows(sources, test, ("context", "type_needle_v"))[: sources.samples or 100]:
        query, answers = (
            row.get("query", row.get("question")),
            row.get("answer", row.get("outputs")),
        )
        if query is None or answers is None:
            raise ValueError(f"helmet/{test}: a row without query (question) or answer (outputs)")
        answers = [answers] if isinstance(answers, str) else answers
        many = len(answers) > 1
        kind = row["type_needle_v"] if many else row["type_needle_v"].removesuffix("s")
        verb, what = ("are", "What are all") if many else ("is", "What is")
        some = f"Some special magic {kind} are" if many else f"A special magic {kind} is"
        questions.append(
            Question(
                f"{some} hidden in the following text. Memorise what you read: I will quiz you "
                f"about the {kind} afterwards.\n",
                row["context"],
                f"\n{what} the special magic {kind} for {query} mentioned in the provided text?",
                f"The special magic {kind} for {query} mentioned in the provided text {verb}",
                tuple(map(str, answers)),
            )
        )
    return questions


def _passages(row: Row) -> str:
    return "\n\n".join(
        f"[ID: {c['id']}] Document{f' (Title: {t})' if (t := c.get('title')) else ''}: {c['text']}"
        for c in row["ctxs"]
    )


def _ranking(row: Row, count: int = 10) -> str:
    order = sorted(row["ctxs"], key=lambda c: c["label"], reverse=True)
    return " > ".join(str(c["id"]) for c in order[:count])


def ms_marco(sources: Sources, test: str, demos: str) -> list[Question]:
    """Passages to be ranked."""
    fields = ("qid", "query", "ctxs")
    shown = _rows(sources, demos, fields)
    questions = []
    for row in _sampled(_rows(sources, test, fields), "qid", sources, 100):
        examples = "\n\n".join(
            f"{_passages(demo)}\n\nQuery: {demo['query']}\nRanking: {_ranking(demo)}"
            for demo in _demonstrations(shown, "qid", str(row["qid"]))
        )
        questions.append(
            Question(
                "You are provided with a list of documents, each with its ID. Rank them by their "
                "relevance to the query, from most relevant to least relevant: write the IDs of "
                "the 10 most relevant in the format:\nRanking: ID3 > ID1 > ID2\n\n"
                f"{examples}\n\n",
                _passages(row),
                f"\n\nQuery: {row['query']}",
                "Ranking:",
                (_ranking(row),),
                cluster=str(row["qid"]),
                more={"labels": {str(c["id"]): c["label"] for c in row["ctxs"]}},
            )
        )
    return questions


def in_context(sources: Sources, name: str, shots: int, labels: int) -> list[Question]:
    """Classification by `shots` labelled examples, as many of every label as can be.

    The labels are numbers, another permutation for every question.
    """
    fields = ("text", "label")
    train, test = (_rows(sources, f"icl/{name}/{part}.jsonl", fields) for part in ("train", "test"))
    by_label: dict[int, list[Row]] = {label: [] for label in range(labels)}
    for row in train:
        if row["label"] not in by_label:
            raise ValueError(f"{name}: label {row['label']}, expected 0 to {labels - 1}")
        by_label[row["label"]].append(row)
    if empty := [label for label, rows in by_label.items() if not rows]:
        raise ValueError(f"{name}: no training example of label {empty[0]}")
    questions = []
    balanced = _balanced(test, labels, sources.samples or 500, sources.seed)
    for row in balanced:
        rng = np.random.default_rng(_local_seed(row["text"], sources.seed))
        renamed = rng.permutation(labels)
        demos: list[Row] = []
        while len(demos) < shots:
            for label in rng.permutation(labels):
                rows = by_label[int(label)]
                demos.append(rows[int(rng.integers(len(rows)))])
        shown = (f"{demo['text']}\nlabel: {renamed[demo['label']]}" for demo in demos[:shots])
        questions.append(
            Question(
                "Use the provided mapping from the text to label to assign a label to the text. "
                'Only output "label: {label}" and nothing else.\n\n',
                "\n\n".join(shown),
                f"\n\n{row['text']}",
                "label:",
                (str(renamed[row["label"]]),),
            )
        )
    return questions


def _balanced(rows: Sequence[Row], labels: int, count: int, seed: int) -> list[Row]:
    """Rows round by round, one of every label that is left."""
    order = generator(seed, "balanced").permutation(len(rows))
    queues: dict[int, list[Row]] = {label: [] for label in range(labels)}
    for i in order:
        queues.setdefault(rows[i]["label"], []).append(rows[i])
    taken: list[Row] = []
    while len(taken) < count and any(queues.values()):
        taken += [queue.pop() for queue in queues.values() if queue]
    return taken[:count]


_CITE = (
    "Write an accurate, engaging, and concise answer for the given question using only the "
    "provided search results, and cite them properly: [1], at most three for a sentence."
)


def alce(sources: Sources, test: str, prompts: str, documents: int) -> list[Question]:
    """Long answers with citations; `prompts` is the published file of demonstrations."""
    path = sources.data and sources.data / "helmet" / prompts
    if path is None or not path.is_file():
        raise FileNotFoundError(f"no file helmet/{prompts} with the key 'demos'")
    demos = json.loads(path.read_text("utf-8-sig")).get("demos", [])[:2]
    show = lambda docs: "\n".join(
        f"Document [{n}](Title: {doc['title']}): {doc['text']}" for n, doc in enumerate(docs, 1)
    )
    before = "".join(
        f"{_CITE}\n\nQuestion: {demo['question']}\n\n{show(demo['docs'])}\n\nAnswer: "
        f"{demo['answer']}\n\n\n"
        for demo in demos
    )
    questions = []
    for row in _sampled(_rows(sources, test, ("question", "docs")), "question", sources, 100):
        pairs = [pair["short_answers"] for pair in row.get("qa_pairs") or []]
        answers = pairs or row.get("answers")
        if not answers:
            raise ValueError(f"helmet/{test}: a row without qa_pairs or answers")
        docs = row["docs"][:documents]
        questions.append(
            Question(
                f"{before}{_CITE}\n\nQuestion: {row['question']}\n\n",
                show(docs),
                "",
                "Answer:",
                (),
                more={"answers": answers, "docs": [doc["text"] for doc in docs]},
            )
        )
    return questions


def long_document(sources: Sources, test: str, kind: str, limit: int) -> list[Question]:
    """A book or a case, whole, and a question about it or the wish for a summary.

    Args:
        sources: see there.
        test: the file.
        kind: "narrativeqa", "infbench_qa", "infbench_choice", "infbench_sum" or "multi_lexsum".
        limit: tokens of the document, beyond which it is left out.
    """
    fields = {
        "narrativeqa": ("document", "question", "answers"),
        "infbench_qa": ("id", "context", "input", "answer"),
        "infbench_choice": ("id", "context", "input", "answer", "options"),
        "infbench_sum": ("id", "context", "answer"),
        "multi_lexsum": ("sources", "summary/short"),
    }[kind]
    rows = _rows(sources, test, fields)[: sources.samples or 100]
    return [_long_question(row, kind, sources, limit) for row in rows]


_TASKS = {
    "narrativeqa": "Answer the question about the story concisely, with a single phrase.",
    "infbench_qa": "Answer the question about the story as concisely as you can.",
    "infbench_choice": "Answer the question about the story with the letter of the right option.",
    "infbench_sum": "Write a summary of 1000 to 1500 words of the book: its plot and characters.",
    "multi_lexsum": "Write a concise summary of at most 200 words of the legal case.",
}


def _long_question(row: Row, kind: str, sources: Sources, limit: int) -> Question:
    more: dict[str, Any] = {}
    if kind == "narrativeqa":
        document, question = row["document"]["text"], row["question"]["text"]
        references = tuple(answer["text"] for answer in row["answers"])
    elif kind == "multi_lexsum":
        document, question = "\n\n".join(row["sources"]), ""
        references = (row["summary/short"],)
        more = {"keypoints": row.get("keypoints") or []}
    else:
        answers = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
        document, question, references = row["context"], row.get("input", ""), tuple(answers)
    if kind == "infbench_choice":
        letters = [f"{letter}. {text}" for letter, text in zip("ABCD", row["options"], strict=True)]
        question = "\n".join([question, *letters])
        more = {"options": list(row["options"])}
    summary = kind in ("infbench_sum", "multi_lexsum")
    return Question(
        f"{_TASKS[kind]}\n\n",
        _limited(document, sources, limit),
        "" if summary else f"\n\nQuestion: {question}",
        "Summary:" if summary else "Answer:",
        references,
        cluster=str(row.get("id", "")),
        more=more,
    )


def _limited(document: str, sources: Sources, limit: int) -> str:
    """The start of a document; where something is left out, it says so within the limit."""
    omitted = " ... [the rest of the text is omitted]"
    encode = lambda text: sources.tokenizer.encode(text, add_special=False)
    ids = encode(document)
    if len(ids) <= limit:
        return document
    kept = ids[: max(0, limit - len(encode(omitted)))]
    return sources.tokenizer.decode(kept) + omitted
