"""Forecast weights of the original project, a torch file, as one of ours."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from sparda_jax.checkpoints.assemble import TensorHeader
from sparda_jax.checkpoints.forecast import (
    check_forecast,
    checkpoint_fingerprint,
    write_forecast,
)
from sparda_jax.checkpoints.safetensors import read_json
from sparda_jax.checkpoints.torch_pickle import read_torch_file
from sparda_jax.config import ModelConfig, SparseConfig

# However a state dict was nested or wrapped, a name ends like this.
_NAME = re.compile(r"(?:^|\.)(layers\.\d+\.self_attn\.q_(?:future|curr)_proj\.weight)$")


def convert_forecast(
    weights: Path, folder: Path, out: Path, sparse: SparseConfig
) -> dict[str, np.ndarray]:
    """Reads projections, checks them against the base model and writes them.

    Args:
        weights: of `torch.save`; tensors in nested dicts are found by their names' ends.
        folder: checkpoint of the base model.
        out: safetensors file.
        sparse: what the projections were trained for.

    Returns:
        What was written.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a damaged or malicious file; tensors that do not fit, in one message.
        NotImplementedError: an old torch format.
    """
    tensors: dict[str, np.ndarray] = {}
    for name, array in read_torch_file(weights).items():
        match = _NAME.search(name)
        if match is None:
            continue
        if f"model.{match[1]}" in tensors:
            raise ValueError(f"{weights} holds {match[1]} twice")
        tensors[f"model.{match[1]}"] = array
    config = ModelConfig.from_huggingface(read_json(folder / "config.json"))
    headers = {name: TensorHeader(a.shape, a.dtype.name) for name, a in tensors.items()}
    check_forecast(weights, headers, config)
    if not all(np.isfinite(array.astype(np.float32)).all() for array in tensors.values()):
        raise ValueError(f"{weights} holds values that are not finite")
    write_forecast(out, tensors, sparse, checkpoint_fingerprint(folder))
    return tensors
