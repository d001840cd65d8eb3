"""LongBench's files, prompts, metrics and cuts."""

import json

import pytest

from sparda_jax.evaluation.tasks import longbench, registry
from sparda_jax.evaluation.tasks.base import Sources, cut_middle

ROW = {
    "input": "Who?",
    "context": "Story with {braces} and {input}.",
    "answers": ["the cat", "a dog"],
    "length": 5000,
    "all_classes": None,
    "_id": "x",
}


@pytest.fixture
def write(tmp_path):
    (tmp_path / "longbench").mkdir()

    def rows(name, *rows):
        text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
        (tmp_path / "longbench" / name).write_text(text + "\n")
        return Sources(None, 4096, None, 42, data=tmp_path)

    return rows


def test_tasks():
    assert len(longbench.TASKS) == 21 and len(longbench.TASKS_E) == 13
    assert len(longbench.SPARDA) == 14 and set(longbench.SPARDA) <= set(longbench.TASKS)
    assert [task.name for task in registry.find(["longbench14", "trec"])] == list(longbench.SPARDA)
    with pytest.raises(ValueError, match="unknown task 'nothing', expected one of ruler,"):
        registry.find(["nothing"])


def test_a_question(write):
    task = longbench.TASKS["hotpotqa"]
    (example,) = task.examples(write("hotpotqa.jsonl", ROW))
    assert "Story with {braces} and {input}." in example.prompt  # the context is left as it is
    assert example.prompt.endswith("Question: Who?\nAnswer:") and example.chat
    assert example.max_new_tokens == 32 and example.more["length"] == 5000
    assert task.score(example, "It was a dog") == {"f1": pytest.approx(2 / 4)}


def test_the_originals_prompts_take_the_place_of_ours(write, tmp_path):
    sources = write("trec.jsonl", ROW | {"all_classes": ["cat", "the cat", "dog"]})
    prompts = tmp_path / "longbench" / "dataset2prompt.json"
    prompts.write_text(json.dumps({"trec": "C: {context} Q: {input}"}))
    task = longbench.TASKS["trec"]
    (example,) = task.examples(sources)
    assert example.prompt == "C: Story with {braces} and {input}. Q: Who?" and not example.chat
    # The first line counts, and a class inside the right one's name does not.
    scores = task.score(example, "\n\nthe cat\ndog")
    assert scores == {"classification": 1, "classification_compat": 1}
    prompts.write_text("[]")
    with pytest.raises(ValueError, match="expected an object of prompts"):
        task.examples(sources)


@pytest.mark.parametrize(
    "row,message",
    [
        ("{", "row 1: not JSON"),
        ("[1]", "row 1: list, expected an object"),
        ({"input": "?"}, "row 1: no field 'context', 'answers', 'length', 'all_classes', '_id'"),
        (ROW | {"answers": []}, "row 1: 'answers' is empty"),
        ("", "holds nothing; expected JSON objects with input"),
    ],
)
def test_bad_files(write, row, message):
    with pytest.raises(ValueError, match=message):
        longbench.TASKS["trec"].examples(write("trec.jsonl", row))


def test_no_file_and_no_folder(write):
    sources = write("other.jsonl", ROW)
    with pytest.raises(FileNotFoundError, match=r"no file .*lcc.jsonl; expected JSON objects with"):
        longbench.TASKS["lcc"].examples(sources)
    with pytest.raises(FileNotFoundError, match="no data folder was given"):
        longbench.TASKS["lcc"].examples(Sources(None, 1, None, 42))


def test_some_of_the_rows(write):
    sources = write("lcc.jsonl", *(ROW | {"input": str(i)} for i in range(9)))
    some = lambda seed: longbench.TASKS["lcc"].examples(
        Sources(None, 1, 4, seed, data=sources.data)
    )
    assert some(1) == some(1) != some(2) and len(some(1)) == 4


def test_a_cut_keeps_both_ends(default_tokenizer):
    text = " ".join(f"word{i}" for i in range(300))
    short, cut = cut_middle(default_tokenizer, text, 100)
    assert cut and short.startswith("word0 word1 ") and short.endswith(" word298 word299")
    assert abs(len(default_tokenizer.encode(short)) - 100) <= 2
    assert cut_middle(default_tokenizer, "short", 100) == ("short", False)
