"""Saves and loads a `Forecast` next to any checkpoint of its base model."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from sparda_jax.assets import default_forecast
from sparda_jax.checkpoints.forecast import (
    FIRST,
    future_name,
    model_fingerprint,
    read_forecast,
    read_policy,
    write_forecast,
)
from sparda_jax.config import SparseConfig
from sparda_jax.forecast.projection import Forecast
from sparda_jax.models.decoder import Decoder


def forecast_policy(path: str | Path) -> SparseConfig | None:
    """What a file's projections were trained for, read without its weights.

    Args:
        path: as in `load_forecast`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: damaged metadata.
    """
    return read_policy(default_forecast() if path == "default" else path)


def save_forecast(
    path: str | Path,
    forecast: Forecast,
    model: Decoder,
    sparse: SparseConfig,
    *,
    dtype: DTypeLike | None = None,
) -> None:
    """Writes the projections, their policy and the base model's fingerprint, atomically.

    Args:
        path: of the safetensors file.
        forecast: the projections.
        model: the decoder they belong to.
        sparse: the policy they were trained for.
        dtype: of the stored values; None: the projections' own.
    """
    kernels = {FIRST: forecast.first.kernel}
    kernels |= {future_name(i): layer.kernel for i, layer in enumerate(forecast.layers)}
    tensors = {
        name: np.asarray(kernel[...].T if dtype is None else kernel[...].T.astype(dtype))
        for name, kernel in kernels.items()
    }
    write_forecast(path, tensors, sparse, model_fingerprint(model))


def load_forecast(
    path: str | Path,
    model: Decoder,
    *,
    dtype: DTypeLike | None = None,
    verify_base: bool = True,
) -> tuple[Forecast, SparseConfig | None]:
    """Reads projections for a model.

    Args:
        path: a safetensors file with the published names; "default": the weights that ship with us,
            for the default model.
        model: the decoder they are meant for.
        dtype: of the parameters; None: the model's.
        verify_base: False: do not compare fingerprints, for weights of other origin that name no
            base model.

    Returns:
        The projections, and the policy they were trained for (None where the file names none).

    Raises:
        FileNotFoundError: no such file.
        sparda_jax.assets.AssetError: "default", in a copy of the package without weights.
        ValueError: weights of another base model; missing, unexpected or misshapen tensors, all in
            one message.
    """
    config = model.config
    path = default_forecast() if path == "default" else path
    fingerprint = model_fingerprint(model) if verify_base else None
    tensors, sparse = read_forecast(path, config, fingerprint)
    dtype = model.dtype if dtype is None else dtype
    forecast = nnx.eval_shape(lambda: Forecast.random(config, dtype=dtype))
    forecast.first.kernel.set_value(jnp.asarray(tensors[FIRST].T, dtype))
    for index, layer in enumerate(forecast.layers):
        layer.kernel.set_value(jnp.asarray(tensors[future_name(index)].T, dtype))
    return forecast, sparse
