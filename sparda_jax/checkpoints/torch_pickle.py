"""Reads the tensors of a `torch.save` file without torch, and without running anything in it.

Such a file is a zip archive of a pickle and one raw file for each storage. A pickle is a program:
it may name any callable. This reader resolves six names, all to code of its own that only
describes tensors, and refuses the file at the first other one. Sizes are checked against the
archive before an array is made.
"""

from __future__ import annotations

import collections
import math
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (gives numpy the name "bfloat16")
import numpy as np

_STORAGES = {
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
}
_DEPTH = 8  # of nested dicts
# Whatever the unpickler raises on a damaged program: all of it means the same here.
_DAMAGE = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


# What a pickle gets hold of is immutable (tuples, strings, objects without attributes): it can also
# write attributes, or call __setstate__, of any object it has.
class _Storage(NamedTuple):
    dtype: str
    key: str
    values: int


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _RebuildTensor:
    __slots__ = ()

    def __call__(
        self, storage: Any, offset: Any, shape: Any, strides: Any, *_options: Any
    ) -> _Tensor:
        numbers = (offset, *shape, *strides)
        if not isinstance(storage, _Storage) or len(shape) != len(strides):
            raise pickle.UnpicklingError("a tensor of unknown form")
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise pickle.UnpicklingError(f"a tensor with impossible sizes {numbers}")
        return _Tensor(storage, offset, tuple(shape), tuple(strides))


class _RebuildParameter:
    __slots__ = ()

    def __call__(self, data: Any, *_options: Any) -> Any:
        return data


_NAMES: dict[tuple[str, str], Any] = {
    ("torch", name): dtype for name, dtype in _STORAGES.items()
} | {
    ("torch._utils", "_rebuild_tensor_v2"): _RebuildTensor(),
    ("torch._utils", "_rebuild_parameter"): _RebuildParameter(),
    ("collections", "OrderedDict"): collections.OrderedDict,
}


class _Restricted(pickle.Unpickler):
    """Resolves `_NAMES` and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        found = _NAMES.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"names {module}.{name}, which no tensor needs")
        return found

    def persistent_load(self, pid: Any) -> _Storage:
        if (
            not isinstance(pid, tuple)
            or len(pid) != 5
            or pid[0] != "storage"
            or pid[1] not in _STORAGES.values()
            or not isinstance(pid[2], str)
            or type(pid[4]) is not int
            or pid[4] < 0
        ):
            raise pickle.UnpicklingError("a storage of unknown form")
        return _Storage(pid[1], pid[2], pid[4])


def read_torch_file(path: str | Path) -> dict[str, np.ndarray]:
    """Every tensor of a `torch.save` file by its name; those of nested dicts by dotted names.

    Raises:
        FileNotFoundError: no such file.
        ValueError: damaged, or a pickle that asks for anything but tensors.
        NotImplementedError: the format of torch before 1.6.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    if not zipfile.is_zipfile(path):
        raise NotImplementedError(
            f"{path} is not a zip archive: the format of torch before 1.6 is not supported"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(archive)
    except _DAMAGE as error:
        raise ValueError(f"{path} is refused: {error}") from None


def _read(archive: zipfile.ZipFile) -> dict[str, np.ndarray]:
    pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise pickle.UnpicklingError(f"{len(pickles)} data.pkl in the archive, expected 1")
    folder = pickles[0].removesuffix("data.pkl")
    if folder + "byteorder" in archive.namelist():
        order = archive.read(folder + "byteorder")
        if order != b"little":
            raise pickle.UnpicklingError(f"byte order {order!r}, expected little")
    with archive.open(pickles[0]) as file:
        content = _Restricted(file).load()
    return {
        name: _array(archive, folder, name, tensor) for name, tensor in _tensors(content, "", 0)
    }


def _tensors(content: Any, prefix: str, depth: int) -> Iterator[tuple[str, _Tensor]]:
    """Tensors in nested dicts; what else is in them is passed over."""
    if isinstance(content, _Tensor):
        yield prefix.removesuffix("."), content
    elif isinstance(content, dict):
        if depth > _DEPTH:
            raise pickle.UnpicklingError(f"dicts nested more than {_DEPTH} deep")
        for name, value in content.items():
            yield from _tensors(value, f"{prefix}{name}.", depth + 1)


def _array(archive: zipfile.ZipFile, folder: str, name: str, tensor: _Tensor) -> np.ndarray:
    storage, dtype = tensor.storage, np.dtype(tensor.storage.dtype)
    size = dtype.itemsize
    entry = archive.getinfo(f"{folder}data/{storage.key}")
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != storage.values * size:
        raise pickle.UnpicklingError(
            f"storage of {name} has {entry.file_size} bytes, expected {storage.values * size}"
        )
    steps = zip(tensor.shape, tensor.strides, strict=True)
    last = tensor.offset + sum((count - 1) * step for count, step in steps)
    count = math.prod(tensor.shape)
    if count > storage.values or (count and last >= storage.values):
        raise pickle.UnpicklingError(f"{name} reaches past its storage of {storage.values} values")
    flat = np.frombuffer(archive.read(entry), dtype)[tensor.offset :]
    strides = tuple(step * size for step in tensor.strides)
    return np.lib.stride_tricks.as_strided(flat, tensor.shape, strides, writeable=False).copy()
