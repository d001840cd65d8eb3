"""Two GPUs draw the tokens of one, each fetching its own heads' blocks."""

import jax
import numpy as np
import pytest

from sparda_jax.config import EngineConfig, SamplingParams, SparseConfig
from sparda_jax.engine.generate import Engine
from sparda_jax.forecast.projection import Forecast
from sparda_jax.models.decoder import Decoder
from sparda_jax.sharding import distribute, make_mesh
from tests.gpu.models import small_model

pytestmark = pytest.mark.gpu

CONFIG = small_model(1000)
PROMPTS = [
    np.random.default_rng(size).integers(0, 1000, size).tolist() for size in (1700, 64, 1023)
]


def test_two_gpus_draw_the_tokens_of_one():
    """Float32, 150 greedy tokens: blocks fill and are written back to both parts of the pool."""
    if len(jax.devices()) < 2:
        pytest.skip("one GPU")
    sparse = SparseConfig(local_blocks=2, budget_blocks=8)
    found = []
    for devices in (1, 2):
        model, forecast = Decoder.random(CONFIG, seed=3), Forecast.random(CONFIG, seed=4)
        if devices > 1:
            mesh = make_mesh(model=devices)
            distribute(model, mesh)
            distribute(forecast, mesh)
        config = EngineConfig(mode="sparda", offload="host", prefill_chunk=512)
        engine = Engine(model, sparse=sparse, config=config, forecast=forecast)
        with jax.default_matmul_precision("highest"):
            results, report = engine.generate(PROMPTS, SamplingParams(max_new_tokens=150))
        assert report.fetched_runs > 0 and report.written_back_runs > 0
        found.append(([result.tokens for result in results], report.fetched_runs))
    assert found[1] == found[0]
