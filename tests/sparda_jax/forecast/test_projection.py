"""Sizes, initial values and the formula of the projections."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparda_jax.config import ModelConfig
from sparda_jax.forecast.projection import Forecast, parameter_count
from sparda_jax.models import Decoder


def test_share_of_the_parameters_of_the_8b_model():
    config = ModelConfig.preset("minicpm4.1-8b")
    model = nnx.eval_shape(lambda: Decoder.random(config, dtype=jnp.bfloat16))
    forecast = nnx.eval_shape(lambda: Forecast.random(config, dtype=jnp.bfloat16))
    # One of [4096, 256] a layer, and layer 0's own.
    assert parameter_count(forecast) == 33 * 4096 * 256
    assert 8.1e9 < parameter_count(model) < 8.3e9
    assert parameter_count(forecast) / parameter_count(model) < 0.005


def test_initial_values(tiny_config):
    forecast = Forecast.random(tiny_config, seed=5)
    kernels = [forecast.first.kernel[...]] + [layer.kernel[...] for layer in forecast.layers]
    assert len(kernels) == 4 and {k.shape for k in kernels} == {(24, 16)}
    values = np.concatenate([np.asarray(k).ravel() for k in kernels]) * np.sqrt(24)
    assert -1 <= values.min() < -0.98 and 0.98 < values.max() <= 1
    assert abs(values.std() - 3**-0.5) < 0.02  # uniform
    assert len(np.unique(values)) > 0.99 * values.size  # no two projections alike


def test_rotates_by_the_position_and_keeps_master_weights_float32(tiny_config):
    forecast = Forecast.random(tiny_config)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, 24)), jnp.bfloat16)
    angle = jnp.array([0.0, jnp.pi / 2])[None, :, None] * jnp.ones(8)
    out = forecast.first(x, jnp.cos(angle), jnp.sin(angle))
    assert out.dtype == jnp.float32 and out.shape == (1, 2, 2, 8)
    plain = np.asarray(x, np.float32) @ np.asarray(forecast.first.kernel[...])
    plain = plain.reshape(2, 2, 8)
    np.testing.assert_allclose(out[0, 0], plain[0], atol=1e-6)
    turned = np.concatenate([-plain[1, :, 4:], plain[1, :, :4]], axis=-1)
    np.testing.assert_allclose(out[0, 1], turned, atol=1e-6)
    low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), forecast.first)
    assert low(x, jnp.cos(angle), jnp.sin(angle)).dtype == jnp.bfloat16
