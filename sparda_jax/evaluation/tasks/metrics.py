"""Scores of one prediction against its references, 0 to 1 (spec/evaluation.md, sec. 1.8, 2.4, 3.4).

Where a score has several references, the caller takes the best (`best`).
"""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Score = Callable[[str, str], float]


def best(score: Score, prediction: str, references: Sequence[str]) -> float:
    """The highest score over the references; 0 without any."""
    return max((score(prediction, reference) for reference in references), default=0.0)


# Substrings


def match_all(prediction: str, references: Sequence[str]) -> float:
    """Share of the references that occur in the prediction, letters of either case (RULER)."""
    text = prediction.lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def match_any(prediction: str, references: Sequence[str]) -> float:
    """Whether any reference occurs in the prediction, likewise."""
    text = prediction.lower()
    return float(any(reference.lower() in text for reference in references))


# Words


def normalise(text: str) -> str:
    """Lower case, no ASCII punctuation, no articles, single blanks."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(prediction: str, reference: str) -> float:
    """Whether both are the same once normalised."""
    return float(normalise(prediction) == normalise(reference))


def substring_match(prediction: str, reference: str) -> float:
    """Whether the normalised reference occurs in the normalised prediction."""
    return float(normalise(reference) in normalise(prediction))


def _overlap_f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """F1 of two bags of words."""
    common = sum((Counter(prediction) & Counter(reference)).values())
    if not common:
        return 0.0
    return 2 * common / (len(prediction) + len(reference))


def f1(prediction: str, reference: str) -> float:
    """F1 of the normalised words as bags."""
    return _overlap_f1(normalise(prediction).split(), normalise(reference).split())


def f1_yes_no(prediction: str, reference: str) -> float:
    """`f1`, but 0 where one side is yes, no or noanswer and the other is not the same (HELMET)."""
    ours, theirs = normalise(prediction), normalise(reference)
    if ours != theirs and {ours, theirs} & {"yes", "no", "noanswer"}:
        return 0.0
    return f1(prediction, reference)


def _chinese_words(text: str) -> list[str]:
    try:
        import jieba
    except ImportError as error:
        raise ImportError(
            "Chinese tasks need the package jieba: install the extra 'eval'"
        ) from error
    return list(jieba.cut(text, cut_all=False))


def f1_chinese(prediction: str, reference: str) -> float:
    """F1 of the words that jieba finds, without punctuation and signs."""

    def words(text: str) -> list[str]:
        kept = lambda c: not c.isspace() and unicodedata.category(c)[0] not in "PS"
        cleaned = ("".join(filter(kept, word.lower())) for word in _chinese_words(text))
        return [word for word in cleaned if word]

    return _overlap_f1(words(prediction), words(reference))


# Longest common subsequences


def _common_subsequence(first: Sequence[Item], second: Sequence[Item]) -> list[Item]:
    """One longest common subsequence; of several the one that the `rouge` package rebuilds."""
    lengths = [[0] * (len(second) + 1)]
    for item in first:
        above, row = lengths[-1], [0]
        for j, other in enumerate(second):
            row.append(above[j] + 1 if item == other else max(above[j + 1], row[j]))
        lengths.append(row)
    found, i, j = [], len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            found.append(first[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found[::-1]


def _sentences(text: str) -> list[list[str]]:
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def rouge_l(prediction: str, reference: str) -> float:
    """ROUGE-L as `rouge` 1.0.1 computes it: over distinct words, sentence by sentence.

        c = words in a longest common subsequence of any pair of sentences, each counted once
        r = c / distinct words of the reference, p likewise, F = 2pr / (p + r + 1e-8)

    So "a a a a" against "a a" scores 1. The package itself recurses as deep as the texts are long,
    and fails on long ones, which its users count as 0.
    """
    ours, theirs = _sentences(prediction), _sentences(reference)
    if not ours or not theirs:
        return 0.0
    common = {w for a in theirs for b in ours for w in _common_subsequence(a, b)}
    sizes = [len({word for sentence in side for word in sentence}) for side in (ours, theirs)]
    precision, recall = (len(common) / size for size in sizes)
    return 2 * precision * recall / (precision + recall + 1e-8)


def rouge_l_chinese(prediction: str, reference: str) -> float:
    """`rouge_l` of the words that jieba finds."""
    return rouge_l(*(" ".join(_chinese_words(text)) for text in (prediction, reference)))


def rouge_scores(prediction: str, references: Sequence[str], kind: str) -> dict[str, float]:
    """F1 and recall of `rouge-score`'s rougeL or rougeLsum with its stemmer, best over references.

    Another definition than `rouge_l`: the two must not be mixed.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise ImportError("HELMET's ROUGE needs rouge-score: install the extra 'eval'") from error
    scorer = RougeScorer([kind], use_stemmer=True)
    found = [
        scorer.score(target=reference, prediction=prediction)[kind] for reference in references
    ]
    return {
        "f1": max((score.fmeasure for score in found), default=0.0),
        "recall": max((score.recall for score in found), default=0.0),
    }


