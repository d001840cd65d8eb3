"""Our own weight files: safetensors with a JSON header, either whole or not there."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from sparda_jax.checkpoints.safetensors import read_metadata


def write_whole(
    path: str | Path, tensors: Mapping[str, np.ndarray], key: str, header: Mapping[str, Any]
) -> None:
    """Writes tensors and one metadata entry; equal contents are equal files.

    Args:
        path: of the file; an older one is replaced.
        tensors: by name.
        key: the only one of the metadata: safetensors writes several in an order that changes from
            run to run.
        header: its value, as JSON.
    """
    path = Path(path)
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    # In the same folder, so that the rename cannot become a copy.
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    os.close(handle)
    try:
        save_file(contiguous, partial, metadata={key: json.dumps(header)})
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def read_header(path: Path, key: str, version: int, what: str) -> dict[str, Any] | None:
    """The header that `write_whole` was given; None where the file has none.

    Args:
        path: of the file.
        key: of the metadata entry.
        version: of the format, the header's "version".
        what: the file holds, in words.

    Raises:
        FileNotFoundError: no such file.
        ValueError: damaged metadata.
        NotImplementedError: another version of the format.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no {what} at {path}")
    text = read_metadata(path).get(key)
    if text is None:
        return None
    try:
        header = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} has damaged metadata: {error}") from None
    found = header.get("version") if isinstance(header, dict) else None
    if found != version:
        raise NotImplementedError(f"{path} has format version {found}, only {version} is known")
    return dict(header)


def check_base(path: Path, header: Mapping[str, Any], fingerprint: str) -> None:
    """Compares the base model that a header names with the one at hand.

    Raises:
        ValueError: another one.
    """
    base = str(header.get("base_model"))
    if base != fingerprint:
        raise ValueError(
            f"{path} was trained for another model: base {base[:12]}, this one is "
            f"{fingerprint[:12]}"
        )


def check_finite(path: Path, tensors: Mapping[str, np.ndarray | jax.Array]) -> None:
    """Refuses NaN and infinity.

    Raises:
        ValueError: names all tensors that hold any.
    """
    broken = [n for n, array in tensors.items() if not np.isfinite(array.astype(np.float32)).all()]
    if broken:
        raise ValueError(f"{path} is damaged: values not finite in {', '.join(broken)}")
