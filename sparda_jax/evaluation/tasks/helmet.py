"""HELMET-style tasks from local files, with the metrics that need no judge (spec sec. 3).

The file names follow the published layout below `helmet/`. What the original scores with a judge or
an entailment model has a substitute here, under another name: it is in no mean.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from functools import partial

from sparda_jax.evaluation.tasks import helmet_rows as rows
from sparda_jax.evaluation.tasks import metrics
from sparda_jax.evaluation.tasks.base import Example, Scores, Sources, Task, encode
from sparda_jax.evaluation.tasks.helmet_rows import Question

# By length: json_kv pairs, KILT passages, MS MARCO documents, ALCE documents, shots of the five.
SIZES: dict[int, tuple[int, int, int, int, tuple[int, int, int, int, int]]] = {
    8192: (105, 50, 50, 30, (400, 400, 360, 440, 510)),
    16384: (220, 105, 130, 75, (800, 800, 720, 880, 1020)),
    32768: (440, 220, 285, 165, (1600, 1600, 1450, 1750, 2040)),
    65536: (900, 440, 600, 345, (3300, 3200, 2900, 3525, 4080)),
    131072: (1800, 1000, 1000, 700, (6600, 6400, 5900, 7050, 8296)),
}
_LABELS = {"trec_coarse": 6, "trec_fine": 50, "banking77": 77, "clinic150": 151, "nlu": 68}


@dataclasses.dataclass(frozen=True)
class _Dataset:
    """A data set of a category.

    Attributes:
        category: "recall", "rag", ...
        new_tokens: of the answer.
        read: its questions.
        score: of the raw text and of the parsed one, see `_best`.
        chat: as published.
        line: the answer ends at the first line's end.
        substitute: its score stands for one that needs a judge.
    """

    category: str
    new_tokens: int
    read: Callable[[Sources], list[Question]]
    score: Callable[[Example, str], Scores]
    chat: bool = False
    line: bool = False
    substitute: bool = False


def _size(sources: Sources, column: int) -> int:
    return SIZES[_checked(sources.length)][column]  # type: ignore[return-value]


def _checked(length: int) -> int:
    if length not in SIZES:
        known = ", ".join(map(str, SIZES))
        raise ValueError(f"HELMET's files are made for {known} tokens, not {length}")
    return length


def _parsed(text: str, lead_in: str) -> str:
    """What stands behind the lead-in on its line, else the first line."""
    found = re.search(re.escape(lead_in) + r"[ \t]*([^\n]+)", text, re.IGNORECASE)
    line = found[1] if found else next((x for x in text.splitlines() if x.strip()), "")
    return re.sub(re.escape(lead_in), "", line, flags=re.IGNORECASE).strip()


def _texts(example: Example, text: str) -> tuple[str, str]:
    """The raw text, its lead-in before it where the prompt held that, and the parsed one."""
    lead_in = example.more["lead_in"]
    raw = text if example.chat else f"{lead_in} {text}"
    return text, _parsed(raw, lead_in)


def _best(names: dict[str, Callable[[str, str], float]], example: Example, text: str) -> Scores:
    texts = _texts(example, text)
    return {
        name: max(metrics.best(score, each, example.references) for each in texts)
        for name, score in names.items()
    }


_short = partial(
    _best,
    {
        "substring_match": metrics.substring_match,
        "exact_match": metrics.exact_match,
        "f1": metrics.f1_yes_no,
    },
)


def _recall(example: Example, text: str) -> Scores:
    return {"recall": max(metrics.match_all(t, example.references) for t in _texts(example, text))}


def _label(example: Example, text: str) -> Scores:
    """Of the parsed text alone."""
    parsed = _texts(example, text)[1]
    return {"exact_match": metrics.best(metrics.exact_match, parsed, example.references)}


def _rank(example: Example, text: str) -> Scores:
    labels = example.more["labels"]
    rankings = [metrics.parse_ranking(each) for each in _texts(example, text)]
    scores = {
        "ndcg@10": lambda ranking: metrics.ndcg(ranking, labels),
        "mrr": lambda ranking: metrics.reciprocal_rank(ranking, labels),
        "recall@10": lambda ranking: metrics.recall_at(ranking, labels, 10),
    }
    return {name: max(map(score, rankings)) for name, score in scores.items()}


def _choice(example: Example, text: str) -> Scores:
    """The letter, or the letter with its option's text."""
    options = dict(zip("ABCD", example.more["options"], strict=True))
    right = [k for k, v in options.items() if v in example.references or k in example.references]
    if len(right) != 1:
        raise ValueError(f"the answer {example.references} is not one of the four options")
    full = f"{right[0]}. {options[right[0]]}".lower()
    hit = lambda each: metrics.exact_match(each, right[0]) or float(full in each.lower())
    return {"exact_match": max(hit(each) for each in _texts(example, text))}


