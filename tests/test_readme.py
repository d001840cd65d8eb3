"""The README's programs run as they stand, in the order in which they stand."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def python_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", README.read_text("utf-8"), re.M | re.S)


@pytest.mark.slow
def test_examples_run(default_model_path, monkeypatch, capsys):
    # The examples ask for "default", which looks for the model where the user's cache is.
    monkeypatch.setattr("sparda_jax.assets.cache_folder", lambda: default_model_path.parent)
    blocks = python_blocks()
    assert len(blocks) == 4
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert 1 < float(printed[0]) < 4  # nats per token: the model reads English
    assert 0 < names["report"].hit_rate <= 1
    assert names["results"][0].tokens[1:17] == names["outputs"].tokens[:, 0].tolist()


def test_commands_exist():
    text = README.read_text("utf-8")
    makefile = (README.parent / "Makefile").read_text("utf-8")
    for target in re.findall(r"`?make (\w+)", text):
        assert f"\n{target}:" in makefile, target
    for path in re.findall(r"\]\(([\w./-]+)\)", text):
        assert (README.parent / path).exists(), path
