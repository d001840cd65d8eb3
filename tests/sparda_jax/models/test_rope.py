import math

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from sparda_jax.checkpoints.safetensors import read_json
from sparda_jax.config import ModelConfig, RopeConfig
from sparda_jax.models.rope import apply_rope, inverse_frequencies, rope_at, rope_rows, rope_table

LONG = RopeConfig(
    head_dim=4,
    kind="longrope",
    original_max_position_embeddings=16,
    short_factor=(1.0, 2.0),
    long_factor=(3.0, 5.0),
    attention_factor=1.25,
)


@pytest.mark.parametrize(
    "case, length", [("tied_long", 512), ("untied_grow", 100), ("untied_short", 2048)]
)
def test_table_of_published_minicpm(case, length, data_dir):
    folder = data_dir / "sparda" / "minicpm_tiny" / case
    config = ModelConfig.from_huggingface(read_json(folder / "config.json"))
    expected = load_file(folder / "data.safetensors")
    rows = len(expected["rope_cos"])
    cos, sin = rope_table(config.rope, length)
    # An angle of 300 rad has a float32 spacing of 3e-5.
    np.testing.assert_allclose(cos[:rows], expected["rope_cos"], atol=4e-5)
    np.testing.assert_allclose(sin[:rows], expected["rope_sin"], atol=4e-5)


def test_requested_length_alone_decides_the_factors():
    plain = inverse_frequencies(RopeConfig(head_dim=4), 16)
    np.testing.assert_allclose(inverse_frequencies(LONG, 16), plain / [1.0, 2.0])
    np.testing.assert_allclose(inverse_frequencies(LONG, 17), plain / [3.0, 5.0])
    # All positions of the longer table change, also those below the original length.
    short, long = rope_table(LONG, 16)[0], rope_table(LONG, 17)[0]
    assert np.abs(short[1:] - long[1:16]).min(1).max() > 1e-3


def test_llama3_scaling_keeps_fast_waves_and_slows_the_others():
    config = RopeConfig(
        head_dim=64,
        theta=500000.0,
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    plain = inverse_frequencies(RopeConfig(head_dim=64, theta=500000.0), 8192)
    scaled = inverse_frequencies(config, 8192)
    wavelength = 2 * np.pi / plain
    np.testing.assert_array_equal(scaled[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
    np.testing.assert_allclose(scaled[wavelength > 8192], plain[wavelength > 8192] / 8)
    between = (wavelength >= 8192 / 4) & (wavelength <= 8192)
    assert between.any()
    assert (scaled[between] <= plain[between]).all()
    assert (scaled[between] >= plain[between] / 8).all()


def test_rows_of_the_table_are_the_computed_ones():
    positions = jnp.array([[3, 0, 31], [7, 7, 1]], jnp.int32)
    for ours, theirs in zip(
        rope_rows(rope_table(LONG, 32), positions), rope_at(LONG, positions, 32), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_rotation_is_complex_multiplication():
    rng = np.random.default_rng(0)
    config = RopeConfig(head_dim=8)
    x = rng.standard_normal((2, 5, 3, 8), dtype=np.float32)
    positions = jnp.asarray(rng.integers(0, 50, (2, 5)), jnp.int32)
    turned = np.asarray(apply_rope(jnp.asarray(x), *rope_at(config, positions, 64)))
    angle = np.asarray(positions)[..., None, None] * inverse_frequencies(config, 64)
    expected = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angle)
    np.testing.assert_allclose(turned[..., :4], expected.real, atol=1e-5)
    np.testing.assert_allclose(turned[..., 4:], expected.imag, atol=1e-5)
    assert apply_rope(jnp.asarray(x, jnp.bfloat16), *rope_at(config, positions, 64)).dtype == (
        jnp.bfloat16
    )


def test_yarn():
    """Fast channels stay, slow ones are divided by the factor, a ramp between (YaRN, sec. 3.2)."""
    given = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    base = {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 128,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }
    config = ModelConfig.from_huggingface(base | {"rope_scaling": given}).rope
    plain = ModelConfig.from_huggingface(base).rope
    ratio = inverse_frequencies(plain, 1) / inverse_frequencies(config, 1)
    turns = 32768 * inverse_frequencies(plain, 1) / (2 * math.pi)
    low, high = np.flatnonzero(turns >= 32)[-1], np.flatnonzero(turns <= 1)[0]
    np.testing.assert_allclose(ratio[: low + 1], 1)
    np.testing.assert_allclose(ratio[high:], 4)
    ramp = (np.arange(low, high + 1) - low) / (high - low)
    np.testing.assert_allclose(1 / ratio[low : high + 1], 1 - ramp + ramp / 4)
    cos, _ = rope_at(config, jnp.zeros((1,), jnp.int32), 1)
    np.testing.assert_allclose(cos, 0.1 * math.log(4) + 1, rtol=1e-6)
    with pytest.raises(ValueError, match="original_max_position_embeddings is missing"):
        ModelConfig.from_huggingface(base | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
