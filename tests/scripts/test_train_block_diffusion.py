"""The command line that makes a block-diffusion model of a causal one, on a tiny checkpoint."""

import json

import numpy as np
import pytest

from scripts import train_block_diffusion
from sparda_jax.checkpoints.load import load_pretrained
from sparda_jax.diffusion.files import load_adapter

SMALL = [
    "--block-size=8", "--mask-token=5", "--window=32", "--steps=3", "--batch=2", "--rank=2",
    "--save-every=2", "--eval-every=0", "--held-out=0.3", "--dtype=float32", "--distil=0.5",
    "--suffix=0.5", "--nearness=0.8",
]  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "documents.jsonl"
    rng = np.random.default_rng(0)
    letters = lambda: "".join(chr(c) for c in rng.integers(97, 123, 150))
    path.write_text("\n".join(json.dumps({"text": letters()}) for _ in range(4)))
    return path


@pytest.fixture
def call(checkpoint, text, capsys):
    def run(*arguments):
        fixed = [str(text), "--model", str(checkpoint), *SMALL]
        return train_block_diffusion.main([*fixed, *arguments]), *capsys.readouterr()

    return run


def test_trains_saves_and_goes_on(call, checkpoint, tmp_path):
    code, printed, notes = call("--out", str(tmp_path))
    assert code == 0, notes
    assert "step 3/3  loss " in notes and "0:00:00 left  held out: loss " in notes
    model, _ = load_pretrained(checkpoint)
    merged = load_adapter(printed.strip(), model)
    facts = merged.config.diffusion
    assert (facts.block_size, facts.mask_token_id, facts.logit_shift) == (8, 5, True)
    changed = merged.layers[0].q.kernel[...] - model.layers[0].q.kernel[...]
    assert 0 < np.abs(changed).max() < 0.1 and np.linalg.matrix_rank(changed) == 2
    before = (tmp_path / "block_diffusion.safetensors").read_bytes()
    code, _, notes = call("--out", str(tmp_path))
    assert code == 0 and "step" not in notes
    path = tmp_path / "block_diffusion.safetensors"
    assert path.read_bytes() == before
    # Another run goes on from there.
    code, printed, notes = call("--out", str(tmp_path / "more"), "--start", str(path), "--rank=7")
    assert code == 0, notes
    further = load_adapter(printed.strip(), model)
    steps = [np.asarray(one.layers[0].q.kernel[...]) for one in (model, merged, further)]
    assert 0 < np.abs(steps[2] - steps[1]).max() < 0.1
    assert np.linalg.matrix_rank(steps[2] - steps[0]) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mask-token=99999"], "mask token 99999 is not in the vocabulary"),
        (["--window=33"], "windows of 33 tokens are no whole number of blocks of 8"),
        (["--weighting=inverse_rate"], "complementary masks have no single rate"),
        (["--noise-low=0.9", "--noise-high=0.3"], "noise levels need 0 <= low < high <= 1"),
        (["--distil=2"], r"distil must be in [0, 1], got 2"),
        (["--rank=0"], "LoRA rank must be at least 1, got 0"),
    ],
)
def test_mistakes_are_one_line(call, tmp_path, arguments, words):
    code, printed, notes = call("--out", str(tmp_path), *arguments)
    assert code == 1 and not printed
    assert words in notes.splitlines()[-1]
