"""Saves and loads block-diffusion adapters next to any checkpoint of their base model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from sparda_jax.assets import default_block_diffusion
from sparda_jax.checkpoints.forecast import model_fingerprint
from sparda_jax.checkpoints.safetensors import read_tensors
from sparda_jax.checkpoints.whole import check_base, check_finite, read_header, write_whole
from sparda_jax.config import DiffusionConfig
from sparda_jax.diffusion.adapter import LoraConfig, Weights, adapted
from sparda_jax.models.decoder import Decoder

KEY = "sparda_jax.block_diffusion"
VERSION = 1


def save_adapter(
    path: str | Path,
    weights: Weights,
    model: Decoder,
    lora: LoraConfig | None,
    diffusion: DiffusionConfig,
    *,
    dtype: DTypeLike = jnp.bfloat16,
) -> None:
    """Writes an adapter, what it is for and the base model's fingerprint, atomically.

    Args:
        path: of the safetensors file.
        weights: of a training run.
        model: the decoder that was trained.
        lora: shape of the adapter; None: the weights are all of a model's.
        diffusion: of the model that comes out.
        dtype: of the stored values.
    """
    header = {
        "version": VERSION,
        "base_model": model_fingerprint(model),
        "lora": None if lora is None else dataclasses.asdict(lora),
        "diffusion": dataclasses.asdict(diffusion),
    }
    tensors = {name: np.asarray(value.astype(dtype)) for name, value in weights.items()}
    write_whole(path, tensors, KEY, header)


def read_adapter(
    path: str | Path, model: Decoder
) -> tuple[Weights, LoraConfig | None, DiffusionConfig]:
    """What `save_adapter` wrote, float32; arguments and errors as those of `load_adapter`."""
    path = default_block_diffusion() if path == "default" else Path(path)
    header = read_header(path, KEY, VERSION, "block-diffusion weights")
    if header is None:
        raise ValueError(f"{path} holds no block-diffusion adapter")
    check_base(path, header, model_fingerprint(model))
    try:
        fields = header["lora"]
        lora = fields and LoraConfig(**{**fields, "targets": tuple(fields["targets"])})
        diffusion = DiffusionConfig(**header["diffusion"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} has damaged metadata: {error}") from None
    weights = {name: jnp.asarray(array, jnp.float32) for name, array in read_tensors(path)}
    check_finite(path, weights)
    return weights, lora, diffusion


def load_adapter(path: str | Path, model: Decoder) -> Decoder:
    """The model as a block-diffusion model, by an adapter that was trained for it.

    Args:
        path: of a file that `save_adapter` wrote; "default": the one that ships with us, for the
            default model.
        model: the decoder it is meant for; it stays as it is.

    Raises:
        FileNotFoundError: no such file.
        sparda_jax.assets.AssetError: "default", in a copy of the package without weights.
        ValueError: an adapter of another base model, damaged or of other weights.
        NotImplementedError: a later version of the format.
    """
    return adapted(model, *read_adapter(path, model))
