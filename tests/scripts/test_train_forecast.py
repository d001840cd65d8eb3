"""The trainer's command line on a tiny checkpoint."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts import train_forecast
from sparda_jax.checkpoints.load import load_pretrained
from sparda_jax.forecast.files import load_forecast
from sparda_jax.forecast.training import Trainer

SMALL = [
    "--block-size=8", "--kernel-size=4", "--kernel-stride=2", "--local-blocks=1",
    "--budget-blocks=5", "--window=64", "--steps=4", "--batch=2", "--save-every=2",
    "--eval-every=0", "--held-out=0.3", "--dtype=float32",
]  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "documents.jsonl"
    rng = np.random.default_rng(0)
    letters = lambda: "".join(chr(c) for c in rng.integers(97, 123, 300))
    path.write_text("\n".join(json.dumps({"text": letters()}) for _ in range(4)))
    return path


@pytest.fixture
def call(checkpoint, text, capsys):
    def run(*arguments):
        code = train_forecast.main([str(text), "--model", str(checkpoint), *SMALL, *arguments])
        return code, *capsys.readouterr()

    return run


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.smoke
def test_trains_saves_and_goes_on(call, checkpoint, tmp_path):
    out = tmp_path / "run"
    code, printed, notes = call("--out", str(out))
    assert code == 0, notes
    assert printed.strip() == str(out / "forecast.safetensors")
    assert "4 documents: 9 + 9 windows of 64 tokens" in notes
    assert "step 4/4  loss " in notes and "0:00:00 left  held out: loss " in notes
    model, _ = load_pretrained(checkpoint)
    forecast, sparse = load_forecast(printed.strip(), model)
    assert sparse.geometry.block_size == 8 and sparse.budget_blocks == 5
    assert np.isfinite(forecast.first.kernel[...]).all()
    # A finished run is not trained again; it only writes its weights.
    before = (out / "forecast.safetensors").read_bytes()
    code, _, notes = call("--out", str(out))
    assert code == 0 and "step" not in notes
    assert (out / "forecast.safetensors").read_bytes() == before
    code, _, notes = call("--out", str(out), "--learning-rate=1")
    assert code == 1 and notes.splitlines()[-1].endswith("another learning_rate: 0.0005, not 1.0")


def test_weights_for_another_lookahead_are_refused_by_default(
    call, checkpoint, tmp_path, monkeypatch
):
    """They are for comparison: the engine would give them the wrong layer's state."""
    monkeypatch.setattr(Trainer, "run", lambda self, report: self.start())
    code, printed, notes = call("--out", str(tmp_path), "--lookahead=2")
    assert code == 0, notes
    model, _ = load_pretrained(checkpoint)
    with pytest.raises(ValueError, match="was trained to look 2 layers ahead, not 1; the engine"):
        load_forecast(printed.strip(), model)
    load_forecast(printed.strip(), model, lookahead=2)


def test_dry_run(call, tmp_path):
    code, printed, _ = call("--out", str(tmp_path / "run"), "--dry-run")
    assert code == 0 and not (tmp_path / "run").exists()
    lines = [line.split()[0] for line in printed.splitlines()]
    assert lines == ["memory", "step", "training"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--local-blocks=0", "needs local_blocks >= 1"),
        ("--micro-batch=3", "batch 2 is not a multiple of micro_batch 3 times 1 devices"),
        ("--devices=99", "--devices 99: there are"),
        ("--teacher-stride=3", "teacher grid (2, 3)"),
        ("--window=2", "windows of 2 tokens: at least 4"),
        ("--window=100000", "shorter than one window"),
        ("--held-out=1", "held-out share must be in [0, 1)"),
    ],
)
def test_mistakes_are_one_line(call, tmp_path, option, message):
    code, printed, notes = call("--out", str(tmp_path / "run"), option)
    assert code == 1 and printed == ""
    assert message in notes.splitlines()[-1]


def test_two_processes_end_in_the_bits_of_two_devices_and_train_as_one(
    call, checkpoint, text, tmp_path
):
    script = Path(train_forecast.__file__)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"

    def start(out, *arguments, devices=1):
        flags = f"--xla_force_host_platform_device_count={devices}"
        return subprocess.Popen(
            [sys.executable, script, text, "--model", checkpoint, *SMALL, "--batch=4",
             f"--out={tmp_path / out}", *arguments],
            cwd=script.parents[1],
            env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": "."},
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    shared = [f"--coordinator={address}", "--processes=2"]
    runs = [start("two", *shared, f"--process-id={i}") for i in range(2)]
    notes = [run.communicate(timeout=600)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], notes
    alone = start("one", "--devices=2", devices=2)
    assert (alone.communicate(timeout=600), alone.returncode)[1] == 0
    ends = [(tmp_path / out / "forecast.safetensors").read_bytes() for out in ("two", "one")]
    assert ends[0] == ends[1]
    # Written once, by process 0, which alone tells how it goes.
    two = records(tmp_path / "two")
    assert [record["step"] for record in two] == [0, 1, 2, 3, 4]
    assert "step 4/4" in notes[0] and "step 4/4" not in notes[1]
    # One device sees every gradient before it is summed in another order.
    assert call("--out", str(tmp_path / "single"), "--batch=4", "--micro-batch=2")[0] == 0
    for a, b in zip(records(tmp_path / "single"), two, strict=True):
        for name in {"loss", "recall", "gradient_norm", "held_out_loss", "held_out_recall"} & {*a}:
            np.testing.assert_allclose(a[name], b[name], rtol=1e-4, err_msg=name)


def test_processes_are_named_in_full(call, tmp_path):
    code, _, notes = call("--out", str(tmp_path), "--processes=2")
    assert code == 1 and "--coordinator, --processes and --process-id belong together" in notes
