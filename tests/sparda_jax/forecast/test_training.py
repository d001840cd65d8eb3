"""Training: it learns, it resumes to the same bits, it stops where it must."""

import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.geometry import BlockGeometry
from sparda_jax.config import ModelConfig, RopeConfig, SparseConfig
from sparda_jax.forecast import training
from sparda_jax.forecast.data import Windows, pack
from sparda_jax.forecast.loss import LossConfig
from sparda_jax.forecast.step import TrainConfig
from sparda_jax.forecast.training import Trainer, TrainingDiverged
from sparda_jax.models import Decoder
from sparda_jax.training.config import learning_rate_of

ROOT = Path(__file__).parents[3]
CONFIG = ModelConfig(
    family="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope=RopeConfig(head_dim=16),
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)
SPARSE = SparseConfig(BlockGeometry(8, 4, 2), init_blocks=1, local_blocks=1, budget_blocks=8)
TRAIN = TrainConfig(
    loss=LossConfig(SPARSE), steps=100, batch=2, learning_rate=5e-3, save_every=50, eval_every=100
)


def backbone():
    """Random, with attention sharp enough that there is something to predict."""
    model = Decoder.random(CONFIG)
    for layer in model.layers:
        layer.q.kernel[...] = layer.q.kernel[...] * 2
    return model


def windows(count, seed, length=256):
    rng = np.random.default_rng(seed)
    return pack([rng.integers(0, 64, count * length)], length, None)


def make(folder, steps=100, devices=None, **changes):
    config = dataclasses.replace(TRAIN, steps=steps, **changes)
    return Trainer(backbone(), config, windows(64, 0), windows(4, 1), folder, devices)