def edit_similarity(prediction: str, reference: str) -> float:
    """Indel similarity in whole per cents of the first line that looks like code (LongBench).

    2 c / (len(prediction) + len(reference)) with c the longest common subsequence of characters;
    0 where nothing is left, though both may then be equal.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((x for x in lines if "`" not in x and "#" not in x and "//" not in x), "")
    if not line or not reference:
        return 0.0
    common = len(_common_subsequence(line, reference))
    return round(100 * 2 * common / (len(line) + len(reference))) / 100


# Classes, numbers, rankings


def classification(
    prediction: str, reference: str, classes: Sequence[str], *, compat: bool = False
) -> float:
    """1 / (classes named in the prediction) if the right one is among them, else 0.

    A class that is part of the right one's name does not count as named.

    Args:
        prediction: of the model.
        reference: the right class.
        classes: all of them.
        compat: as published: the class behind one that was dropped is not looked at.
    """
    named = [name for name in classes if name in prediction]
    drop = [name in reference and name != reference for name in named]
    if compat:
        for i in range(1, len(drop)):
            drop[i] = drop[i] and not drop[i - 1]
    kept = [name for name, dropped in zip(named, drop, strict=True) if not dropped]
    return 1 / len(kept) if reference in kept else 0.0


def number_share(prediction: str, reference: str) -> float:
    """Share of the numbers in the prediction that are the reference's; 0 without any."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(reference.strip()) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, reference: str, word: str = "Paragraph ") -> float:
    """`number_share` of the number that follows `word` in the reference.

    Raises:
        ValueError: the reference holds none.
    """
    found = re.search(re.escape(word) + r"(\d+)", reference)
    if found is None:
        raise ValueError(f"the reference {reference!r} names no {word.strip()}")
    return number_share(prediction, found[1])


def parse_ranking(prediction: str) -> list[str]:
    """Ids of the longest chain "3 > 1 > 2"; an id that comes again is dropped."""
    text = re.sub(r"\[|\]|:|id", "", prediction.lower())
    chains = re.findall(r"\d+(?:\s*>\s*\d+)*", text)
    longest = max(chains, key=lambda chain: chain.count(">"), default="")
    return list(dict.fromkeys(re.findall(r"\d+", longest)))


def ndcg(ranking: Sequence[str], labels: Mapping[str, float], at: int = 10) -> float:
    """Normalised discounted cumulative gain: sum of label / log2(rank + 1) over that of the ideal.

    Negative labels count as 0; 0 where no label is positive.
    """
    gains = [max(0.0, labels.get(name, 0.0)) for name in ranking[:at]]
    ideal = sorted((max(0.0, label) for label in labels.values()), reverse=True)[:at]
    total = lambda values: sum(value / math.log2(rank + 2) for rank, value in enumerate(values))
    return total(gains) / total(ideal) if total(ideal) else 0.0


def reciprocal_rank(ranking: Sequence[str], labels: Mapping[str, float]) -> float:
    """1 / rank of the first id with a positive label."""
    ranks = (1 / rank for rank, name in enumerate(ranking, 1) if labels.get(name, 0) > 0)
    return next(ranks, 0.0)


def recall_at(ranking: Sequence[str], labels: Mapping[str, float], at: int) -> float:
    """Share of the ids with a positive label among the first `at`."""
    right = {name for name, label in labels.items() if label > 0}
    return len(right & set(ranking[:at])) / len(right) if right else 0.0
