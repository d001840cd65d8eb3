"""Hugging Face checkpoint folders: `config.json` and one or several safetensors files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from sparda_jax.checkpoints.assemble import Index, TensorHeader, assemble
from sparda_jax.config import ModelConfig
from sparda_jax.models.decoder import Decoder

_INDEX = "model.safetensors.index.json"
_DTYPE_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def load_safetensors(
    directory: str | Path, *, dtype: DTypeLike = jnp.float32, check_finite: bool = True
) -> Decoder:
    """Reads a checkpoint folder.

    Files are memory-mapped and read tensor by tensor. Names, shapes and dtypes are checked before
    the first tensor is read.

    Args:
        directory: holds `config.json` and `model.safetensors`, or shards and their index.
        dtype: of the parameters; sources may be bfloat16, float16 or float32.
        check_finite: refuse NaN and infinity in the weights.

    Raises:
        FileNotFoundError: no config, no weights, a shard that the index names is not there.
        ValueError: a broken file, or all tensors that do not fit, in one message.
        NotImplementedError: a model that `ModelConfig.from_huggingface` refuses.
    """
    source = SafetensorsSource(Path(directory))
    config = ModelConfig.from_huggingface(read_json(Path(directory) / "config.json"))
    with source:
        return assemble(config, source, dtype=dtype, check_finite=check_finite)


class SafetensorsSource:
    """The tensors of a checkpoint folder, memory-mapped; one file is open at a time.

    Attributes:
        directory: of the checkpoint.
        headers: every tensor by name.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.headers: dict[str, TensorHeader] = {}
        for file in _weight_files(directory):
            for name, header in read_headers(file).items():
                if name in self.headers:
                    raise ValueError(f"{name} is in {self.headers[name].file} and in {file.name}")
                self.headers[name] = header
        self._open = contextlib.ExitStack()
        self._file: tuple[str, Any] = ("", None)

    def read(self, name: str, index: Index) -> np.ndarray:
        """Part of a tensor."""
        file = self.headers[name].file
        if self._file[0] != file:
            # The pages of a mapped file count as this process's memory until it is closed.
            self._open.close()
            self._file = (file, self._open.enter_context(_open(self.directory / file)))
        part: np.ndarray = self._file[1].get_slice(name)[index]
        return part

    def __enter__(self) -> SafetensorsSource:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()
        self._file = ("", None)


def read_json(path: Path) -> dict[str, Any]:
    """Parses a JSON object.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not JSON, or not an object.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no {path.name} in {path.parent}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _weight_files(directory: Path) -> list[Path]:
    if (directory / _INDEX).is_file():
        return _indexed_files(directory)
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    found = sorted(directory.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise ValueError(f"{len(found)} safetensors files in {directory} but no {_INDEX}")
    raise FileNotFoundError(f"no safetensors file in {directory}")


def _indexed_files(directory: Path) -> list[Path]:
    path = directory / _INDEX
    shards = read_json(path).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ValueError(f"{path} has no weight_map")
    files = [directory / str(name) for name in sorted(set(shards.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(f"{path} names missing shards: {', '.join(missing)}")
    present = {name: file.name for file in files for name in read_headers(file)}
    wrong = [name for name, shard in shards.items() if present.get(name) != shard]
    if wrong:
        raise ValueError(f"{path}: not in the shard it names: {', '.join(wrong)}")
    return files


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except SafetensorError as error:
        size = path.stat().st_size
        raise ValueError(f"{path} ({size} bytes) is truncated or damaged: {error}") from None


def read_headers(path: Path) -> dict[str, TensorHeader]:
    """Shapes and dtypes of one file's tensors."""
    with _open(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {
            name: TensorHeader(
                tuple(part.get_shape()),
                _DTYPE_NAMES.get(part.get_dtype(), part.get_dtype()),
                path.name,
            )
            for name, part in slices.items()
        }


def read_metadata(path: Path) -> dict[str, str]:
    """The free-form texts in one file's header."""
    with _open(path) as file:
        return dict(file.metadata() or {})


def read_tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """One file's tensors, read one by one."""
    with _open(path) as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)
