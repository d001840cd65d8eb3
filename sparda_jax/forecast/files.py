"""Saves and loads a `Forecast` next to any checkpoint of its base model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from sparda_jax.assets import default_forecast
from sparda_jax.checkpoints.assemble import TensorSource
from sparda_jax.checkpoints.forecast import (
    FIRST,
    future_name,
    model_fingerprint,
    read_forecast,
    read_own_forecast,
    read_policy,
    source_fingerprint,
    write_forecast,
)
from sparda_jax.checkpoints.names import Path as ParameterPath
from sparda_jax.checkpoints.names import Stored
from sparda_jax.checkpoints.safetensors import SafetensorsSource
from sparda_jax.config import ModelConfig, SparseConfig
from sparda_jax.forecast.projection import Forecast
from sparda_jax.models.decoder import Decoder
from sparda_jax.sharding import place_on


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
    lookahead: int = 1,
) -> None:
    """Writes the projections, their policy and the base model's fingerprint, atomically.

    Args:
        path: of the safetensors file.
        forecast: the projections.
        model: the decoder they belong to.
        sparse: the policy they were trained for.
        dtype: of the stored values; None: the projections' own.
        lookahead: that they were trained for.
    """
    kernels = {FIRST: forecast.first.kernel}
    kernels |= {future_name(i): layer.kernel for i, layer in enumerate(forecast.layers)}
    tensors = {
        name: np.asarray(kernel[...].T if dtype is None else kernel[...].T.astype(dtype))
        for name, kernel in kernels.items()
    }
    write_forecast(path, tensors, sparse, model_fingerprint(model), lookahead)


def load_forecast(
    path: str | Path,
    model: Decoder,
    *,
    dtype: DTypeLike | None = None,
    verify_base: bool = True,
    lookahead: int = 1,
) -> tuple[Forecast, SparseConfig | None]:
    """Reads projections for a model.

    Args:
        path: a safetensors file with the published names; "default": the weights that ship with us,
            for the default model.
        model: the decoder they are meant for.
        dtype: of the parameters; None: the model's.
        verify_base: False: do not compare fingerprints, for weights of other origin that name no
            base model.
        lookahead: layers ahead that they will select for; the engine's is 1.

    Returns:
        The projections, and the policy they were trained for (None where the file names none).

    Raises:
        FileNotFoundError: no such file.
        sparda_jax.assets.AssetError: "default", in a copy of the package without weights.
        ValueError: weights of another base model or for another lookahead; missing, unexpected or
            misshapen tensors, all in one message.
    """
    config = model.config
    path = default_forecast() if path == "default" else path
    fingerprint = model_fingerprint(model) if verify_base else None
    tensors, sparse = read_forecast(path, config, fingerprint, lookahead)
    return _build(tensors, config, model.dtype if dtype is None else dtype), sparse


class Waiting:
    """Projections that belong to a checkpoint which is only about to be loaded.

    Args:
        path: as in `load_forecast`; None: those in the checkpoint's own folder, where it has some.
        verify_base: see `load_forecast`.

    Attributes:
        sparse: the policy they were trained for; None where nothing says.
    """

    def __init__(self, path: str | Path | None, *, verify_base: bool = True):
        self._path = default_forecast() if path == "default" else path
        self._verify = verify_base
        self._tensors: Mapping[str, np.ndarray] | None = None
        self.sparse: SparseConfig | None = None

    def look(
        self, config: ModelConfig, where: Mapping[ParameterPath, Stored], source: TensorSource
    ) -> None:
        """Reads them, given the checkpoint; see `sparda_jax.checkpoints.assemble.Look`.

        Raises:
            FileNotFoundError: no such file.
            ValueError: as `load_forecast`.
        """
        if isinstance(source, SafetensorsSource):
            self._tensors = read_own_forecast(source.directory, config)
        if self._path is not None:
            base = source_fingerprint(config, where, source) if self._verify else None
            self._tensors, self.sparse = read_forecast(self._path, config, base)

    def build(self, model: Decoder, mesh: Mesh | None) -> Forecast | None:
        """The projections for the loaded model; None where there are none."""
        if self._tensors is None:
            return None
        return _build(self._tensors, model.config, model.dtype, mesh)


def _build(
    tensors: Mapping[str, np.ndarray],
    config: ModelConfig,
    dtype: DTypeLike,
    mesh: Mesh | None = None,
) -> Forecast:
    forecast = nnx.eval_shape(lambda: Forecast.random(config, dtype=dtype))

    def put(name: str, path: tuple[str, ...]) -> jax.Array:
        value = jnp.asarray(tensors[name].T, dtype)
        return value if mesh is None else jax.device_put(value, place_on(mesh)(path, value.shape))

    forecast.first.kernel.set_value(put(FIRST, ("first", "kernel")))
    for index, layer in enumerate(forecast.layers):
        layer.kernel.set_value(put(future_name(index), ("layers", "kernel")))
    return forecast
