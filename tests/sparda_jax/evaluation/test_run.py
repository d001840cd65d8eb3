"""A run that is killed and restarted gives the table of one that is not; bad input is named."""

import dataclasses
import json

import pytest

from sparda_jax.evaluation import suite as suites
from sparda_jax.evaluation import tables
from sparda_jax.evaluation.generation import Answer
from sparda_jax.evaluation.run import Answering, Cell, Run
from sparda_jax.evaluation.suite import Suite
from sparda_jax.evaluation.tasks.base import Example, Sources, Task


def examples(sources):
    return [
        Example(str(i), f"Question {i} " + "x " * (5 * (i % 7)), (str(i % 3),), 8, stop=("\n",))
        for i in range(sources.samples)
    ]


TASK = Task("echo", ("made", "made/part"), examples, lambda e, a: {"em": float(a in e.references)},
            binary=True)  # fmt: skip
OTHER = dataclasses.replace(TASK, name="other")


class Killed(BaseException):
    pass


class Stub:
    """Answers with a digit of the prompt; dies after so many batches."""

    def __init__(self, tokenizer, batches=10**6, wrong=False):
        self.tokenizer, self.left, self.wrong, self.shapes = tokenizer, batches, wrong, set()

    def __call__(self, prompts, requests, stops):
        if not self.left:
            raise Killed
        self.left -= 1
        self.shapes.add(len(prompts))
        numbers = [int(self.tokenizer.decode(p).split("Question ")[1].split()[0]) for p in prompts]
        digit = lambda n: str((n + (self.wrong and n % 5 == 0)) % 3)
        return [Answer(digit(n), 1, "eos") for n in numbers], {"decode_tokens": len(prompts)}


@pytest.fixture
def evaluate(default_tokenizer, tmp_path):
    suite = Suite([TASK, OTHER], [], [1, 2], ["dense", "sparse"])
    sources = Sources(default_tokenizer, 0, 11, 0)

    def run(folder="run", batches=10**6, answering=None, limit=500, change=lambda: None):
        work = Run(tmp_path / folder, answering or Answering(batch=4), default_tokenizer, limit)
        stubs = {m: Stub(default_tokenizer, batches, m == "sparse") for m in suite.modes}
        lines = []
        rows = suites.run_tasks(suite, work, sources, lambda mode: stubs[mode], lines.append)
        table = [row.as_json() for row in rows]
        return table, stubs, lines

    return run


def test_killed_and_restarted(evaluate, tmp_path):
    whole, stubs, _ = evaluate("whole")
    assert stubs["dense"].shapes == {4}  # the last batch too
    with pytest.raises(Killed):
        evaluate(batches=5)
    path = tmp_path / "run/predictions/dense/other_full_2.jsonl"
    cut = tmp_path / "run/predictions/dense/echo_full_2.jsonl"
    assert cut.exists() and not path.exists()
    with cut.open("a") as file:  # killed in the middle of a line
        file.write('{"batch": 9, "predic')
    resumed, stubs, lines = evaluate()
    assert resumed == whole
    assert len(stubs["dense"].shapes) == 1 and any("batches" in line for line in lines)
    again, stubs, lines = evaluate()
    assert again == whole and not stubs["dense"].shapes and len(lines) == 1


def test_rows(evaluate):
    rows = {row["name"]: row for row in evaluate()[0]}
    dense, sparse = (rows[f"made/full/echo/{mode}"] for mode in ("dense", "sparse"))
    assert dense["median"] == 100 and dense["n"] == 22 and dense["metric"] == "em"
    assert sparse["median"] == pytest.approx(100 * 16 / 22, rel=1e-3)
    assert sparse["seeds"] == {"1": 72.73, "2": 72.73} and sparse["seed_deviation"] == 0
    assert (sparse["empty"], sparse["truncated"], sparse["at_limit"]) == (0, 0, 0)
    gap = rows["made/full/echo/sparse-dense"]
    assert gap["median"] == pytest.approx(-100 * 6 / 22, rel=1e-3) and gap["p_mcnemar"] == 0.0312
    mean = rows["made/full/mean/sparse-dense"]
    assert not mean["not_worse_by_a_point"] and mean["p_holm"] < 0.05
    assert rows["made/full/mean/dense"]["tasks"] == ["echo", "other"]


