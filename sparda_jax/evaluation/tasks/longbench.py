"""LongBench v1 from its published files, with its metrics (spec/evaluation.md, sec. 2).

The prompts are our own wording of the published structure. `dataset2prompt.json` of the original,
laid beside the data, takes their place and makes scores comparable with published ones.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from sparda_jax.evaluation.tasks import metrics
from sparda_jax.evaluation.tasks.base import (
    Example,
    Scores,
    Sources,
    Task,
    chosen,
    read_rows,
)

FOLDER = "longbench"
PROMPTS = f"{FOLDER}/dataset2prompt.json"
_FIELDS = ("input", "context", "answers", "length", "all_classes", "_id")
# Bounds of LongBench-E's buckets by the field "length".
BUCKETS = {"0-4k": (0, 4000), "4-8k": (4000, 8000), "8k+": (8000, float("inf"))}


@dataclasses.dataclass(frozen=True)
class _Kind:
    """A data set: metric, tokens of the answer, whether it is a chat, its prompt."""

    metric: str
    new_tokens: int
    prompt: str
    chat: bool = True
    first_line: bool = False


def _about(what: str, ask: str, end: str = "Answer:") -> str:
    """Instruction, context, instruction again, question."""
    return f"{what}\n\n{{context}}\n\n{ask}\n\nQuestion: {{input}}\n{end}"


_PASSAGES = _about(
    "Answer the question based on the given passages. Only give me the answer and do not output "
    "any other words.\n\nThe following are given passages.",
    "Answer the question based on the given passages. Only give me the answer and do not output "
    "any other words.",
)
_BRIEFLY = "answer the following question based on the above text, only give me the answer"
_NEXT_LINE = "Please complete the code given below.\n{context}{input}Next line of code:\n"

_KINDS: dict[str, _Kind] = {
    "narrativeqa": _Kind(
        "f1",
        128,
        _about(
            "You are given a story and a question. Answer the question as concisely as you can, "
            "using a single phrase if possible. Do not provide any explanation.\n\nStory:",
            "Now, answer the question based on the story as concisely as you can, using a single "
            "phrase if possible. Do not provide any explanation.",
        ),
    ),
    "qasper": _Kind(
        "f1",
        128,
        _about(
            "You are given a scientific article and a question. Answer as concisely as you can, "
            "with a single phrase or sentence. If the article does not answer it, write "
            '"unanswerable"; to a yes/no question answer "yes", "no" or "unanswerable". Do not '
            "provide any explanation.\n\nArticle:",
            "Answer the question based on the above article as concisely as you can, with a single "
            'phrase or sentence. If it cannot be answered, write "unanswerable"; to a yes/no '
            'question answer "yes", "no" or "unanswerable". Do not provide any explanation.',
        ),
    ),
    "multifieldqa_en": _Kind(
        "f1",
        64,
        _about(
            "Read the following text and answer briefly.",
            f"Now, {_BRIEFLY} and do not output any other words.",
        ),
    ),
    "multifieldqa_zh": _Kind(
        "f1_chinese",
        64,
        "阅读以下文字并用中文简短回答:\n\n{context}\n\n现在请基于上面的文章回答下面的问题,"
        "只告诉我答案,不要输出任何其他字词。\n\n问题:{input}\n回答:",
    ),
    "hotpotqa": _Kind("f1", 32, _PASSAGES),
    "2wikimqa": _Kind("f1", 32, _PASSAGES),
    "musique": _Kind("f1", 32, _PASSAGES),
    "dureader": _Kind(
        "rouge_l_chinese",
        128,
        "请基于给定的文章回答下述问题。\n\n文章:{context}\n\n请基于上述文章回答下面的问题。\n\n"
        "问题:{input}\n回答:",
    ),
    "gov_report": _Kind(
        "rouge_l",
        512,
        "You are given a report by a government agency. Write a one-page summary of the report.\n\n"
        "Report:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:",
    ),
    "qmsum": _Kind(
        "rouge_l",
        512,
        "You are given a meeting transcript and a query with a question or instruction. Answer the "
        "query in one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based "
        "on the above meeting transcript in one or more sentences.\n\nQuery: {input}\nAnswer:",
    ),
    "multi_news": _Kind(
        "rouge_l",
        512,
        "You are given several news passages. Write a one-page summary of all news.\n\nNews:\n"
        "{context}\n\nNow, write a one-page summary of all the news.\n\nSummary:",
    ),
    "vcsum": _Kind(
        "rouge_l_chinese",
        512,
        "下面有一段会议记录,请你阅读后,写一段总结,总结会议的内容。\n会议记录:\n{context}\n\n会议总结:",
    ),
    "trec": _Kind(
        "classification",
        64,
        "Please determine the type of the question below. Here are some examples of questions.\n\n"
        "{context}\n{input}",
        chat=False,
        first_line=True,
    ),
    "lsht": _Kind(
        "classification",
        64,
        "请判断给定新闻的类别,下面是一些例子。\n\n{context}\n{input}",
        chat=False,
        first_line=True,
    ),
    "triviaqa": _Kind(
        "f1",
        32,
        "Answer the question based on the given passage. Only give me the answer and do not output "
        "any other words. The following are some examples.\n\n{context}\n\n{input}",
        chat=False,
        first_line=True,
    ),
    "samsum": _Kind(
        "rouge_l",
        128,
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n"
        "{context}\n\n{input}",
        chat=False,
        first_line=True,
    ),
    "passage_count": _Kind(
        "count",
        32,
        "Some of the paragraphs below may be duplicates. Determine how many unique paragraphs "
        "there are after removing duplicates: how many non-repeating paragraphs are there in "
        "total?\n\n{context}\n\nEnter the final count of unique paragraphs. The output should "
        "only contain this number, such as 1, 2, 3, and so on.\n\nThe final answer is: ",
    ),
    "passage_retrieval_en": _Kind(
        "retrieval",
        32,
        "Here are paragraphs from Wikipedia, and an abstract. Determine which paragraph the "
        "abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nEnter the "
        'number of the paragraph that the abstract is from, in the form "Paragraph 1", '
        '"Paragraph 2", etc.\n\nThe answer is: ',
    ),
    "passage_retrieval_zh": _Kind(
        "retrieval_chinese",
        32,
        "以下是若干段落文字,以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n"
        '下面是一个摘要\n\n{input}\n\n请输入摘要所属段落的编号,格式为"段落1","段落2"等。\n\n答案是:',
    ),
    "lcc": _Kind("edit_similarity", 64, _NEXT_LINE, chat=False),
    "repobench-p": _Kind("edit_similarity", 64, _NEXT_LINE, chat=False),
}

_METRICS: Mapping[str, Callable[[str, str], float]] = {
    "f1": metrics.f1,
    "f1_chinese": metrics.f1_chinese,
    "rouge_l": metrics.rouge_l,
    "rouge_l_chinese": metrics.rouge_l_chinese,
    "edit_similarity": metrics.edit_similarity,
    "count": metrics.number_share,
    "retrieval": metrics.retrieval,
    "retrieval_chinese": partial(metrics.retrieval, word="段落"),
}


def _templates(sources: Sources) -> dict[str, str]:
    """The prompts of the original where they lie beside the data.

    Raises:
        ValueError: the file is not what it should be.
    """
    if sources.data is None or not (path := sources.data / PROMPTS).is_file():
        return {}
    try:
        found = json.loads(path.read_text("utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise ValueError(f"{path}: expected an object of prompts by data set")
    return found


def _examples(name: str, kind: _Kind, file: str, sources: Sources) -> list[Example]:
    template = _templates(sources).get(name, kind.prompt)
    examples = []
    rows = list(read_rows(sources, f"{FOLDER}/{file}.jsonl", _FIELDS))
    for number, row in chosen(sources, file, rows):
        if not row["answers"]:
            raise ValueError(f"{file}.jsonl, row {number}: 'answers' is empty")
        if kind.metric == "classification" and not row["all_classes"]:
            raise ValueError(f"{file}.jsonl, row {number}: 'all_classes' is empty")
        # Not str.format: contexts hold braces.
        before, _, after = template.partition("{context}")
        parts = (part.replace("{input}", row["input"]) for part in (before, after))
        prompt = row["context"].join(parts)
        examples.append(
            Example(
                id=f"{number}",
                prompt=prompt,
                references=tuple(row["answers"]),
                max_new_tokens=kind.new_tokens,
                chat=kind.chat,
                more={"classes": row["all_classes"], "length": row["length"], "row": row["_id"]},
            )
        )
    return examples


def _score(kind: _Kind, example: Example, answer: str) -> Scores:
    if kind.first_line:
        answer = answer.lstrip("\n").split("\n")[0]
    if kind.metric == "classification":
        classes = example.more["classes"]
        score = lambda text, reference: metrics.classification(text, reference, classes)
    else:
        score = _METRICS[kind.metric]
    scores = {kind.metric: metrics.best(score, answer, example.references)}
    if kind.metric == "classification":
        compat = partial(metrics.classification, classes=example.more["classes"], compat=True)
        scores["classification_compat"] = metrics.best(compat, answer, example.references)
    return scores


_CATEGORIES = {
    "single_document": ("narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh"),
    "multi_document": ("hotpotqa", "2wikimqa", "musique", "dureader"),
    "summarisation": ("gov_report", "qmsum", "multi_news", "vcsum"),
    "few_shot": ("trec", "lsht", "triviaqa", "samsum"),
    "synthetic": ("passage_count", "passage_retrieval_en", "passage_retrieval_zh"),
    "code": ("lcc", "repobench-p"),
}


def _tasks(suffix: str, group: str, names: Sequence[str]) -> dict[str, Task]:
    category = {name: part for part, members in _CATEGORIES.items() for name in members}
    return {
        name + suffix: Task(
            name + suffix,
            (group, f"{group}/{category[name]}"),
            partial(_examples, name, _KINDS[name], name + suffix),
            partial(_score, _KINDS[name]),
        )
        for name in names
    }


# The 14 that SparDA's tables use.
SPARDA = (
    *("gov_report", "triviaqa", "narrativeqa", "qasper", "qmsum", "musique", "2wikimqa"),
    *("multifieldqa_en", "repobench-p", "hotpotqa", "trec", "passage_retrieval_en"),
    *("passage_count", "samsum"),
)
_EVEN = (
    *("qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec"),
    *("triviaqa", "samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p"),
)
TASKS = _tasks("", "longbench", list(_KINDS))
TASKS_E = _tasks("_e", "longbench_e", _EVEN)
