"""A tiny model with its Forecast, skews and policy."""

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.geometry import BlockGeometry
from sparda_jax.config import DiffusionConfig, ModelConfig, RopeConfig, SparseConfig
from sparda_jax.forecast.projection import Forecast
from sparda_jax.models import Decoder
from sparda_jax.sparse.infinigen import calibrate


@pytest.fixture(scope="package")
def tiny():
    config = ModelConfig(
        family="llama",
        vocab_size=40,
        hidden_size=24,
        intermediate_size=32,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rope=RopeConfig(head_dim=8),
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    model = Decoder.random(config)
    tokens = np.random.default_rng(0).integers(0, 40, (2, 76)).astype(np.int32)
    return SimpleNamespace(
        config=config,
        model=model,
        forecast=Forecast.random(config, seed=1),
        skews=calibrate(model, jnp.asarray(tokens), channels=4),
        sparse=SparseConfig(BlockGeometry(4, 2, 2), 1, 1, budget_blocks=9),
        tokens=tokens,
        lengths=np.array([76, 53], np.int32),
    )


@pytest.fixture(scope="package")
def block_model(tiny):
    """Two layers of the same shape, for block diffusion; the last token is the mask."""

    def make(width, **facts):
        diffusion = DiffusionConfig(width, 39, **facts)
        return Decoder.random(dataclasses.replace(tiny.config, num_layers=2, diffusion=diffusion))

    return make
