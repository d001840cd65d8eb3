"""RULER's samples hold what their references say, fit, fill the length and repeat by seed."""

import json
import re
import uuid

import pytest

from sparda_jax.evaluation.tasks import ruler, ruler_qa
from sparda_jax.evaluation.tasks.base import Sources, encode

TEXT = " ".join(
    f"Sentence number {i} speaks of {word}, at some length and to no end."
    for i, word in enumerate(["rivers", "stones", "a long road", "winter"] * 60)
)
LENGTH = 1000


@pytest.fixture(scope="module")
def make(default_tokenizer):
    def examples(name, seed=42, samples=2, length=LENGTH):
        sources = Sources(default_tokenizer, length, samples, seed, [TEXT])
        return (ruler.TASKS | ruler_qa.TASKS)[name].examples(sources)

    return examples


def test_there_are_eleven():
    assert len(ruler.TASKS) == 11
    assert {task.groups[0] for task in ruler.TASKS.values()} == {"ruler"}


@pytest.mark.parametrize("name", ruler.TASKS)
def test_samples(make, default_tokenizer, name):
    drawn = make(name)
    assert drawn == make(name) and drawn[0].prompt != drawn[1].prompt
    new = {"vt": 30, "cwe": 120, "fwe": 50}.get(name, 128)
    for example in drawn:
        tokens = len(encode(example, default_tokenizer, chat=True)) + new
        assert 0.8 * LENGTH <= tokens <= LENGTH and example.more["tokens"] == tokens
        assert example.max_new_tokens == new
        assert len(set(example.references)) == len(example.references)
        score = ruler.TASKS[name].score
        assert score(example, "It is " + ", ".join(example.references)) == {"string_match": 1}
        assert score(example, "") == {"string_match": 0}
        CHECKS[name.rstrip("_123")](example)
    assert make(name, seed=1)[0].prompt != drawn[0].prompt


def needle(keys, asked, values, example):
    lines = re.findall(r"One of the special magic (\w+) for (\S+) is: (\S+)\.", example.prompt)
    hidden = {value for _, _, value in lines}
    assert len(lines) == keys * values and set(example.references) <= hidden
    right = {key for _, key, value in lines if value in example.references}
    assert len(right) == asked and all(key in example.prefix for key in right)
    one = len(example.references) == 1
    assert example.prefix.endswith(" is" if one else " are")
    assert ("A special magic" if one else "Some special magic") in example.prompt
    assert example.more["depths"] == sorted(example.more["depths"])
    assert 0 <= example.more["answer_at"] <= 1


def distractors(example):
    lines = re.findall(
        r"^One of the special magic \w+ for (\S+) is: (\S+)\.$", example.prompt, re.M
    )
    assert len(lines) >= 7
    assert [k for k, v in lines if v in example.references] == [
        example.prefix.split(" for ")[1].split()[0]
    ]
    if "uuid" in example.prefix:
        assert all(uuid.UUID(text).version == 4 for pair in lines for text in pair)


def multikey(example):
    if "Sentence number" in example.prompt:
        needle(4, 1, 1, example)
    else:
        distractors(example)


def chain(example):
    solved, _, asked = example.prompt.partition("they are: ")
    value = re.search(r"the value (\d+)", example.prefix)[1]
    assert solved.count("VAR ") == asked.count("VAR ") == 9
    first, *rest = example.references
    assert f"VAR {first} = {value}\n" in asked
    for before, name in zip(example.references, rest, strict=False):
        assert f"VAR {name} = VAR {before}\n" in asked
        assert asked.index(f"VAR {before} =") < asked.index(f"VAR {name} =")


def common(example):
    asked = example.prompt.rsplit("Below is a numbered list", 1)[1]
    words = re.findall(r"\d+\. (\S+)", asked)
    counts = {word: words.count(word) for word in words}
    assert {word for word, n in counts.items() if n == 6} == set(example.references)
    assert {n for word, n in counts.items() if word not in example.references} == {1}
    assert "1. " in example.prompt.split("are:")[1]  # the worked example is answered


