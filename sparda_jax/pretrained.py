"""`from_pretrained`: a checkpoint with all that belongs to it, in one line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from sparda_jax.checkpoints.load import load_checkpoint
from sparda_jax.checkpoints.names import Path as ParameterPath
from sparda_jax.checkpoints.names import Stored
from sparda_jax.checkpoints.progress import LoadReport
from sparda_jax.checkpoints.safetensors import SafetensorsSource, read_json
from sparda_jax.config import ModelConfig, SparseConfig
from sparda_jax.forecast.files import Waiting
from sparda_jax.forecast.projection import Forecast
from sparda_jax.huggingface_policy import parse_sparse_config
from sparda_jax.models.decoder import Decoder
from sparda_jax.tokenization import Tokenizer


@dataclass(frozen=True)
class Pretrained:
    """A checkpoint, loaded.

    Attributes:
        model: the decoder.
        tokenizer: None where the checkpoint has none.
        forecast: SparDA's projections; None where there are none.
        sparse: the selection that the Forecast, else the checkpoint, was trained with; None where
            neither says.
        report: what loading the model took.
    """

    model: Decoder
    tokenizer: Tokenizer | None
    forecast: Forecast | None
    sparse: SparseConfig | None
    report: LoadReport

    @property
    def config(self) -> ModelConfig:
        """Shape and arithmetic of the model."""
        return self.model.config


def from_pretrained(
    model: str | Path = "default",
    *,
    forecast: str | Path | None = None,
    mesh: Mesh | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    importance: bool = True,
    overrides: Mapping[str, Any] | None = None,
    verify_forecast: bool = True,
    cache_dir: str | Path | None = None,
    progress: bool | None = None,
) -> Pretrained:
    """Loads a checkpoint.

        loaded = sparda_jax.from_pretrained("org/name", mesh=make_mesh(model=2))

    Args:
        model: folder, GGUF file, hub id or "default"; see `load_checkpoint`.
        forecast: file with Forecast weights, or "default" for those that ship with the default
            model; None: those inside the checkpoint, where it has some.
        mesh: several devices; see `sparda_jax.sharding`. None: the default device.
        dtype: of the parameters, and so of the computation and the KV cache.
        importance: see `load_checkpoint`.
        overrides: see `load_checkpoint`.
        verify_forecast: False accepts a Forecast file that does not name its base model.
        cache_dir: where the default model is kept; None: the user's cache.
        progress: show a line; None: where standard error is a terminal.

    Raises:
        FileNotFoundError: nothing of that name, or a part of it is missing.
        ValueError: damaged files; weights that do not fit the config or, a Forecast, the model; a
            mesh that does not divide the model; too little memory. One line, before weights are
            read.
        NotImplementedError: a model this package does not compute.
        ImportError: a hub id or a GGUF without the package that reads it.
    """
    waiting = Waiting(forecast, verify_base=verify_forecast)
    policy: list[SparseConfig | None] = [None]

    def look(config: ModelConfig, where: Mapping[ParameterPath, Stored], source: Any) -> None:
        """What may refuse the checkpoint besides its weights."""
        if isinstance(source, SafetensorsSource):
            fields = read_json(source.directory / "config.json") | dict(overrides or {})
            policy[0] = parse_sparse_config(fields)
        waiting.look(config, where, source)

    loaded = load_checkpoint(
        model,
        dtype=dtype,
        mesh=mesh,
        importance=importance,
        overrides=overrides,
        cache_dir=cache_dir,
        look=look,
        progress=progress,
    )
    own = waiting.build(loaded.model, mesh)
    sparse = waiting.sparse or policy[0]
    return Pretrained(loaded.model, loaded.tokenizer, own, sparse, loaded.report)
