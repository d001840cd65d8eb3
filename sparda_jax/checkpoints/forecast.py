"""Forecast weight files: safetensors under the published names, with policy and base model.

The metadata hold the sparse configuration the projections were trained for and the fingerprint of
the model they belong to. Here it is all arrays by name; `sparda_jax.forecast.files` makes modules
of them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels.geometry import BlockGeometry
from sparda_jax.checkpoints.assemble import (
    SOURCE_DTYPES,
    TensorHeader,
    TensorSource,
    abstract_parameters,
    located,
    read_values,
)
from sparda_jax.checkpoints.names import FORECAST, Stored, published_name
from sparda_jax.checkpoints.names import Path as ParameterPath
from sparda_jax.checkpoints.safetensors import (
    SafetensorsSource,
    read_headers,
    read_json,
    read_tensors,
)
from sparda_jax.checkpoints.whole import check_base, check_finite, read_header, write_whole
from sparda_jax.config import ModelConfig, SparseConfig
from sparda_jax.models.decoder import Decoder

# The one key of the metadata: safetensors writes several in an order that changes from run to run,
# and equal weights should be equal files.
KEY = "sparda_jax.forecast"
VERSION = 1
FIRST = "model.layers.0.self_attn.q_curr_proj.weight"
# Values of each parameter that go into the fingerprint.
_SAMPLE = 1024


def future_name(layer: int) -> str:
    """Published name of the projection that runs in `layer` (spec/sparda.md, sec. 1.2)."""
    return f"model.layers.{layer}.self_attn.q_future_proj.weight"


def model_fingerprint(model: Decoder) -> str:
    """SHA-256 of the head counts and of an even sample of every weight, in bfloat16.

    Rounded to bfloat16 so that a model loaded as float32 and as bfloat16 is the same one; sampled
    (at most 1024 values a tensor) so that it costs no time at 8 billion weights.
    """
    flat = nnx.to_flat_state(nnx.state(model))

    def sample(value: jax.Array) -> np.ndarray:
        step = max(1, value.size // _SAMPLE)
        return np.asarray(value.reshape(-1)[::step].astype(jnp.bfloat16))

    values = [(path, p.get_value()) for path, p in flat]
    return _fingerprint(model.config, [(path, v.shape, partial(sample, v)) for path, v in values])


def checkpoint_fingerprint(folder: Path) -> str:
    """`source_fingerprint` of a checkpoint folder."""
    with SafetensorsSource(folder) as source:
        config = ModelConfig.from_huggingface(read_json(folder / "config.json"))
        return source_fingerprint(*located(config, source), source)


def source_fingerprint(
    config: ModelConfig, where: Mapping[ParameterPath, Stored], source: TensorSource
) -> str:
    """`model_fingerprint` of what a checkpoint holds, without a device or the whole of a tensor.

    Args:
        config: with nothing left open.
        where: each parameter lies; both as `located` gives them.
        source: the checkpoint.
    """
    shapes = {path: p.shape for path, p in abstract_parameters(config).items()}

    def sample(path: ParameterPath) -> np.ndarray:
        size = math.prod(shapes[path])
        picked = np.arange(0, size, max(1, size // _SAMPLE))
        return read_values(source, where[path], np.unravel_index(picked, shapes[path])).astype(
            jnp.bfloat16
        )

    return _fingerprint(config, [(p, shapes[p], partial(sample, p)) for p in shapes])


def _fingerprint(
    config: ModelConfig,
    parameters: Iterable[tuple[ParameterPath, tuple[int, ...], Callable[[], np.ndarray]]],
) -> str:
    digest = hashlib.sha256()
    digest.update(f"{config.num_heads} {config.num_kv_heads} {config.head_dim}".encode())
    named = [(published_name(config, entry[0]), str(entry[0]), *entry[1:]) for entry in parameters]
    for name, _, shape, sample in sorted(named, key=lambda entry: entry[:2]):
        digest.update(f"{name} {shape}".encode())
        digest.update(sample().tobytes())
    return digest.hexdigest()


def write_forecast(
    path: str | Path,
    tensors: Mapping[str, np.ndarray],
    sparse: SparseConfig,
    fingerprint: str,
    lookahead: int = 1,
) -> None:
    """Writes a file that is either whole or not there.

    Args:
        path: of the file; an older one is replaced.
        tensors: by published name, `[out, in]`.
        sparse: what the projections were trained for.
        fingerprint: of the base model.
        lookahead: layers between the state that a projection reads and the layer it selects for.
    """
    header: dict[str, Any] = {
        "version": VERSION,
        "base_model": fingerprint,
        "sparse": dataclasses.asdict(sparse),
    }
    if lookahead != 1:
        header["lookahead"] = lookahead
    write_whole(path, tensors, KEY, header)


def read_forecast(
    path: str | Path, config: ModelConfig, fingerprint: str | None, lookahead: int = 1
) -> tuple[dict[str, np.ndarray], SparseConfig | None]:
    """Reads a file and checks that it belongs to the model.

    Args:
        path: of the file.
        config: shape of the base model.
        fingerprint: of the base model; None: the file's is not looked at, nor asked for.
        lookahead: layers ahead that it will be used for; the engine's is 1.

    Returns:
        Tensors by published name, `[out, in]`; the file's sparse configuration, None where it has
        no metadata (weights of other origin).

    Raises:
        FileNotFoundError: no such file.
        ValueError: another base model, or none named; another lookahead; all tensors that do not
            fit, in one message; damaged metadata.
        NotImplementedError: a later version of the format.
    """
    path = Path(path)
    header = read_header(path, KEY, VERSION, "Forecast weights")
    if fingerprint is not None:
        if header is None:
            raise ValueError(f"{path} does not say which model it belongs to")
        check_base(path, header, fingerprint)
    trained = 1 if header is None else header.get("lookahead", 1)
    if trained != lookahead:
        raise ValueError(
            f"{path} was trained to look {trained} layers ahead, not {lookahead}; the engine looks "
            f"1 ahead, others are for comparison"
        )
    check_forecast(path, read_headers(path), config)
    tensors = dict(read_tensors(path))
    check_finite(path, tensors)
    return tensors, None if header is None else _parse_sparse(path, header)


def read_own_forecast(folder: Path, config: ModelConfig) -> dict[str, np.ndarray] | None:
    """Forecast tensors in a model's own checkpoint folder; None where there are none.

    Raises:
        ValueError: some are missing, misshapen, of a wrong type or not finite.
    """
    with SafetensorsSource(folder) as source:
        found = {name: h for name, h in source.headers.items() if FORECAST.match(name)}
        if not found:
            return None
        check_forecast(folder, found, config)
        tensors = {name: source.read(name, (slice(None),)) for name in found}
    check_finite(folder, tensors)
    return tensors


def read_policy(path: str | Path) -> SparseConfig | None:
    """What the projections of a file were trained for; None where it does not say.

    Raises:
        FileNotFoundError: no such file.
        ValueError: damaged metadata.
        NotImplementedError: a later version of the format.
    """
    path = Path(path)
    header = read_header(path, KEY, VERSION, "Forecast weights")
    return None if header is None else _parse_sparse(path, header)


def check_forecast(path: Path, found: Mapping[str, TensorHeader], config: ModelConfig) -> None:
    """Compares a file's projections with what the model needs.

    Raises:
        ValueError: names all missing, unexpected, misshapen and wrongly typed tensors.
    """
    shape = (config.num_kv_heads * config.head_dim, config.hidden_size)
    expected = [FIRST, *(future_name(layer) for layer in range(config.num_layers))]
    problems = [f"missing {name}" for name in expected if name not in found]
    problems += [f"unexpected {name}" for name in found if name not in expected]
    for name in expected:
        header = found.get(name)
        if header is not None and tuple(header.shape) != shape:
            problems.append(f"{name} has shape {list(header.shape)}, expected {list(shape)}")
        if header is not None and header.dtype not in SOURCE_DTYPES:
            problems.append(f"{name} has dtype {header.dtype}, not one of {SOURCE_DTYPES}")
    if problems:
        raise ValueError(f"{path} does not fit the model: {'; '.join(problems)}")


def _parse_sparse(path: Path, header: dict[str, Any]) -> SparseConfig:
    try:
        fields = header["sparse"]
        return SparseConfig(**{**fields, "geometry": BlockGeometry(**fields["geometry"])})
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} has a damaged sparse configuration: {error}") from None