def _rouge(kind: str, example: Example, text: str) -> Scores:
    found = [metrics.rouge_scores(t, example.references, kind) for t in _texts(example, text)]
    scores = {f"{kind}_{part}": max(f[part] for f in found) for part in ("f1", "recall")}
    points = example.more.get("keypoints")
    if points:
        words = set(metrics.normalise(text).split())
        held = lambda point: [w in words for w in metrics.normalise(point).split() if len(w) > 3]
        covered = [2 * sum(w) >= len(w) for point in points if (w := held(point))]
        scores["keypoint_word_recall"] = sum(covered) / max(len(covered), 1)
    return scores


def plain(text: str) -> str:
    """A cited answer on one line, without its citations."""
    return re.sub(r"\s*\[\d+\]", "", text.replace("\n", " ")).strip()


def _citations(example: Example, text: str, golds: Sequence[str]) -> Scores:
    """Substitutes for citation recall and precision, by string."""
    docs = example.more["docs"]
    sentences = [s for s in re.split(r"(?<=[.!?])\s+", text.strip()) if len(s) >= 5]
    cited = [[int(n) for n in re.findall(r"\[(\d+)\]", sentence)] for sentence in sentences]
    valid = [[n for n in numbers if 1 <= n <= len(docs)] for numbers in cited]
    total, good = sum(map(len, cited)), sum(map(len, valid))
    supported = sum(
        any(
            metrics.substring_match(docs[n - 1], gold) and metrics.substring_match(sentence, gold)
            for gold in golds
        )
        for sentence, numbers in zip(sentences, valid, strict=True)
        for n in numbers
    )
    return {
        "cite_coverage": sum(map(bool, valid)) / max(len(sentences), 1),
        "cite_valid": good / max(total, 1),
        "cite_string_support": supported / max(good, 1),
    }


def _asqa(example: Example, text: str) -> Scores:
    answers = example.more["answers"]
    said = [float(any(metrics.substring_match(plain(text), a) for a in some)) for some in answers]
    golds = [a for some in answers for a in some]
    return {"str_em": sum(said) / len(said)} | _citations(example, text, golds)


def _qampari(example: Example, text: str) -> Scores:
    answers = example.more["answers"]
    said = {metrics.normalise(part) for part in plain(text).rstrip(".").split(",")}
    matched = sum(any(metrics.normalise(a) in said for a in aliases) for aliases in answers)
    top = min(5, matched) / min(5, len(answers))
    golds = [a for aliases in answers for a in aliases]
    return {"recall_top5": top} | _citations(example, text, golds)


def _kilt(stem: str, train: str, kind: int, sources: Sources) -> list[Question]:
    size = _size(sources, 1)
    popular = stem.startswith("popqa")
    return rows.kilt(
        sources, f"kilt/{stem}_k{size}_dep{kind}.jsonl", f"kilt/{train}.jsonl", popular=popular
    )


def _kilt_set(name: str, depths: int = 6) -> _Dataset:
    train = f"{name}-train-multikilt_1000_k3_dep{depths}"
    read = partial(_kilt, f"{name}-dev-multikilt_1000", train, depths)
    return _Dataset("rag", 20, read, _short, line=True)


def _icl(position: int, name: str, sources: Sources) -> list[Question]:
    shots = SIZES[_checked(sources.length)][4][position]
    return rows.in_context(sources, name, shots, _LABELS[name])


def _long(kind: str, less: int, sources: Sources) -> list[Question]:
    return rows.long_document(sources, f"{kind}.jsonl", kind, sources.length - less)


def _needle_set(name: str, new_tokens: int) -> _Dataset:
    read = lambda s: rows.needles(s, f"ruler/{name}/validation_{s.length}.jsonl")
    return _Dataset("recall", new_tokens, read, _recall)


