"""The weights that ship with us belong to the default model and know what it attends."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from sparda_jax.assets import default_forecast, load_excerpt
from sparda_jax.checkpoints.load import load_pretrained
from sparda_jax.config import SparseConfig
from sparda_jax.forecast.files import load_forecast
from sparda_jax.forecast.loss import LossConfig, forecast_loss
from sparda_jax.forecast.projection import Forecast


@pytest.mark.slow
def test_shipped_weights_find_what_the_default_model_attends(default_model_path):
    """On Python's documentation, which was not trained on."""
    model, tokenizer = load_pretrained(default_model_path)
    forecast, sparse = load_forecast("default", model)
    assert sparse == SparseConfig()
    assert (default_forecast().parent / "forecast.md").is_file()
    # Two free blocks of at most ten, so that a short text suffices.
    config = LossConfig(SparseConfig(budget_blocks=12), target="blocks", query_every=3)
    tokens = jnp.asarray(tokenizer.encode(load_excerpt())[3000:4280], jnp.int32)[None]
    loss = jax.jit(partial(forecast_loss, config=config))
    trained, now = loss(model, forecast, tokens)
    untrained, before = loss(model, Forecast.random(model.config), tokens)
    print(float(trained), float(untrained), float(now.recall), float(before.recall))
    assert trained < 0.6 * untrained
    assert now.recall > before.recall + 0.25