def records(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def bits(state):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def test_loss_falls_and_recall_rises_on_text_never_seen(tmp_path):
    trainer = make(tmp_path)
    seen = []
    trainer.run(seen.append)
    before, *_, after = records(tmp_path)
    # 0.52 -> 0.33 nats and 43 -> 62 % when written.
    assert after["held_out_loss"] < 0.75 * before["held_out_loss"]
    assert after["held_out_recall"] > before["held_out_recall"] + 0.12
    layers = np.asarray([r["held_out_recall_by_layer"] for r in (before, after)])
    assert layers.shape == (2, 2) and (layers[1] > layers[0] + 0.05).all()
    np.testing.assert_allclose(sum(after["held_out_loss_by_layer"]), after["held_out_loss"])
    assert [r["step"] for r in records(tmp_path)] == list(range(101))
    assert [p.record for p in seen] == records(tmp_path)
    assert seen[-1].seconds_left == 0 < seen[0].seconds_left


def test_a_killed_and_resumed_run_ends_in_the_same_bits(tmp_path):
    whole = make(tmp_path / "whole", steps=8, save_every=3).run()
    code = (
        "import os, signal, sys; sys.path[:0] = ['.', 'tests/sparda_jax/forecast']\n"
        "import test_training as t\n"
        "def stop(p):\n"
        "    if p.record['step'] == 5: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"t.make({str(tmp_path / 'killed')!r}, steps=8, save_every=3).run(stop)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [r["step"] for r in records(tmp_path / "killed")] == [0, 1, 2, 3, 4, 5]
    steps = []
    resumed = make(tmp_path / "killed", steps=8, save_every=3).run(
        lambda p: steps.append(p.record["step"])
    )
    assert steps == [4, 5, 6, 7, 8]
    assert bits(resumed) == bits(whole)
    first, second = records(tmp_path / "whole"), records(tmp_path / "killed")
    told = lambda rows: [(r["step"], r.get("loss"), r.get("held_out_loss")) for r in rows]
    assert told(first) == told(second)


def test_accumulation_is_one_large_batch(tmp_path):
    few = make(tmp_path / "a", steps=1, micro_batch=1).run()
    many = make(tmp_path / "b", steps=1, micro_batch=2).run()
    a, b = records(tmp_path / "a")[1], records(tmp_path / "b")[1]
    for name in ("loss", "recall", "gradient_norm"):
        np.testing.assert_allclose(a[name], b[name], rtol=1e-5)
    # Adam's first step is the sign of the gradient, so compare its moments.
    for x, y in zip(jax.tree.leaves(few.optimizer), jax.tree.leaves(many.optimizer), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-6)


def test_divergence_stops_and_keeps_the_last_good_checkpoint(tmp_path, monkeypatch):
    def poisoned(bad):
        step = training.train_step

        def run(model, state, tokens, **static):
            at = int(state.step) + 1
            state, metrics = step(model, state, tokens, **static)
            return state, metrics | ({"loss": jnp.float32(bad)} if at == 4 else {})

        return run

    for bad, words in ((np.nan, "step 4: .* not finite"), (1e3, "step 4: loss 1000 is over 10")):
        folder = tmp_path / str(bad)
        with monkeypatch.context() as patch:
            patch.setattr(training, "train_step", poisoned(bad))
            with pytest.raises(TrainingDiverged, match=words):
                make(folder, steps=6, save_every=2).run()
        assert [r["step"] for r in records(folder)] == [0, 1, 2, 3]
        steps = []
        make(folder, steps=6, save_every=2).run(lambda p, s=steps: s.append(p.record["step"]))
        assert steps == [3, 4, 5, 6]


def test_a_folder_of_another_run_is_refused(tmp_path):
    make(tmp_path, steps=1).run()
    with pytest.raises(ValueError, match=r"another learning_rate: 0\.005, not 0\.1"):
        make(tmp_path, steps=1, learning_rate=0.1).run()
    other = Trainer(backbone(), dataclasses.replace(TRAIN, steps=1), windows(64, 7),
                    windows(4, 1), tmp_path)  # fmt: skip
    with pytest.raises(ValueError, match="another data"):
        other.run()


def test_plan_writes_nothing(tmp_path):
    plan = make(tmp_path / "run", steps=50).plan()
    assert not (tmp_path / "run").exists()
    assert plan["temporary_bytes"] > 0 and plan["argument_bytes"] > 0
    np.testing.assert_allclose(plan["seconds"], 50 * plan["seconds_per_step"])


@pytest.mark.parametrize(
    ("rise", "fall", "expected"),
    [
        (2, 0, [0, 0.5, 1, 1, 1, 1]),
        (0, 2, [1, 1, 1, 1, 1, 0.5]),
        (1, 3, [0, 1, 1, 1, 2 / 3, 1 / 3]),
    ],
)
def test_learning_rate(rise, fall, expected):
    config = TrainConfig(steps=6, learning_rate=1.0, warmup_steps=rise, decay_steps=fall)
    rate = learning_rate_of(config)
    np.testing.assert_allclose([rate(i) for i in range(6)], expected, rtol=1e-6)


def test_programs_know_nothing_of_the_run(tmp_path):
    """Runs of other seeds and lengths share theirs; what the optimizer does tells them apart."""
    one, other = (make(tmp_path, **c).static["config"] for c in ({}, {"seed": 7, "steps": 300}))
    assert one == other
    for change in ({"learning_rate": 1.0}, {"decay_steps": 9}, {"clip": 1.0}):
        assert make(tmp_path, **change).static["config"] != one
    falls = [make(tmp_path, steps=n, decay_steps=9).static["config"] for n in (10, 11)]
    assert falls[0] != falls[1]


def test_settings_are_checked(tmp_path):
    published = TrainConfig()
    assert (published.learning_rate, published.b1, published.b2) == (5e-4, 0.9, 0.95)
    assert (published.eps, published.weight_decay, published.clip) == (1e-6, 0.01, 0.5)
    assert (published.steps, published.batch) == (2000, 32)
    for change in ({"steps": 0}, {"clip": 0.0}, {"eval_every": -1}, {"explosion": 1}):
        with pytest.raises(ValueError, match=next(iter(change))):
            TrainConfig(**change)
    with pytest.raises(ValueError, match="warmup_steps 2 and decay_steps 3 exceed 4 steps"):
        TrainConfig(steps=4, warmup_steps=2, decay_steps=3)
    with pytest.raises(ValueError, match="batch 2 is not a multiple of micro_batch 3 times 1"):
        make(tmp_path, micro_batch=3)
    empty = Windows(np.zeros((0, 256), np.int32), np.zeros((0, 256), np.int32))
    with pytest.raises(ValueError, match="no window to train on"):
        Trainer(backbone(), TRAIN, empty, empty, tmp_path)
