"""Training: losses and gradients of the published code, noise, adapters, and that it learns."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparda_jax.checkpoints.names import published_name
from sparda_jax.config import DiffusionConfig
from sparda_jax.diffusion.adapter import (
    MASK_EMBEDDING,
    LoraConfig,
    adapted,
    full_weights,
    lora_weights,
)
from sparda_jax.diffusion.files import load_adapter, save_adapter
from sparda_jax.diffusion.loss import (
    BlockLossConfig,
    block_diffusion_loss,
    cross_entropy,
    noisy_hidden,
    scored_rows,
)
from sparda_jax.diffusion.masks import training_mask
from sparda_jax.diffusion.noise import NoiseConfig, draw_noise, noisy_copies, rates
from sparda_jax.diffusion.training import BlockTrainConfig, BlockTrainer
from sparda_jax.forecast.data import pack
from sparda_jax.models import Decoder

from .conftest import load_case_model, packed_training_mask

ROOT = Path(__file__).parents[2] / "data" / "block_diffusion"
CASES = ROOT / "training_mask"


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def check_gradients(model, gradient, name):
    case = np.load(CASES / f"{name}.npz")
    order = json.loads((CASES / "case.json").read_text())["files"][f"{name}.npz"]["grad_order"]
    norms, seen = dict(zip(order, case["grad_norms"], strict=True)), 0
    for path, _ in nnx.to_flat_state(nnx.state(model)):
        ours = np.asarray(gradient[".".join(map(str, path))])
        theirs = published_name(model.config, path)
        np.testing.assert_allclose(np.linalg.norm(ours), norms.pop(theirs), rtol=1e-3)
        if f"grad.{theirs}" in case:
            ours = ours.T if path[-1] == "kernel" else ours
            np.testing.assert_allclose(ours, case[f"grad.{theirs}"], rtol=1e-3, atol=1e-5)
            seen += 1
    assert not norms and seen


@pytest.mark.parametrize(
    ("name", "family", "width"),
    [
        ("sdar_loss_single_B4", "sdar_tiny", 4),
        ("sdar_loss_single_B32", "sdar_tiny", 32),
        ("fast_dllm_v2_loss_B32", "fast_dllm_v2_tiny", 32),
    ],
)
def test_losses_of_the_published_code(name, family, width):
    case, model = np.load(CASES / f"{name}.npz"), load_case_model(ROOT / family, width)
    config = BlockLossConfig.of_family(model.config)
    editable = jnp.asarray(case["labels"] != -100)
    if family == "sdar_tiny":
        masked, rate = case["masked"], case["p_mask_per_token"]
    else:
        rate = jnp.repeat(rates(jnp.asarray(case["t"]), config.noise), 32, axis=1)
        masked = (case["u"] < rate) & editable
        np.testing.assert_array_equal(masked, case["model_input_ids"][:2, :96] == 250)

    def loss(weights):
        learnt = adapted(model, weights, None, model.config.diffusion)
        return block_diffusion_loss(
            learnt, case["input_ids"], masked, rate, config, editable=editable
        )

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, _), gradient = run(full_weights(model))
    np.testing.assert_allclose(value, case["loss"][0], rtol=1e-5)
    check_gradients(model, gradient, name)


def test_packed_loss_of_the_published_code():
    """Several samples in one row: blocks and positions begin anew in each."""
    case, model = np.load(CASES / "sdar_loss_packed_B4.npz"), load_case_model(ROOT / "sdar_tiny", 4)
    positions = case["position_ids"][0]
    starts = np.flatnonzero(positions == 0)
    lengths = np.diff([*starts, len(positions)]).tolist()
    halves, noisy_at = [], []
    for start, length in zip(starts, lengths, strict=True):
        own = slice(start, start + length)
        noisy_at.append(2 * start + np.arange(length))
        halves += [case["noisy_ids"][0, own], case["input_ids"][0, own]]
    row = np.concatenate(halves)[None]
    twice = np.concatenate([np.tile(np.arange(length), 2) for length in lengths])[None]
    mask = jnp.asarray(packed_training_mask(lengths, 4))
    hidden = jax.jit(lambda m: m.hidden(row, mask=mask, positions=jnp.asarray(twice)))(model)
    weights = case["masked"] / case["p_mask_per_token"] / (case["labels"] != -100).sum()
    picked = hidden[:, np.concatenate(noisy_at)]
    entropy, _, _ = cross_entropy(
        model, picked, case["input_ids"], weights.astype(np.float32), None, 7
    )
    np.testing.assert_allclose(entropy, case["loss"][0], rtol=1e-5)


def test_several_noisy_copies_are_as_each_alone():
    model = load_case_model(ROOT / "sdar_tiny", 8)
    rng = np.random.default_rng(0)
    noisy, clean = rng.integers(3, 240, (2, 2, 24)), rng.integers(3, 240, (2, 24))
    mask = jnp.asarray(training_mask(24, 8))
    positions = jnp.asarray(np.tile(np.arange(24), (2, 2)))

    @jax.jit
    def both(model):
        found = noisy_hidden(model, jax.vmap(model.embed)(noisy), model.embed(clean))
        rows = jnp.concatenate([noisy, jnp.stack([clean, clean])], axis=2)
        each = [model.hidden(row, mask=mask, positions=positions)[:, :24] for row in rows]
        return found, jnp.stack(each)

    found, expected = both(model)
    np.testing.assert_allclose(found, expected, atol=2e-4, rtol=1e-4)


def test_noise():
    seeds = jnp.arange(2000)
    block = NoiseConfig("block", 0.2, 0.6, floor=0.0)
    masked, rate = draw_noise(seeds, 24, 8, block)
    assert (rate >= 0.2).all() and (rate <= 0.6).all()
    assert (rate[:, :8] == rate[:, :1]).all() and (rate[:, 7] != rate[:, 8]).all()
    # 48,000 draws at a mean rate of 0.4: five standard errors.
    assert abs(masked.mean() - 0.4) < 5 * np.sqrt(0.24 / 48000) + 5 * 0.116 / np.sqrt(6000)
    _, whole = draw_noise(seeds, 24, 8, NoiseConfig("sequence", complementary=False))
    assert (whole == whole[:, :1]).all() and (whole >= 1e-3).all()
    # At least one token is masked, and none that is fixed.
    fixed = np.broadcast_to(np.arange(24) < 20, (2000, 24))
    rare = NoiseConfig("sequence", 0.0, 0.01, floor=0.0)
    masked, _ = draw_noise(seeds, 24, 8, rare, jnp.asarray(~fixed))
    assert (masked.sum(1) >= 1).all() and not masked[fixed].any()
    again, _ = draw_noise(seeds[5:6], 24, 8, block)
    np.testing.assert_array_equal(again[0], draw_noise(seeds, 24, 8, block)[0][5])


def test_noise_from_a_place_on():
    """Blocks decoded from the left; their second copy begins half a block earlier or later."""
    config = NoiseConfig(suffix=0.5)
    masked, rate = draw_noise(jnp.arange(500), 24, 8, config)
    first, second = np.asarray(noisy_copies(masked, jnp.ones_like(masked), 8, config)).reshape(
        2, 500, 3, 8
    )
    count = first.sum(-1, keepdims=True)
    ordered = (first == (np.arange(8) >= 8 - count)).all(-1)
    # Half of them, and of the others those that chance has ordered: few, all short or long.
    assert 0.5 < ordered.mean() < 0.72
    wanted = np.maximum(np.round(np.asarray(rate).reshape(500, 3, 8)[..., :1] * 8), 1)
    assert (np.abs(count - wanted)[ordered] <= 1).mean() > 0.9
    moved = (count + 3) % 8 + 1
    expected = np.where(ordered[..., None], np.arange(8) >= 8 - moved, ~first)
    np.testing.assert_array_equal(second, expected)


def test_a_token_is_scored_where_it_is_nearest():
    model = load_case_model(ROOT / "sdar_tiny", 4)
    masked = np.array([[[0, 1, 1, 1, 1, 0, 0, 1]], [[0, 0, 0, 1, 0, 1, 1, 0]]], bool)
    hidden = np.broadcast_to(np.arange(2)[:, None, None, None], (2, 1, 8, 3)).astype(np.float32)
    rows, scored, before = scored_rows(model, jnp.asarray(hidden), jnp.asarray(masked))
    np.testing.assert_array_equal(scored[0], [0, 1, 1, 1, 1, 1, 1, 1])
    np.testing.assert_array_equal(before[0, 1:], [0, 1, 0, 0, 0, 1, 1])
    np.testing.assert_array_equal(rows[0, 1:, 0], [0, 0, 1, 0, 1, 1, 0])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"nearness": 0.0}, r"nearness must be in \(0, 1\], got 0.0"),
        ({"noise": NoiseConfig(), "weighting": "inverse_rate"}, "no single rate"),
        ({"distil": 1.5}, r"distil must be in \[0, 1\], got 1.5"),
        ({"chunk_rows": 0}, "chunk_rows must be at least 1"),
        ({"weighting": "sum"}, "unknown loss weighting 'sum'"),
    ],
)
def test_impossible_losses(fields, words):
    with pytest.raises(ValueError, match=words):
        BlockLossConfig(**fields)


DIFFUSION = DiffusionConfig(8, 250, logit_shift=True)


def causal_model():
    config = load_case_model(ROOT / "sdar_tiny", 4).config
    small = {"family": "qwen3", "num_layers": 1, "diffusion": None, "tie_word_embeddings": True}
    return Decoder.random(dataclasses.replace(config, **small), seed=1)


def test_adapter_files(tmp_path):
    model, lora = causal_model(), LoraConfig(2, 4.0, ("q", "down"))
    weights = lora_weights(model, lora, 0)
    same = adapted(model, weights, lora, DIFFUSION)
    np.testing.assert_array_equal(same.layers[0].q.kernel[...], model.layers[0].q.kernel[...])
    moved = jax.tree.map(lambda leaf: leaf + 0.25, weights)
    path = tmp_path / "adapter.safetensors"
    save_adapter(path, moved, model, lora, DIFFUSION, dtype=jnp.float32)
    loaded = load_adapter(path, model)
    a, b = (np.asarray(moved[f"layers.0.q.{part}"], np.float64) for part in "ab")
    kernel = np.asarray(model.layers[0].q.kernel[...], np.float64) + 2 * a @ b
    np.testing.assert_allclose(loaded.layers[0].q.kernel[...], kernel, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(loaded.embedding[250], moved[MASK_EMBEDDING])
    np.testing.assert_array_equal(loaded.embedding[:250], model.embedding[:250])
    assert loaded.config.diffusion == DIFFUSION
    with pytest.raises(ValueError, match="was trained for another model"):
        load_adapter(path, Decoder.random(model.config, seed=2))
    with pytest.raises(FileNotFoundError, match="no block-diffusion weights at"):
        load_adapter(tmp_path / "none", model)
    with pytest.raises(ValueError, match=r"missing .*mask_embedding.*unexpected .*'x'"):
        adapted(model, {"x": a}, lora, DIFFUSION)


def test_it_learns_and_resumes_to_the_same_bits(tmp_path):
    """Text that repeats: what is masked can be told from what is not."""
    rng = np.random.default_rng(0)
    text = [np.tile(rng.integers(3, 240, 5), 14) for _ in range(24)]
    windows, held_out = pack(text[:20], 32, None), pack(text[:4], 32, None)
    config = BlockTrainConfig(
        steps=30, batch=8, micro_batch=4, learning_rate=2e-2, save_every=7, diffusion=DIFFUSION,
        loss=BlockLossConfig(remat=False, distil=0.1), lora=LoraConfig(8),
    )  # fmt: skip
    records = []

    def run(name, stop=None):
        class Stopped(Exception):
            pass

        def report(progress):
            records.append(progress.record)
            if progress.record["step"] == stop:
                raise Stopped

        trainer = BlockTrainer(causal_model(), config, windows, held_out, tmp_path / name)
        try:
            return trainer.run(report)
        except Stopped:
            return None

    whole = run("whole")
    assert records[-1]["held_out_loss"] < 0.7 * records[0]["held_out_loss"]
    run("stopped", stop=17)
    resumed = run("stopped")
    bits = lambda state: [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]
    assert bits(resumed) == bits(whole)