def _alce_set(name: str, score: Callable[[Example, str], Scores]) -> _Dataset:
    read = lambda s: rows.alce(
        s, f"alce/{name}_eval_gtr_top2000.json", f"alce/{name}_default.json", _size(s, 3)
    )
    return _Dataset("cite", 300, read, score, chat=True)


_DATASETS: dict[str, _Dataset] = {
    "helmet_niah_mk_2": _needle_set("niah_multikey_2", 50),
    "helmet_niah_mk_3": _needle_set("niah_multikey_3", 100),
    "helmet_niah_mv": _needle_set("niah_multivalue", 50),
    "json_kv": _Dataset(
        "recall", 100, lambda s: rows.json_kv(s, f"json_kv/test_k{_size(s, 0)}_dep6.jsonl"), _short
    ),
    "kilt_nq": _kilt_set("nq"),
    "kilt_triviaqa": _kilt_set("triviaqa"),
    "kilt_hotpotqa": _kilt_set("hotpotqa", 3),
    "kilt_popqa": _Dataset(
        "rag",
        20,
        partial(_kilt, "popqa_test_1000", "popqa_test_1000_k3_dep6", 6),
        _short,
        line=True,
    ),
    "msmarco_rerank": _Dataset(
        "rerank",
        200,
        lambda s: rows.ms_marco(
            s,
            f"msmarco/test_reranking_data_k{_size(s, 2)}_dep3.jsonl",
            "msmarco/test_reranking_data_k10_dep3.jsonl",
        ),
        _rank,
        line=True,
    ),
    "alce_asqa": _alce_set("asqa", _asqa),
    "alce_qampari": _alce_set("qampari", _qampari),
    **{
        f"icl_{name}": _Dataset("icl", 20, partial(_icl, i, name), _label, line=True)
        for i, name in enumerate(_LABELS)
    },
    "narrativeqa_f1": _Dataset(
        "longqa",
        100,
        partial(_long, "narrativeqa", 300),
        partial(_best, {"f1": metrics.f1_yes_no, "substring_match": metrics.substring_match}),
        chat=True,
        substitute=True,
    ),
    "infbench_qa": _Dataset(
        "longqa", 10, partial(_long, "infbench_qa", 210), partial(_rouge, "rougeL"), chat=True
    ),
    "infbench_choice": _Dataset(
        "longqa", 10, partial(_long, "infbench_choice", 210), _choice, chat=True
    ),
    "infbench_sum": _Dataset(
        "summ",
        1200,
        partial(_long, "infbench_sum", 1400),
        partial(_rouge, "rougeLsum"),
        chat=True,
        substitute=True,
    ),
    "multi_lexsum": _Dataset(
        "summ",
        400,
        partial(_long, "multi_lexsum", 700),
        partial(_rouge, "rougeLsum"),
        chat=True,
        substitute=True,
    ),
}


def _examples(dataset: _Dataset, sources: Sources) -> list[Example]:
    questions = dataset.read(sources)
    return [_example(dataset, i, q, sources) for i, q in enumerate(questions)]


def _example(dataset: _Dataset, index: int, question: Question, sources: Sources) -> Example:
    """With the context cut at its end by what is too much, as published; counted in `more`."""
    chat = dataset.chat and sources.chat

    def build(context: str, cut: int) -> Example:
        prompt = question.before + context + question.after + "\n"
        return Example(
            id=str(index),
            prompt=prompt if chat else prompt + question.lead_in,
            references=question.references,
            max_new_tokens=dataset.new_tokens,
            chat=chat,
            stop=("\n",) if dataset.line else (),
            cluster=question.cluster,
            more={**question.more, "lead_in": question.lead_in, "cut": cut},
        )

    example, cut = build(question.context, 0), 0
    room = sources.length - dataset.new_tokens
    ids = sources.tokenizer.encode(question.context, add_special=False)
    while (excess := len(encode(example, sources.tokenizer, chat=chat)) - room) > 0:
        cut += excess
        if cut >= len(ids):
            raise ValueError(f"{sources.length} tokens leave no room for the context")
        example = build(sources.tokenizer.decode(ids[:-cut]), cut)
    return example


TASKS = {
    name: Task(
        name,
        ("helmet_substitutes",) if dataset.substitute else (f"helmet/{dataset.category}",),
        partial(_examples, dataset),
        dataset.score,
        sized=True,
    )
    for name, dataset in _DATASETS.items()
}
