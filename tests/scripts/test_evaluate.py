"""`scripts/evaluate.py` on a tiny checkpoint: tables, going on after a stop, errors in one line."""

import contextlib
import io
import json

import pytest

from scripts import benchmark, evaluate

OPTIONS = [
    *("--block-size=8", "--kernel-size=4", "--kernel-stride=2", "--local-blocks=2"),
    *("--budget-blocks=6", "--prefill-chunk=256", "--length-step=256", "--steps-per-call=4"),
    *("--max-new-tokens=6", "--batch=2", "--max-length=1536"),
]


def call(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = evaluate.main([str(a) for a in arguments])
        except SystemExit as stop:
            code = stop.code
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Two texts, so that documents run two at a time as prompts do."""
    folder = tmp_path_factory.mktemp("text")
    for name in ("one", "two"):
        (folder / name).write_text(" ".join(f"Sentence {name} {i} is." for i in range(100)))
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def command(checkpoint, shared_engines, text):
    def run(*arguments, tasks=("niah_single_1", "niah_multikey_1", "perplexity"), lengths=(1536,)):
        return call(
            *("--model", checkpoint, *OPTIONS, "--mode", "dense", "sparse", "--offload=host"),
            *("--tasks", *tasks, "--lengths", *lengths, "--samples=3", "--text", *text),
            *arguments,
        )

    return run


def table(path):
    document = json.loads(path.read_text())
    rows = {row["name"]: row for row in document["rows"]}
    return document, {k: v for k, v in rows.items() if not k.startswith("meters")}, rows


def test_tables_and_going_on(command, tmp_path):
    code, out, err = command("--json", tmp_path / "a.json", "--run-dir", tmp_path / "run")
    assert code == 0, err
    document, scores, rows = table(tmp_path / "a.json")
    assert set(document["settings"]["modes"]) == {"dense", "sparse"}
    assert document["settings"]["modes"]["sparse"]["engine"]["offload"] == "host"
    for name in ("ruler/1536/niah_multikey_1/sparse", "ruler/1536/mean/sparse-dense",
                 "perplexity/1536/tokens_256-1024/sparse-dense",
                 "perplexity/1536/tokens_1-256.kl/sparse-dense", "meters/1536/decode/sparse",
                 "meters/1536/hit_rate/sparse"):  # fmt: skip
        assert name in rows and name in out
    assert rows["perplexity/1536/all/dense"]["median"] > 20  # random weights over 259 bytes
    kl, gap = (rows[f"perplexity/1536/all{what}/sparse-dense"] for what in (".kl", ""))
    assert 0 < kl["median"] < 1 and abs(gap["median"]) < kl["median"] ** 0.5
    # Half of it is lost, and a line is torn.
    predictions = tmp_path / "run" / "predictions"
    (predictions / "sparse" / "niah_multikey_1_1536_42.jsonl").unlink()
    torn = predictions / "dense" / "niah_single_1_1536_42.jsonl"
    torn.write_bytes(torn.read_bytes()[:-9])
    before = (predictions / "dense" / "niah_multikey_1_1536_42.jsonl").read_bytes()
    code, _, err = command("--json", tmp_path / "b.json", "--run-dir", tmp_path / "run")
    assert code == 0 and "sparse niah_multikey_1_1536_42: 2 of 2 batches" in err
    assert table(tmp_path / "b.json")[1] == scores
    assert (predictions / "dense" / "niah_multikey_1_1536_42.jsonl").read_bytes() == before
    code, _, err = command("--run-dir", tmp_path / "run", "--temperature=0.5")
    assert code == 1 and "run was made with other settings: answers was {'batch': 2, " in err
    code, _, err = command("--run-dir", tmp_path / "run", "--budget-blocks=7")
    assert code == 1 and "predictions/sparse was made with other settings: sparse was " in err


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"tasks": ["nothing"]}, "unknown task 'nothing', expected one of ruler"),
        ({"tasks": ["hotpotqa"]}, "longbench/hotpotqa.jsonl is needed (JSON objects with input"),
        ({"lengths": []}, "niah_single_1 is made to a length: give lengths"),
        ({"lengths": [100]}, "niah_single_1: 100 tokens leave no room, the shortest sample has"),
        ({"tasks": ["perplexity"], "lengths": [9999]}, "no document has 9999 tokens, the longest"),
    ],
)
def test_errors(command, tmp_path, changes, message):
    code, out, err = command("--run-dir", tmp_path / "run", **changes)
    assert code == 1 and out == "" and message in err.splitlines()[-1]


def test_too_long_prompts(command, tmp_path):
    (tmp_path / "longbench").mkdir()
    row = {"input": "Who?", "context": "word " * 400, "answers": ["x"], "length": 400,
           "all_classes": None, "_id": "1"}  # fmt: skip
    (tmp_path / "longbench" / "hotpotqa.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    asked = ("--data", tmp_path, "--run-dir", tmp_path / "run")
    code, _, err = command(*asked, tasks=["hotpotqa"])
    assert code == 1 and "2 of 2 prompts of hotpotqa exceed, with their answers, the limit" in err
    cut = ("--truncate", "--json", tmp_path / "cut.json", "--data", tmp_path)
    code, _, err = command(*cut, "--run-dir", tmp_path / "cut", tasks=["hotpotqa"])
    assert code == 0, err
    assert table(tmp_path / "cut.json")[1]["longbench/full/hotpotqa/dense"]["truncated"] == 2


def test_command_line():
    code, out, _ = call("--list")
    assert code == 0 and "ruler: niah_single_1," in out and "meters: perplexity, selection" in out
    code, out, _ = call("--help")
    assert code == 0 and "examples:\n" in out
    code, _, err = call("--model", "elsewhere", "--tasks", "vt", "--mode", "sparda")
    assert code == 2 and "name the Forecast weights" in err


def test_speed_of_an_evaluation(checkpoint, shared_engines, text, monkeypatch, tmp_path):
    """Both arms draw the same tokens; the file has their rates and what the one keeps."""
    path = tmp_path / "speed.json"
    small = [o for o in OPTIONS if not o.startswith(("--max-new", "--batch", "--budget"))]
    arguments = ["evaluation", "--model", str(checkpoint), *small, "--modes=dense", "--batch=2"]
    arguments += ["--task=niah_single_1", "--lengths=1536", "--repetitions=1", f"--json={path}"]
    monkeypatch.setattr("sys.argv", ["benchmark.py", *arguments])
    with contextlib.redirect_stdout(io.StringIO()):
        benchmark.main()
    ours, alone, share = json.loads(path.read_text())["rows"]
    assert ours["name"] == "evaluation/dense/1536/B2/evaluation" and ours["median"] > 0
    assert share["target"] == 0.9 and share["meets"] == (share["median"] >= 0.9)
    assert 0.2 < share["median"] < 5 and alone["unit"] == "tok/s"
