"""The run of the kernel benchmarks: what fails is named, and the rest is kept."""

import json
import sys

import pytest

from scripts import benchmark as command
from sparda_jax.evaluation import kernel_benchmarks
from sparda_jax.evaluation.kernel_benchmarks import harness


def _rows(*names, fails=False):
    def generate(session):
        for name in names:
            yield harness.Row(name, harness.Timing(1.5, (1.0, 2.0), 3), "us", "lower", target=1.0)
        if fails:
            raise ValueError("no such card")

    return generate


@pytest.fixture
def registry(monkeypatch):
    benchmarks = {
        "broken": _rows("first", fails=True),
        "other": _rows("second", "third"),
    }
    monkeypatch.setattr(kernel_benchmarks, "REGISTRY", benchmarks)
    monkeypatch.setattr(harness, "REGISTRY", benchmarks)
    return benchmarks


def _call(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "kernels", *options])
    command.main()


def test_failure_is_named_at_the_end_and_the_rest_is_kept(registry, monkeypatch, tmp_path):
    path = tmp_path / "results.json"
    with pytest.raises(SystemExit) as exit_:
        _call(monkeypatch, "--json", str(path))
    assert exit_.value.code == "benchmark.py: failed: broken"
    rows = json.loads(path.read_text())["rows"]
    assert [row["name"] for row in rows] == ["first", "second", "third"]
    assert not rows[0]["meets"]
    # One that succeeds ends the command quietly, and keeps the others' rows when told to.
    registry["other"] = _rows("third", "fourth")
    _call(monkeypatch, "--only", "other", "--merge", "--json", str(path))
    rows = json.loads(path.read_text())["rows"]
    assert [row["name"] for row in rows] == ["first", "second", "third", "fourth"]


def test_no_row_after_the_time_is_over(registry, capsys, monkeypatch):
    with pytest.raises(SystemExit, match="cut short after 0 s: broken, other"):
        _call(monkeypatch, "--seconds", "0")
    assert capsys.readouterr().out == ""


def test_only_must_match_something(registry, monkeypatch):
    with pytest.raises(SystemExit, match="nothing"):
        _call(monkeypatch, "--only", "nothing")
