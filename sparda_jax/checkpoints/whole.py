"""Writes safetensors files that are either whole or not there."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file


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
