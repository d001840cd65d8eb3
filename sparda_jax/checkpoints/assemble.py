"""Builds a decoder from the tensors of a checkpoint; says everything that is wrong at once.

The decoder's parameters drive it: each is read from wherever it lies, one device shard at a time,
and transposed and cast on its device. All names, shapes and types are checked before.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding
from jax.typing import DTypeLike

from host_offload.memory import check_budget, free_device_bytes
from sparda_jax.checkpoints.names import (
    FORECAST,
    IMPORTANCE,
    Path,
    Stored,
    is_buffer,
    layout,
    published_name,
)
from sparda_jax.config import ModelConfig
from sparda_jax.models.decoder import Decoder
from sparda_jax.sharding import check_mesh, place_on

SOURCE_DTYPES = ("bfloat16", "float16", "float32")
# How many problems one message names.
_NAMED = 12
# Bytes on their way to a device before reading waits for them: bounds host memory.
_IN_FLIGHT = 256 << 20

# Of a part of a tensor: slices, or the places of single values on each axis.
Index = tuple[slice, ...] | tuple[np.ndarray, ...]
Place = Callable[[Path, tuple[int, ...]], Sharding]


class TensorHeader(NamedTuple):
    """What is known of a checkpoint tensor before it is read.

    Attributes:
        shape: as stored, `[out, in]` for projections.
        dtype: numpy's name of it.
        file: where it lies.
        start: its first byte there.
    """

    shape: tuple[int, ...]
    dtype: str
    file: str = ""
    start: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


class TensorSource(Protocol):
    """A checkpoint: what is in it, and its tensors by parts."""

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """Every tensor by its published name."""
        ...

    def read(self, name: str, index: Index) -> np.ndarray:
        """Part of a tensor."""
        ...


# Given the completed config, where each parameter lies, and the checkpoint.
Look = Callable[[ModelConfig, Mapping[Path, Stored], TensorSource], None]


@dataclasses.dataclass(frozen=True)
class ArraySource:
    """Tensors in memory, by published name."""

    arrays: Mapping[str, np.ndarray]

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """See `TensorSource`."""
        return {n: TensorHeader(a.shape, a.dtype.name) for n, a in self.arrays.items()}

    def read(self, name: str, index: Index) -> np.ndarray:
        """See `TensorSource`."""
        return self.arrays[name][index]


def completed(config: ModelConfig, names: Iterable[str]) -> ModelConfig:
    """What the config does not say, the tensors do: a tied head, NOSA's importance."""
    names = set(names)
    tied = config.tie_word_embeddings
    return dataclasses.replace(
        config,
        tie_word_embeddings="lm_head.weight" not in names if tied is None else tied,
        kv_importance=config.kv_importance or any(map(IMPORTANCE.match, names)),
    )


def abstract_parameters(
    config: ModelConfig, dtype: DTypeLike = jnp.float32
) -> dict[Path, jax.ShapeDtypeStruct]:
    """Shapes and types of a decoder's parameters, without memory."""
    _, parameters = _abstract(config, jnp.dtype(dtype))
    return {path: parameter.get_value() for path, parameter in parameters}


@functools.lru_cache(maxsize=8)
def _abstract(config: ModelConfig, dtype: jnp.dtype) -> tuple[Any, tuple[tuple[Path, Any], ...]]:
    """Structure and abstract parameters of a decoder; tracing it takes longer than a tiny load."""
    graph, state = nnx.split(nnx.eval_shape(partial(Decoder.random, config, dtype=dtype)))
    return graph, tuple(nnx.to_flat_state(state))


def check_headers(config: ModelConfig, found: Mapping[str, TensorHeader]) -> dict[Path, Stored]:
    """Compares a checkpoint's tensors with what the model needs.

    Args:
        config: with nothing left open; see `completed`.
        found: every tensor of the checkpoint by its published name.

    Returns:
        Where each parameter lies.

    Raises:
        ValueError: names missing, unexpected, misshapen and wrongly typed tensors.
    """
    shapes = {path: p.shape for path, p in abstract_parameters(config).items()}
    where = layout(config, shapes, found.keys())
    expected = {name: stored.shape for stored in where.values() for name in stored.names}
    found = {name: header for name, header in found.items() if not is_buffer(name)}
    problems = [f"missing {name}" for name in expected if name not in found]
    problems += [
        f"{_in(header)}unexpected {name}" for name, header in found.items() if name not in expected
    ]
    for name, header in found.items():
        if name in expected and tuple(header.shape) != expected[name]:
            problems.append(
                f"{_in(header)}{name} has shape {list(header.shape)}, "
                f"expected {list(expected[name])}"
            )
        if name in expected and header.dtype not in SOURCE_DTYPES:
            problems.append(
                f"{_in(header)}{name} has dtype {header.dtype}, not one of {SOURCE_DTYPES}"
            )
    if problems:
        more = len(problems) - _NAMED
        tail = f"; and {more} more" if more > 0 else ""
        raise ValueError(f"checkpoint does not fit the model: {'; '.join(problems[:_NAMED])}{tail}")
    return where


