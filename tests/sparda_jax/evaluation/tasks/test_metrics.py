"""Scores of hand-made cases; some values come from the packages that our own code stands for."""

import math

import pytest

from sparda_jax.evaluation.tasks import metrics


@pytest.mark.parametrize(
    "prediction,references,every,some",
    [
        ("The values are 12 and 34.", ["12", "34"], 1, 1),
        ("Only 12.", ["12", "34"], 0.5, 1),
        ("", ["12"], 0, 0),
        ("ABC-def", ["abc-DEF"], 1, 1),
        ("a 712345 b", ["12"], 1, 1),  # also inside a longer number
    ],
)
def test_string_match(prediction, references, every, some):
    assert metrics.match_all(prediction, references) == every
    assert metrics.match_any(prediction, references) == some


@pytest.mark.parametrize(
    "prediction,reference,f1,helmet",
    [
        ("The cat sat.", "a cat sat", 1, 1),
        ("cat", "the cat sat", 2 * 1 * 0.5 / 1.5, 2 * 1 * 0.5 / 1.5),
        ("cat cat", "cat", 2 * 0.5 * 1 / 1.5, 2 * 0.5 * 1 / 1.5),
        ("", "cat", 0, 0),
        ("yes it is", "yes", 0.5, 0),
        ("the", "a", 0, 0),
        ("Émile Zola", "émile zola!", 1, 1),
    ],
)
def test_f1(prediction, reference, f1, helmet):
    assert metrics.f1(prediction, reference) == pytest.approx(f1)
    assert metrics.f1_yes_no(prediction, reference) == pytest.approx(helmet)


def test_normalised_equality_and_the_best_of_several():
    assert metrics.normalise("  The  U.S.A., an Idea ") == "usa idea"
    assert metrics.exact_match("An answer!", "answer") == 1
    assert metrics.substring_match("It is the red fox, surely.", "red fox") == 1
    assert metrics.substring_match("fox", "red fox") == 0
    assert metrics.best(metrics.exact_match, "two", ["one", "two"]) == 1
    assert metrics.best(metrics.exact_match, "two", []) == 0


@pytest.mark.parametrize(
    "prediction,reference,value",
    [  # by rouge 1.0.1
        ("a a a a", "a a", 1.0),
        ("", "a b", 0.0),
        ("...", "a b", 0.0),
        ("the cat sat on the mat", "the cat lay on a mat", 0.727272722314),
        ("a b c. d e f", "d e. c b a", 0.545454540661),
        ("b a. a b", "a b c a", 0.799999995200),
    ],
)
def test_rouge_l(prediction, reference, value):
    assert metrics.rouge_l(prediction, reference) == pytest.approx(value, abs=1e-8)


def test_rouge_l_of_a_long_sentence():
    """The package itself recurses here and fails, which its users count as 0."""
    text = " ".join(f"w{i}" for i in range(900))
    assert metrics.rouge_l(text, text) == pytest.approx(1)


@pytest.mark.parametrize(
    "prediction,reference,value",
    [  # by rapidfuzz 3.14.6
        ("x = 1", "x = 1", 1),
        ("\n\nx = f(a)\nrest", "x = f(b)", 0.88),
        ("# note\n// note\n`code`\ny = 2", "y = 2", 1),
        ("# only a note", "y = 2", 0),
        ("", "", 0),
    ],
)
def test_edit_similarity(prediction, reference, value):
    assert metrics.edit_similarity(prediction, reference) == pytest.approx(value)


def test_classes_that_contain_each_other():
    classes = ["City", "State", "State capital", "Other city"]
    score = metrics.classification
    assert score("It is a State capital", "State capital", classes) == 1
    assert score("It is a State capital", "State", classes) == 0.5
    assert score("City", "State", classes) == 0
    assert score("City or State", "State", classes) == 0.5
    # As published the second of two names to drop is looked over.
    nested = ["a", "ab", "abc"]
    assert score("abc", "abc", nested) == 1
    assert score("abc", "abc", nested, compat=True) == 0.5


@pytest.mark.parametrize(
    "prediction,value",
    [("Paragraph 3", 1), ("3 or 4", 0.5), ("13", 0), ("none", 0), ("3 3 1", 2 / 3)],
)
def test_numbers(prediction, value):
    assert metrics.retrieval(prediction, "Paragraph 3") == pytest.approx(value)
    assert metrics.retrieval(prediction, "段落3", "段落") == pytest.approx(value)
    assert metrics.number_share(prediction, "3") == pytest.approx(value)
    with pytest.raises(ValueError, match="names no Paragraph"):
        metrics.retrieval(prediction, "three")


def test_rankings():
    assert metrics.parse_ranking("Ranking: [ID: 3] > [id: 1] > 3 > 2") == ["3", "1", "2"]
    assert metrics.parse_ranking("7 > 8 and then 1 > 2 > 3") == ["1", "2", "3"]
    assert metrics.parse_ranking("none") == []
    labels = {"1": 3, "2": 1, "3": 0, "4": -1}
    ideal = 3 + 1 / math.log2(3)
    assert metrics.ndcg(["1", "2", "3"], labels) == pytest.approx(1)
    assert metrics.ndcg(["3", "1"], labels) == pytest.approx(3 / math.log2(3) / ideal)
    assert metrics.ndcg(["4", "9"], labels) == 0
    assert metrics.ndcg(["3"], {"3": 0}) == 0
    assert metrics.reciprocal_rank(["3", "2"], labels) == 0.5
    assert metrics.recall_at(["3", "2", "1"], labels, 2) == 0.5


def test_chinese():
    pytest.importorskip("jieba", reason="the extra 'eval' is not installed")
    assert metrics.f1_chinese("今天天气很好。", "今天天气很好") == 1
    assert metrics.f1_chinese("今天天气很好", "明天天气很好") == pytest.approx(4 / 7)
    assert metrics.rouge_l_chinese("今天天气很好", "今天天气很好") == pytest.approx(1)


def test_stemmed_rouge():
    pytest.importorskip("rouge_score", reason="the extra 'eval' is not installed")
    found = metrics.rouge_scores("The cats ran home.", ["A cat runs home", "nothing"], "rougeL")
    assert found == {"f1": 0.5, "recall": 0.5}
