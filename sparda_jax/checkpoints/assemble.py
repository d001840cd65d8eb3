"""Builds a decoder from named tensors, one at a time; says everything that is wrong at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from sparda_jax.checkpoints.names import (
    Path,
    checkpoint_name,
    is_buffer,
    is_transposed,
    nnx_path,
)
from sparda_jax.config import ModelConfig
from sparda_jax.models.decoder import Decoder

SOURCE_DTYPES = ("bfloat16", "float16", "float32")


class TensorHeader(NamedTuple):
    """What is known of a checkpoint tensor before it is read.

    Attributes:
        shape: as stored, `[out, in]` for projections.
        dtype: numpy's name of it.
    """

    shape: tuple[int, ...]
    dtype: str


def with_head_decided(config: ModelConfig, names: Iterable[str]) -> ModelConfig:
    """Where the config does not say whether the head is tied, `lm_head.weight` does."""
    if config.tie_word_embeddings is not None:
        return config
    return dataclasses.replace(config, tie_word_embeddings="lm_head.weight" not in set(names))


def check_headers(config: ModelConfig, found: Mapping[str, TensorHeader]) -> None:
    """Compares a checkpoint's tensors with what the model needs.

    Args:
        config: with `tie_word_embeddings` decided.
        found: every tensor of the checkpoint by its published name.

    Raises:
        ValueError: names all missing, unexpected, misshapen and wrongly typed tensors.
    """
    expected = {
        checkpoint_name(path): tuple(reversed(p.shape) if is_transposed(path) else p.shape)
        for path, p in _abstract_parameters(config)
    }
    found = {name: header for name, header in found.items() if not is_buffer(name)}
    problems = [f"missing {name}" for name in expected if name not in found]
    problems += [f"unexpected {name}" for name in found if name not in expected]
    for name, header in found.items():
        if name in expected and tuple(header.shape) != expected[name]:
            problems.append(
                f"{name} has shape {list(header.shape)}, expected {list(expected[name])}"
            )
        if name in expected and header.dtype not in SOURCE_DTYPES:
            problems.append(f"{name} has dtype {header.dtype}, not one of {SOURCE_DTYPES}")
    if problems:
        raise ValueError(f"checkpoint does not fit the model: {'; '.join(problems)}")


def assemble(
    config: ModelConfig,
    tensors: Iterable[tuple[str, np.ndarray]],
    *,
    dtype: DTypeLike = jnp.float32,
    check_finite: bool = True,
) -> Decoder:
    """A decoder from (published name, array as stored) pairs, consumed one by one.

    At no time are there two copies of more than one tensor.

    Args:
        config: the model; the head's tying may be left open.
        tensors: for example `gguf` tensors, or those of safetensors files.
        dtype: of the parameters.
        check_finite: refuse NaN and infinity, also those that arise in the conversion.

    Raises:
        ValueError: names all missing, unexpected, misshapen, wrongly typed, repeated and (with
            `check_finite`) non-finite tensors.
    """
    found: dict[str, TensorHeader] = {}
    values: dict[Path, jax.Array] = {}
    broken: list[str] = []
    for name, array in tensors:
        if name in found:
            broken.append(f"{name} occurs twice")
        found[name] = TensorHeader(array.shape, array.dtype.name)
        path = nnx_path(name)
        if path is None or array.dtype.name not in SOURCE_DTYPES:
            continue  # reported below, with all others
        value, finite = _convert(array, jnp.dtype(dtype), is_transposed(path))
        if check_finite and not finite:
            broken.append(f"{name} has values that are not finite in {jnp.dtype(dtype).name}")
        values[path] = value
    config = with_head_decided(config, found)
    if _is_redundant_head(config, values):
        found.pop("lm_head.weight")
    check_headers(config, found)
    if broken:
        raise ValueError(f"checkpoint is damaged: {'; '.join(broken)}")
    graph, state = nnx.split(nnx.eval_shape(partial(Decoder.random, config, dtype=dtype)))
    flat = [(path, p.replace(values.pop(path))) for path, p in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def _abstract_parameters(config: ModelConfig) -> Iterator[tuple[Path, jax.ShapeDtypeStruct]]:
    state = nnx.state(nnx.eval_shape(partial(Decoder.random, config)))
    for path, parameter in nnx.to_flat_state(state):
        yield path, parameter.get_value()


def _is_redundant_head(config: ModelConfig, values: Mapping[Path, jax.Array]) -> bool:
    """Some tied checkpoints store the embedding a second time, as the head."""
    head, embedding = values.get(("head", "kernel")), values.get(("embedding",))
    if not config.tie_word_embeddings or head is None or embedding is None:
        return False
    return head.shape[::-1] == embedding.shape and bool(jnp.array_equal(head.T, embedding))


def _convert(array: np.ndarray, dtype: jnp.dtype, transpose: bool) -> tuple[jax.Array, bool]:
    value, finite = _convert_on_device(jnp.asarray(array), dtype, transpose and array.ndim == 2)
    return value, bool(finite)


@partial(jax.jit, static_argnums=(1, 2))
def _convert_on_device(
    array: jax.Array, dtype: jnp.dtype, transpose: bool
) -> tuple[jax.Array, jax.Array]:
    value = (array.T if transpose else array).astype(dtype)
    return value, jnp.isfinite(value).all()