def _in(header: TensorHeader) -> str:
    return f"{header.file}: " if header.file else ""


def located(
    config: ModelConfig, source: TensorSource, *, importance: bool = True
) -> tuple[ModelConfig, dict[Path, Stored]]:
    """The completed config, and where each parameter lies; see `assemble` for the arguments."""
    headers = {name: h for name, h in source.headers.items() if not FORECAST.match(name)}
    config = completed(config, headers)
    if config.kv_importance and not importance:
        config = dataclasses.replace(config, kv_importance=False)
        headers = {name: h for name, h in headers.items() if not IMPORTANCE.match(name)}
    # A tied head that is stored a second time is judged by its values: after all else is checked.
    head = "lm_head.weight"
    copied = bool(config.tie_word_embeddings) and head in headers
    where = check_headers(
        config, {name: h for name, h in headers.items() if not (copied and name == head)}
    )
    if copied and not _is_embedding(config, source, head):
        check_headers(config, headers)
    return config, where


def assemble(
    config: ModelConfig,
    source: TensorSource,
    *,
    dtype: DTypeLike = jnp.float32,
    check_finite: bool = True,
    mesh: Mesh | None = None,
    importance: bool = True,
    look: Look | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> Decoder:
    """A decoder from a checkpoint's tensors. Forecast tensors are passed over.

    Args:
        config: the model; see `completed` for what may be left open.
        source: the checkpoint.
        dtype: of the parameters (a router's stay float32).
        check_finite: refuse NaN and infinity, also those that arise in the conversion.
        mesh: where to put them; None: whole on the default device.
        importance: False leaves NOSA's importance out, as the published dense variant does.
        look: called once all is checked, before anything is read; may refuse the checkpoint.
        progress: called with the bytes read, a device shard at a time.

    Raises:
        ValueError: before anything is read: names missing, unexpected, misshapen and wrongly typed
            tensors; a mesh that does not divide the model; too little memory. With
            `check_finite`, tensors that are not finite, afterwards.
    """
    config, where = located(config, source, importance=importance)
    if mesh is not None:
        check_mesh(config, mesh)
    graph, flat = _abstract(config, jnp.dtype(dtype))
    parameters = dict(flat)
    place = None if mesh is None else place_on(mesh)
    _check_memory(parameters, place)
    if look is not None:
        look(config, where, source)
    values: dict[Path, jax.Array] = {}
    broken: dict[str, list[jax.Array]] = {}
    flying: deque[tuple[int, jax.Array]] = deque()
    # In the order of the files, so that each is opened once and read from front to back.
    headers = source.headers
    place_in_files = {path: headers[where[path].names[0]][2:] for path in where}
    for path in sorted(where, key=place_in_files.__getitem__):
        abstract, stored = parameters[path].get_value(), where[path]
        sharding = None if place is None else place(path, abstract.shape)
        value, flags = _load(source, stored, abstract, sharding, progress)
        values[path] = value
        broken[stored.names[0]] = flags
        flying.append((value.nbytes, value))
        while sum(size for size, _ in flying) > _IN_FLIGHT:
            flying.popleft()[1].block_until_ready()
    if check_finite:
        bad = [name for name, flags in broken.items() if not all(bool(flag) for flag in flags)]
        if bad:
            kind = jnp.dtype(dtype).name
            problems = [f"{name} has values that are not finite in {kind}" for name in bad]
            raise ValueError(f"checkpoint is damaged: {'; '.join(problems[:_NAMED])}")
    state = [(path, p.replace(values.pop(path))) for path, p in parameters.items()]
    return nnx.merge(graph, nnx.from_flat_state(state))


def _check_memory(parameters: Mapping[Path, Any], place: Place | None) -> None:
    """Whether every device of this process can hold its share."""
    need: dict[jax.Device, int] = {}
    for path, parameter in parameters.items():
        shape, size = parameter.shape, parameter.dtype.itemsize
        if place is None:
            devices, part = {jax.devices()[0]}, shape
        else:
            devices = place(path, shape).addressable_devices
            part = place(path, shape).shard_shape(shape)
        for device in devices:
            need[device] = need.get(device, 0) + math.prod(part) * size
    for device, count in need.items():
        check_budget("the model", count, free_device_bytes(device), f"free memory of {device}")


def _load(
    source: TensorSource,
    stored: Stored,
    abstract: jax.ShapeDtypeStruct,
    sharding: Sharding | None,
    progress: Callable[[int], None],
) -> tuple[jax.Array, list[jax.Array]]:
    """One parameter on its devices, and for each shard whether all of it is finite."""
    if sharding is None:
        array = read_parameter(source, stored, tuple(slice(0, size) for size in abstract.shape))
        progress(array.nbytes)
        # Not committed to a device: it may be used with arrays of any.
        value, finite = _convert(jnp.asarray(array), abstract.dtype, stored.transposed)
        return value, [finite]
    holders: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(abstract.shape).items():
        parts = zip(index or (), abstract.shape, strict=True)
        bounds = tuple(part.indices(size)[:2] for part, size in parts)
        holders.setdefault(bounds, []).append(device)
    shards, flags = [], []
    for bounds, devices in holders.items():
        # Devices that hold the same part (data parallel) share what is read.
        array = read_parameter(source, stored, tuple(slice(*bound) for bound in bounds))
        progress(array.nbytes)
        for device in devices:
            part = jax.device_put(array, device)
            shard, finite = _convert(part, abstract.dtype, stored.transposed)
            shards.append(shard)
            flags.append(finite)
    return jax.make_array_from_single_device_arrays(abstract.shape, sharding, shards), flags


def read_values(source: TensorSource, stored: Stored, places: tuple[np.ndarray, ...]) -> np.ndarray:
    """Single values of a parameter, given their places on each of its axes."""
    if stored.transposed:
        places = (*places[:-2], places[-1], places[-2])
    if stored.rows is not None:
        places = (places[0] + stored.rows[0], *places[1:])
    if len(stored.names) == 1:
        return source.read(stored.names[0], places)
    values = np.empty(places[0].shape, source.headers[stored.names[0]].dtype)
    for number, name in enumerate(stored.names):
        here = places[0] == number
        values[here] = source.read(name, tuple(place[here] for place in places[1:]))
    return values


def read_parameter(source: TensorSource, stored: Stored, index: tuple[slice, ...]) -> np.ndarray:
    """The part of a parameter that `index` names, as stored (not transposed)."""
    if stored.transposed:
        index = (*index[:-2], index[-1], index[-2])
    if stored.rows is not None:
        first = index[0]
        index = (slice(first.start + stored.rows[0], first.stop + stored.rows[0]), *index[1:])
    if len(stored.names) == 1:
        return source.read(stored.names[0], index)
    names = itertools.islice(stored.names, index[0].start, index[0].stop)
    return np.stack([source.read(name, index[1:]) for name in names])


def _is_embedding(config: ModelConfig, source: TensorSource, name: str) -> bool:
    """Some tied checkpoints store the embedding a second time, as the head `name`."""
    embedding = published_name(config, ("embedding",))
    headers = source.headers
    if embedding not in headers or headers[name].shape != headers[embedding].shape:
        return False
    rows, step = headers[name].shape[0], 4096  # compared so many at a time
    slices = [(slice(row, min(row + step, rows)),) for row in range(0, rows, step)]
    return all(np.array_equal(source.read(name, at), source.read(embedding, at)) for at in slices)


def _convert(array: jax.Array, dtype: jnp.dtype, transpose: bool) -> tuple[jax.Array, jax.Array]:
    # Two programs: as one, XLA:CPU took four times as long (25 MB of bfloat16: 260 ms, 65 apart).
    return _as_parameter(array, dtype, transpose), _all_finite(array, dtype)


@partial(jax.jit, static_argnums=(1, 2))
def _as_parameter(array: jax.Array, dtype: jnp.dtype, transpose: bool) -> jax.Array:
    # A new array also where nothing changes: on a CPU the argument may be the pages of the file.
    return (array.swapaxes(-1, -2) if transpose else array).astype(dtype)


@partial(jax.jit, static_argnums=1)
def _all_finite(array: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jnp.isfinite(array.astype(dtype)).all()
