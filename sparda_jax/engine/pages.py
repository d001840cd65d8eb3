"""Which pages of the host pool each row has, and how many are left."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Pages:
    """A pool's pages, handed out to rows block by block.

    Rows that begin alike may share the pages of what they have in common, which neither writes any
    more. A page is free again when no row has it.

    Args:
      count: X, pages of the pool.
      rows: B.
      blocks: M, blocks that a row can hold.

    Attributes:
      table: int32[B, M], page of each block; 0 where a row has none.
      held: blocks of each row that have a page, the first ones.
    """

    def __init__(self, count: int, rows: int, blocks: int):
        self.table = np.zeros((rows, blocks), np.int32)
        self.held = np.zeros(rows, np.int32)
        self._users = np.zeros(count, np.int32)
        self._free = list(range(count - 1, -1, -1))

    @property
    def count(self) -> int:
        """X."""
        return len(self._users)

    @property
    def free(self) -> int:
        """Pages that no row has."""
        return len(self._free)

    def of(self, rows: Sequence[int]) -> np.ndarray:
        """The pages of some rows: a copy, since a device may alias what it is given."""
        return self.table[list(rows)]

    def used(self, rows: list[int]) -> int:
        """Pages that these rows have, shared ones once."""
        return len({page for row in rows for page in self.table[row, : self.held[row]].tolist()})

    def take(self, row: int, blocks: int, source: int | None = None, shared: int = 0) -> None:
        """Gives a row pages for its first blocks, in place of those that it has.

        Args:
          row: which.
          blocks: how many.
          source: the row whose first pages it shares; it may be the same.
          shared: how many of them.
        """
        common = self.table[row if source is None else source, :shared].copy()
        self._users[common] += 1
        self.shrink(row, 0)
        new = [self._free.pop() for _ in range(blocks - shared)]
        self._users[new] = 1
        self.table[row, :shared], self.table[row, shared:blocks] = common, new
        self.held[row] = blocks

    def shrink(self, row: int, blocks: int) -> None:
        """Takes back a row's pages behind its first blocks."""
        rest = self.table[row, blocks : self.held[row]]
        self._users[rest] -= 1
        self._free += [page for page in rest.tolist() if self._users[page] == 0]
        self.table[row, blocks:] = 0
        self.held[row] = min(blocks, self.held[row])