def test_other_settings_are_refused(default_tokenizer, tmp_path):
    run = Run(tmp_path, Answering(), default_tokenizer, 100)
    run.claim({"seeds": [1], "batch": 2})
    run.claim({"seeds": [1], "batch": 2})
    with pytest.raises(ValueError, match=r"made with other settings: seeds was \[1\], is \[2\]"):
        run.claim({"seeds": [2], "batch": 2})
    run.claim({"budget": 3}, "sparse")
    with pytest.raises(ValueError, match=r"predictions/sparse was made .* budget was 3, is 4"):
        run.claim({"budget": 4}, "sparse")
    with pytest.raises(ValueError, match="2 greedy answers would be the same"):
        Answering(repeats=2)


def test_prompts_beyond_the_limit(evaluate, tmp_path):
    with pytest.raises(ValueError, match=r"\d of 11 prompts of echo exceed, with their answers, "
                       r"the limit of 70 tokens \(the longest has \d+\); --truncate"):  # fmt: skip
        evaluate(limit=70)
    table, _, _ = evaluate("cut", answering=Answering(batch=4, truncate=True), limit=70)
    cut = next(row for row in table if row["name"] == "made/full/echo/dense")
    assert 0 < cut["truncated"] < 22
    lines = (tmp_path / "cut/examples/echo_full_1.jsonl").read_text().splitlines()
    kept = [json.loads(line) for line in lines]
    assert all(row["prompt"].startswith(f"Question {row['id']}") for row in kept)


def test_nothing_to_do():
    with pytest.raises(ValueError, match=r"modes must be given, each once, got \['a', 'a'\]"):
        Suite([TASK], [], [1], ["a", "a"])
    with pytest.raises(ValueError, match="sized is made to a length: give lengths"):
        Suite([dataclasses.replace(TASK, name="sized", sized=True)], [], [1], ["a"])


def test_repeated_problems(default_tokenizer, tmp_path):
    """Of three answers to each problem: the mean, the majority's, and any."""
    from sparda_jax.evaluation.tasks.reasoning import TASKS

    task = dataclasses.replace(
        TASKS["aime24"], examples=lambda s: [Example(str(i), f"{i}", ("1",), 8) for i in range(2)]
    )
    said = iter([r"\boxed{1}", r"\boxed{2}", r"\boxed{1}", "3", r"\boxed{1}", "3"])
    answer = lambda prompts, *_: ([Answer(next(said), 1, "eos") for _ in prompts], {})
    run = Run(tmp_path, Answering(repeats=3, temperature=1), default_tokenizer, 500)
    cell = Cell(task, None, 1)
    drawn = run.examples(cell, Sources(default_tokenizer, 0, None, 0))
    run.predict(cell, "dense", drawn, answer, lambda line: None)
    scored = {"dense": tables.score(run, [(cell, drawn)], "dense")}
    rows = {row.name: row.timing.median for row in tables.rows(scored, "dense", seed=0)}
    assert rows["math/full/aime24/dense"] == 50
    assert rows["math/full/aime24.maj@3/dense"] == 50
    assert rows["math/full/aime24.pass@3/dense"] == 100


def test_mean_of_helmets_categories(default_tokenizer, tmp_path):
    """Two data sets of one category count as much as the single one of another."""
    right = {"a": 1, "b": 0, "c": 1, "d": 1}
    groups = {"a": "helmet/rag", "b": "helmet/rag", "c": "helmet/icl", "d": "helmet_substitutes"}
    tasks = [dataclasses.replace(TASK, name=name, groups=(groups[name],)) for name in groups]
    run = Run(tmp_path, Answering(batch=2), default_tokenizer, 500)
    prepared = []
    for task in tasks:
        cell = Cell(task, None, 1)
        drawn = run.examples(cell, Sources(default_tokenizer, 0, 2, 0))
        texts = [drawn[n].references[0] if right[task.name] else "?" for n in (1, 0)]
        said = [Answer(text, 1, "eos") for text in texts]
        answer = lambda *_, said=said: (said, {})
        run.predict(cell, "dense", drawn, answer, lambda line: None)
        prepared.append((cell, drawn))
    scored = {"dense": tables.score(run, prepared, "dense")}
    rows = {row.name: row for row in tables.rows(scored, "dense", seed=0)}
    assert rows["helmet/full/rag/dense"].timing.median == 50
    mean = rows["helmet/full/deterministic/dense"]
    assert mean.timing.median == 75 and mean.more["tasks"] == ["a", "b", "c"]
