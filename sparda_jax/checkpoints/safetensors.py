"""Hugging Face checkpoint folders: `config.json` and one or several safetensors files."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from sparda_jax.checkpoints.assemble import SOURCE_DTYPES, Index, Look, TensorHeader, assemble
from sparda_jax.checkpoints.progress import LoadReport, Progress
from sparda_jax.config import ModelConfig
from sparda_jax.models.decoder import Decoder

_INDEX = "model.safetensors.index.json"
_FREE_FORM = "__metadata__"
# Bytes behind a tensor that are asked of the disk while it is read.
_AHEAD = 512 << 20
_DTYPE_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def load_safetensors(
    directory: str | Path, *, dtype: DTypeLike = jnp.float32, check_finite: bool = True
) -> Decoder:
    """The decoder of a checkpoint folder on the default device; see `read_folder`."""
    return read_folder(Path(directory), dtype=dtype, check_finite=check_finite)[0]


def read_folder(
    directory: Path,
    *,
    dtype: DTypeLike,
    check_finite: bool = True,
    mesh: Mesh | None = None,
    importance: bool = True,
    overrides: Mapping[str, Any] | None = None,
    look: Look | None = None,
    progress: bool | None = False,
) -> tuple[Decoder, LoadReport]:
    """Reads a checkpoint folder.

    Files are memory-mapped and read a device shard at a time. Names, shapes, types and memory are
    checked before the first of them.

    Args:
        directory: holds `config.json` and `model.safetensors`, or shards and their index.
        dtype: of the parameters; sources may be bfloat16, float16 or float32.
        check_finite: refuse NaN and infinity in the weights.
        mesh: see `assemble`.
        importance: see `assemble`.
        overrides: fields of `config.json` to read otherwise.
        look: see `assemble`.
        progress: show a line; None: where standard error is a terminal.

    Raises:
        FileNotFoundError: no config, no weights, a shard that the index names is not there.
        ValueError: a broken file, or all tensors that do not fit, in one message.
        NotImplementedError: a model that `ModelConfig.from_huggingface` refuses.
    """
    fields = read_json(directory / "config.json") | dict(overrides or {})
    config = ModelConfig.from_huggingface(fields)
    with SafetensorsSource(directory) as source:
        counter = Progress(source.nbytes, progress)
        decoder = assemble(
            config,
            source,
            dtype=dtype,
            check_finite=check_finite,
            mesh=mesh,
            importance=importance,
            look=look,
            progress=counter,
        )
        return decoder, counter.finish()


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
        self._file: tuple[str, mmap.mmap | None] = ("", None)

    @property
    def nbytes(self) -> int:
        """Of all tensors that can be read."""
        headers = self.headers.values()
        return sum(header.nbytes for header in headers if header.dtype in SOURCE_DTYPES)

    def read(self, name: str, index: Index) -> np.ndarray:
        """Part of a tensor: a read-only view of the file, valid as long as the file is unchanged.

        What follows in the file is asked for ahead, so that a disk is not waited for page by page.
        The pages before it no longer count as this process's memory; whoever still reads them gets
        them back.
        """
        header = self.headers[name]
        if self._file[0] != header.file:
            self._close()
            self._file = (header.file, _map(self.directory / header.file))
        mapped = self._file[1]
        assert mapped is not None
        first = header.start // mmap.PAGESIZE * mmap.PAGESIZE
        if first:
            mapped.madvise(mmap.MADV_DONTNEED, 0, first)
        last = min(header.start + header.nbytes + _AHEAD, len(mapped))
        mapped.madvise(mmap.MADV_WILLNEED, first, last - first)
        count, dtype = math.prod(header.shape), jnp.dtype(header.dtype)
        whole = np.frombuffer(mapped, dtype, count, header.start).reshape(header.shape)
        return whole[index] if whole.flags.aligned else np.array(whole[index])

    def __enter__(self) -> SafetensorsSource:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def _close(self) -> None:
        """Forgets the open file; it stays mapped as long as a view of it lives."""
        if self._file[1] is not None:
            self._file[1].madvise(mmap.MADV_DONTNEED)
        self._file = ("", None)


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


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
        lost = [name for name, shard in shards.items() if shard in missing]
        raise FileNotFoundError(
            f"{path} names missing shards: {', '.join(missing)} ({len(lost)} tensors, the first "
            f"is {lost[0]})"
        )
    present = {name: file.name for file in files for name in read_headers(file)}
    wrong = [name for name, shard in shards.items() if present.get(name) != shard]
    if wrong:
        where = present.get(wrong[0], "no shard")
        raise ValueError(
            f"{path}: not in the shard it names: {', '.join(wrong)} (expected "
            f"{shards[wrong[0]]}, found the first in {where})"
        )
    return files


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except SafetensorError as error:
        size, missing = path.stat().st_size, _what_is_cut(path)
        raise ValueError(
            f"{path} ({size} bytes) is truncated or damaged: {missing or error}"
        ) from None


def _byte_ranges(path: Path) -> dict[str, tuple[int, int]] | None:
    """First and last byte of each tensor by a file's header; None where that cannot be read."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(min(length, 1 << 28))  # a damaged length is not believed
    start = 8 + length
    try:
        offsets = {n: t["data_offsets"] for n, t in json.loads(text).items() if n != _FREE_FORM}
        return {name: (start + first, start + end) for name, (first, end) in offsets.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _what_is_cut(path: Path) -> str | None:
    """The first tensor that reaches past the end of a file whose header can still be read."""
    size, ranges = path.stat().st_size, _byte_ranges(path) or {}
    cut = [name for name, (_, end) in sorted(ranges.items(), key=lambda r: r[1]) if end > size]
    if not cut:
        return None
    return f"{cut[0]} ends at byte {ranges[cut[0]][1]}, found {size} ({len(cut)} tensors cut)"


def read_headers(path: Path) -> dict[str, TensorHeader]:
    """Shapes, dtypes and places of one file's tensors."""
    with _open(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        ranges = _byte_ranges(path)
        assert ranges is not None  # the library has read it
        return {
            name: TensorHeader(
                tuple(part.get_shape()),
                _DTYPE_NAMES.get(part.get_dtype(), part.get_dtype()),
                path.name,
                ranges[name][0],
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
