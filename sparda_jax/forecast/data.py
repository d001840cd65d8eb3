"""Training text: documents, a split between them, and windows of tokens."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np


@dataclasses.dataclass(frozen=True)
class Windows:
    """Documents one after the other, cut into windows.

    Attributes:
        tokens: `int32[X, T]`.
        documents: `int32[X, T]`, which document each token belongs to. The published training
            looks across boundaries, and so does `forecast_loss`.
    """

    tokens: np.ndarray
    documents: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)


def read_documents(
    paths: Sequence[str | Path], encode: Callable[[str], Sequence[int]]
) -> list[np.ndarray]:
    """Token arrays of all documents.

    Args:
        paths: `.jsonl` holds an object with the key "text" a line, one document each; `.npy` one
            document of token ids; any other file one document of UTF-8 text.
        encode: text to token ids.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not UTF-8, a line that is no such object, an array that is no token list.
    """
    documents = []
    for path in map(Path, paths):
        if not path.is_file():
            raise FileNotFoundError(f"no training text at {path}")
        if path.suffix == ".npy":
            documents.append(_token_array(path))
        else:
            documents += [np.asarray(encode(text), np.int32) for text in _texts(path)]
    return [document for document in documents if document.size]


def _token_array(path: Path) -> np.ndarray:
    array = np.load(path, allow_pickle=False)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{path} holds {array.dtype}{list(array.shape)}, expected one axis of token ids"
        )
    return array.astype(np.int32)


def _texts(path: Path) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason}") from None
    if path.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            yield str(json.loads(line)["text"])
        except (ValueError, TypeError, KeyError):
            raise ValueError(f'{path}, line {number}: expected a JSON object with "text"') from None


def split_documents(
    documents: Sequence[np.ndarray], held_out: float, seed: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Train and held-out documents; no document is in both.

    Args:
        documents: all of them.
        held_out: share of the documents to hold out, at least one where it is above 0.
        seed: of the draw.

    Raises:
        ValueError: a share outside [0, 1), or no document would be left to train on.
    """
    if not 0 <= held_out < 1:
        raise ValueError(f"held-out share must be in [0, 1), got {held_out}")
    count = int(np.ceil(held_out * len(documents)))
    if count >= len(documents):
        raise ValueError(
            f"{len(documents)} documents cannot be split: {count} would be held out, none be left"
        )
    order = np.random.default_rng(seed).permutation(len(documents))
    picked = [documents[i] for i in order]
    return picked[count:], picked[:count]


def pack(documents: Iterable[np.ndarray], length: int, separator: int | None) -> Windows:
    """Cuts the documents, joined, into windows of `length` tokens; what is left over is dropped.

    Args:
        documents: token arrays.
        length: T.
        separator: token after each document; None: none.
    """
    end = np.asarray([] if separator is None else [separator], np.int32)
    pieces = [np.concatenate([document, end]) for document in documents]
    tokens = np.concatenate(pieces) if pieces else np.zeros(0, np.int32)
    numbers = np.repeat(np.arange(len(pieces), dtype=np.int32), [len(p) for p in pieces])
    count = len(tokens) // length
    cut = lambda rows: rows[: count * length].reshape(count, length)
    return Windows(cut(tokens.astype(np.int32)), cut(numbers))


def batch_at(windows: Windows, step: int, size: int, seed: int) -> np.ndarray:
    """The windows of optimizer step `step`, `int32[size, T]`: every window once an epoch, shuffled.

    A function of the step alone, so that a resumed run sees what the first would have seen.
    """
    indices = np.arange(step * size, (step + 1) * size)
    epochs = {
        int(epoch): np.random.default_rng((seed, epoch)).permutation(len(windows))
        for epoch in np.unique(indices // len(windows))
    }
    rows = [epochs[int(i) // len(windows)][int(i) % len(windows)] for i in indices]
    return windows.tokens[np.asarray(rows)]
