"""Files of results and of work in progress: whole or not there, or a line at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Writes a file such that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def append_line(path: Path, line: str) -> None:
    """Adds a line to a file and waits until it is on the disk."""
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())


def whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a file, once what a killed process left of its last line is cut off."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
    for line in data[:whole].decode("utf-8").split("\n"):
        if line:
            yield json.loads(line)
