"""A tiny model whose sequences span many small blocks, and prompts for it."""

import jax
import numpy as np
import pytest

from pallas_kernels.geometry import BlockGeometry
from sparda_jax.config import EngineConfig, ModelConfig, RopeConfig, SparseConfig
from sparda_jax.engine.generate import Engine
from sparda_jax.forecast.projection import Forecast
from sparda_jax.models.decoder import Decoder
from sparda_jax.sparse.infinigen import InfiniGen, calibrate

VOCABULARY = 97
MAX_LENGTH = 256


@pytest.fixture(scope="session")
def model() -> Decoder:
    config = ModelConfig(
        family="llama",
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope=RopeConfig(16),
        max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    return Decoder.random(config, seed=3)


@pytest.fixture(scope="session")
def sparse() -> SparseConfig:
    return SparseConfig(
        geometry=BlockGeometry(8, 4, 2), init_blocks=1, local_blocks=2, budget_blocks=6
    )


@pytest.fixture(scope="session")
def forecast(model) -> Forecast:
    return Forecast.random(model.config, seed=4)


@pytest.fixture(scope="session")
def infinigen(model) -> InfiniGen:
    text = np.random.default_rng(5).integers(0, VOCABULARY, (2, 128)).astype(np.int32)
    with jax.transfer_guard("allow"):
        return calibrate(model, text)


@pytest.fixture(scope="module")
def make_engine(model, sparse, forecast, infinigen):
    """Engines by their settings; equal settings share one and its compiled programs."""
    engines = {}

    def make(sparse=sparse, model=model, *, fresh=False, **config) -> Engine:
        settings = {"prefill_chunk": 16, "steps_per_call": 4} | config
        key = (sparse, id(model), *sorted(settings.items()))
        if fresh or key not in engines:
            engines[key] = Engine(
                model,
                sparse=sparse,
                config=EngineConfig(**settings),
                forecast=forecast if settings.get("mode") == "sparda" else None,
                infinigen=infinigen if settings.get("mode") == "infinigen" else None,
            )
        return engines[key]

    return make


@pytest.fixture
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(11)
    return [rng.integers(0, VOCABULARY, size).tolist() for size in (101, 37, 64)]


@pytest.fixture(autouse=True)
def no_implicit_transfers():
    """An implicit transfer is this engine's worst bug: every one is an error here."""
    with jax.transfer_guard("disallow"):
        yield
