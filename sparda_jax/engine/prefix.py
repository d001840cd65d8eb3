"""Which rows hold the KV of which beginnings of a text.

A block is known by the hash of all tokens up to its end, so equal hashes mean equal prefixes. Rows
keep their blocks after their request has ended, until another request takes the row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from sparda_jax.config import EngineConfig, SparseConfig


def settled_lag(sparse: SparseConfig, config: EngineConfig, num_layers: int) -> int:
    """Tokens before the end of a common prefix whose KV may depend on what follows it.

    In mode "sparda" a prompt's token scores windows that begin at or before it, hence keys up to
    `kernel_size - 1` tokens after it, whose own values may depend on as many more in the layer
    before. The first layer's KV depends on no selection.
    """
    if config.mode != "sparda":
        return 0
    return (num_layers - 1) * (sparse.geometry.kernel_size - 1)


def reusable_tokens(config: EngineConfig, prompt: int, cached: int) -> int:
    """How many tokens of a finished request have the KV that a prompt of them would have.

    Args:
      config: in modes "sparda" and "infinigen" generated tokens attend by another rule than those
        of a prompt, so theirs do not.
      prompt: tokens of its prompt.
      cached: tokens whose KV is there.
    """
    return cached if config.mode in ("dense", "sparse") else min(prompt, cached)


class PrefixIndex:
    """Finds the row with the longest known prefix of a prompt.

    Args:
      model: name of the model and of everything else that KV depends on.
      block_size: P.
      dense_len: prompts shorter than this attend densely, so they share nothing with longer ones.
    """

    def __init__(self, model: str, block_size: int, dense_len: int):
        self._seed = hashlib.blake2b(model.encode(), digest_size=16).digest()
        self._size, self._dense_len = block_size, dense_len
        self._rows: dict[bytes, set[int]] = {}  # which rows hold the prefix of this hash
        self._held: dict[int, list[bytes]] = {}  # the prefixes that a row holds, shortest first

    def blocks(self, row: int) -> int:
        """Blocks held by one row."""
        return len(self._held.get(row, ()))

    def _hashes(self, tokens: Sequence[int], prompt: int) -> list[bytes]:
        """Hash of each prefix of whole blocks."""
        dense = b"d" if prompt < self._dense_len else b"s"
        state, hashes = hashlib.blake2b(self._seed + dense, digest_size=16), []
        array = np.asarray(tokens, np.int32)
        for end in range(self._size, len(array) + 1, self._size):
            state.update(array[end - self._size : end].tobytes())
            hashes.append(state.digest())
        return hashes

    def find(self, prompt: Sequence[int]) -> tuple[int, list[int]]:
        """The longest known prefix: how many tokens, and the rows that hold it."""
        length, rows = 0, set[int]()
        for count, key in enumerate(self._hashes(prompt, len(prompt)), 1):
            holders = self._rows.get(key)
            if not holders:
                break
            length, rows = count * self._size, holders
        return length, sorted(rows)

    def hold(self, row: int, tokens: Sequence[int], prompt: int) -> None:
        """The row holds the KV of these tokens, and of no others.

        Args:
          row: which.
          tokens: whose KV it holds.
          prompt: tokens of its prompt, which may be more or fewer.
        """
        self.drop(row)
        self._held[row] = self._hashes(tokens, prompt)
        for key in self._held[row]:
            self._rows.setdefault(key, set()).add(row)

    def drop(self, row: int) -> None:
        """The row's blocks are about to be overwritten."""
        for key in self._held.pop(row, ()):
            self._rows[key].discard(row)
            if not self._rows[key]:
                del self._rows[key]
