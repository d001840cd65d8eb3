"""The examples run, in small form, on the tiny checkpoint."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import block_diffusion, complete_file, needle, own_loop, train_forecast
from sparda_jax.checkpoints.load import load_pretrained
from sparda_jax.config import DiffusionConfig
from sparda_jax.forecast.files import load_forecast
from sparda_jax.models.decoder import Decoder


@pytest.fixture(autouse=True)
def engines(shared_engines, monkeypatch):
    """The examples' engines are made anew each time; equal ones share their programs here."""
    from sparda_jax.engine import generate

    for module in (complete_file, needle):
        monkeypatch.setattr(module, "Engine", shared(generate.Engine))


def shared(make):
    return lambda model, *, sparse=None, config, forecast=None: make(
        model, sparse=sparse, config=config, **({} if forecast is None else {"forecast": forecast})
    )


def test_needle(checkpoint, capsys):
    needle.main(["--model", str(checkpoint), "--tokens=1024", "--samples=2", "--mode=dense"])
    found = capsys.readouterr().out.splitlines()
    assert len(found) == 2
    for line in found:
        assert re.match(r"depth +\d+ %  \d{7}  [01]  '", line), line


def test_complete_file(checkpoint, capsys, tmp_path):
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    rows = [{"prompt": f"Prompt {i}", "name": i} for i in range(4)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    call = lambda: complete_file.main(
        [str(prompts), str(answers), "--model", str(checkpoint), "--batch=2", "--max-new-tokens=9"]
    )
    call()
    whole = answers.read_text()
    done = [json.loads(line) for line in whole.splitlines()]
    assert [row["name"] for row in done] == [0, 1, 2, 3] and all(row["completion"] for row in done)
    answers.write_text("".join(line + "\n" for line in whole.splitlines()[:2]))
    call()  # goes on
    assert answers.read_text() == whole
    assert "4 of 4" in capsys.readouterr().out.splitlines()[-1]


def test_own_loop(checkpoint, capsys):
    """One program over all batches gives what a direct forward gives, row by row."""
    own_loop.main(["--model", str(checkpoint), "--window=640", "--batches=2", "--batch=1"])
    said = dict(line.split()[:2] for line in capsys.readouterr().out.splitlines())
    model, tokenizer = load_pretrained(str(checkpoint))
    ids = np.array(tokenizer.encode(own_loop.load_excerpt())[:1280]).reshape(2, 640)
    total = 0.0
    forward = jax.jit(lambda tokens: model(tokens))
    for row in ids:
        logits = np.asarray(forward(jnp.asarray(row[None, :-1])), np.float64)[0]
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        total -= log_p[np.arange(639), row[1:]].mean() / np.log(2)
    assert float(said["dense"]) == pytest.approx(total / 2, abs=2e-4)
    assert float(said["sparse"]) != float(said["dense"])


def test_train_forecast(checkpoint, capsys, tmp_path):
    arguments = [str(tmp_path), "--model", str(checkpoint), "--window=512", "--steps=2"]
    train_forecast.main(arguments)
    said = capsys.readouterr().out
    assert "'step': 2" in said
    path = tmp_path / "forecast.safetensors"
    assert said.splitlines()[-1].endswith(f"--mode sparda --forecast {path}")
    forecast, _ = load_forecast(path, load_pretrained(str(checkpoint))[0])
    assert all(np.isfinite(layer.kernel[...]).all() for layer in forecast.layers)


def test_block_diffusion(checkpoint, capsys, monkeypatch):
    """The tiny model taken for one of block diffusion, its last token for the mask."""
    model, tokenizer = load_pretrained(str(checkpoint))
    diffusion = DiffusionConfig(8, model.config.vocab_size - 1)
    config = dataclasses.replace(model.config, family="sdar", diffusion=diffusion)
    loaded = Decoder.random(config, seed=1), tokenizer
    monkeypatch.setattr(block_diffusion, "load_pretrained", lambda name: loaded)
    block_diffusion.main(["--model=tiny", "--tokens=128", "--max-new-tokens=16"])
    *blocks, last = capsys.readouterr().out.splitlines()
    assert len(blocks) >= 2 and all(" steps  '" in line for line in blocks)
    assert last.startswith("16 tokens, ")
