"""Where the final answer stands, and what equals it."""

import json

import pytest

from sparda_jax.evaluation.tasks import reasoning
from sparda_jax.evaluation.tasks.base import Sources


@pytest.mark.parametrize(
    "text,integer,answer,where",
    [
        (r"So \boxed{3} and then \boxed{5}.", True, "5", "box"),
        (r"\boxed{\frac{1}{2}}", False, r"\frac{1}{2}", "box"),
        (r"<think>\boxed{1}</think> I say \boxed{2}", True, "2", "box"),
        (r"<think>\boxed{1}</think> I say nothing", True, "1", "box_in_thoughts"),
        (r"It is \boxed{\frac{1", False, None, "none"),
        (r"\boxed{7} but no, \boxed{8", True, "7", "box"),
        (r"\fbox{9}", True, "9", "box"),
        (r"\fbox{9} \boxed{8}", True, "8", "box"),
        ("Final answer: 12.", False, "12", "line"),
        ("There are 3 and 27 of them", True, "27", "last_integer"),
        ("Between 1.5 and x2", True, None, "none"),
        ("First\n\nx = 4\n", False, "x = 4", "last_line"),
        ("<think>no end 5", True, None, "none"),
        ("", False, None, "none"),
    ],
)
def test_final_answer(text, integer, answer, where):
    assert reasoning.final_answer(text, integer=integer) == (answer, where)


def test_equality():
    assert reasoning.same_integer("027", "27") and not reasoning.same_integer("27.0", "27")
    assert reasoning.exact(r"{ \frac12\, }", r"$\frac12$")
    assert not reasoning.exact("1/2", "0.5")


@pytest.mark.parametrize(
    "answer,reference,equal",
    [
        ("1/2", "0.5", True),
        ("10,080", "10080", True),
        ("(x+1)^2", "x^2+2x+1", True),
        (r"\text{Evelyn}", "Evelyn", True),
        ("(-2,7)", "[-2,7]", False),
        ("2516", "2516_8", False),  # the library says equal
        ("2516_8", "2516_8", True),
        ("", "", False),
    ],
)
def test_equivalence(answer, reference, equal):
    pytest.importorskip("math_verify", reason="the extra 'eval' is not installed")
    assert reasoning.equivalent(answer, reference) == equal


def test_several_samples_of_a_problem():
    assert reasoning.pass_at(4, 1, 1) == 0.25
    assert reasoning.pass_at(4, 1, 4) == 1
    assert reasoning.pass_at(16, 4, 2) == pytest.approx(1 - (12 * 11) / (16 * 15))
    with pytest.raises(ValueError, match="pass@5 of 4"):
        reasoning.pass_at(4, 1, 5)
    assert reasoning.majority(["1", None, "2", "2"]) == "2" and reasoning.majority([None]) is None


def test_problems_from_a_file(tmp_path):
    file = tmp_path / "math" / "aime24.jsonl"
    file.parent.mkdir()
    rows = [{"problem": "1+1?", "answer": 2}, {"question": "2+2?", "answer": "4"}]
    file.write_text("\n".join(map(json.dumps, rows)))
    sources = Sources(None, 0, None, 42, data=tmp_path)
    task = reasoning.TASKS["aime24"]
    first, second = task.examples(sources)
    assert first.references == ("2",) and "1+1?" in first.prompt and "2+2?" in second.prompt
    assert "integer" in first.prompt and "\\boxed{}" in first.prompt
    assert task.score(first, r"\boxed{002}") == {"accuracy": 1, "answered": 1, "boxed": 1}
    assert task.score(first, r"\boxed{2") == {"accuracy": 0, "answered": 0, "boxed": 0}
    for bad, message in [
        ({"problem": "?", "answer": ""}, "row 1: 'answer' is empty"),
        ({"problem": "?", "answer": "x"}, "row 1: answer 'x', expected 0 to 999"),
        ({"problem": "?"}, "row 1: no field 'answer'"),
        ({"answer": "1"}, "row 1: no field 'problem' or 'question'"),
    ]:
        file.write_text(json.dumps(bad))
        with pytest.raises(ValueError, match=message):
            task.examples(sources)