def frequent(example):
    words = example.prompt.split("\nQuestion")[0].split()
    counts = sorted({w: words.count(w) for w in words if len(w) == 6 and w.islower()}.items(),
                    key=lambda item: -item[1])  # fmt: skip
    assert {word for word, _ in counts[:3]} == set(example.references)
    assert words.count("...") > counts[0][1]


CHECKS = {
    "niah_single": lambda example: needle(1, 1, 1, example),
    "niah_multikey": multikey,
    "niah_multivalue": lambda example: needle(1, 1, 4, example),
    "niah_multiquery": lambda example: needle(4, 4, 1, example),
    "vt": chain,
    "cwe": common,
    "fwe": frequent,
}


def test_no_room_no_text_no_count(make, default_tokenizer):
    with pytest.raises(ValueError, match="200 tokens leave no room, the shortest sample has"):
        make("niah_multivalue", length=200)
    with pytest.raises(ValueError, match="no text was given"):
        ruler.TASKS["niah_single_2"].examples(Sources(default_tokenizer, LENGTH, 1, 42))
    with pytest.raises(ValueError, match="made, not read"):
        make("vt", samples=None)


def test_questions_over_the_users_documents(default_tokenizer, tmp_path):
    paragraphs = [f"Paragraph about the town {i}. " * 8 for i in range(12)]
    qas = [{"question": "Which town?", "is_impossible": False, "answers": [{"text": "town 3"}]}]
    squad = [
        {"paragraphs": [{"context": text, "qas": qas if i == 3 else []}]}
        for i, text in enumerate(paragraphs)
    ]
    (tmp_path / "ruler").mkdir()
    file = tmp_path / "ruler" / "squad.json"
    sources = Sources(default_tokenizer, 500, 1, 42, data=tmp_path)
    task = ruler_qa.TASKS["qa_1"]
    with pytest.raises(FileNotFoundError, match=r"squad.json: the published file"):
        task.examples(sources)
    file.write_text(json.dumps({"data": [{"paragraphs": [{}]}]}))
    with pytest.raises(ValueError, match=r"not in SQuAD's format: KeyError\('context'\)"):
        task.examples(sources)
    file.write_text(json.dumps({"data": squad}))
    (example,) = task.examples(sources)
    assert example.references == ("town 3",) and example.more["tokens"] <= 500
    assert "the town 3." in example.prompt and 2 < example.more["documents"] < 12
    (whole,) = task.examples(Sources(default_tokenizer, 4000, 1, 42, data=tmp_path))
    assert whole.more["documents"] == 12  # and no repetition of the corpus
    assert task.score(example, "Town 3, I think") == {"string_match": 1}
    with pytest.raises(ValueError, match="2 samples of 1 questions"):
        task.examples(Sources(default_tokenizer, 500, 2, 42, data=tmp_path))


def test_hotpotqa(default_tokenizer, tmp_path):
    """The ten paragraphs of a question are all kept; others fill up."""

    def row(first):
        context = [[f"Title {i}", [f"Number {i} is a town.", " It lies on a river."]]
                   for i in range(first, first + 10)]  # fmt: skip
        return {"question": f"Which is number {first}?", "answer": f"town {first}",
                "context": context}  # fmt: skip

    (tmp_path / "ruler").mkdir()
    file = tmp_path / "ruler" / "hotpotqa.json"
    task = ruler_qa.TASKS["qa_2"]
    file.write_text(json.dumps([row(0), row(5), row(15)]))
    examples = task.examples(Sources(default_tokenizer, 2000, 3, 42, data=tmp_path))
    for example, first in zip(examples, (0, 5, 15), strict=True):
        for i in range(first, first + 10):
            document = f"Title {i}\nNumber {i} is a town. It lies on a river."
            assert example.prompt.count(document) == 1
        assert example.references == (f"town {first}",) and example.more["documents"] == 25
    with pytest.raises(ValueError, match="qa_2: 300 tokens leave no room"):
        task.examples(Sources(default_tokenizer, 300, 1, 42, data=tmp_path))
    file.write_text(json.dumps([{"question": "?"}]))
    with pytest.raises(ValueError, match=r"not in HotpotQA's format: KeyError\('context'\)"):
        task.examples(Sources(default_tokenizer, 500, 1, 42, data=tmp_path))
