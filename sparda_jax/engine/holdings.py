"""Which rows are free, what they still hold, and where a new request finds its place."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparda_jax.engine.pages import Pages
from sparda_jax.engine.prefix import PrefixIndex, reusable_tokens, settled_lag

if TYPE_CHECKING:
    from sparda_jax.engine.generate import Engine


@dataclass(frozen=True)
class Place:
    """Where a request runs.

    Attributes:
      row: its row, which has the pages that it needs.
      known: leading tokens of its prompt whose KV is there, whole pieces.
      source: the row that holds it, this one or another; None: nothing is known.
    """

    row: int
    known: int
    source: int | None


class Holdings:
    """Gives rows and pages to requests. A row keeps what it holds until another request needs it.

    Args:
      engine: whose rows.
      batch: B.
      piece: tokens of the smallest piece of a prefill, whole blocks.
      pages: of the host pool; None: every row has its own memory.
      reuse: whether prompts that begin alike share what is known.
    """

    def __init__(self, engine: Engine, batch: int, piece: int, pages: Pages | None, reuse: bool):
        self._engine, self._piece, self._pages, self._reuse = engine, piece, pages, reuse
        self._size = engine.sparse.geometry.block_size
        self._free: collections.OrderedDict[int, None] = collections.OrderedDict.fromkeys(
            range(batch)
        )  # the row that was left longest ago comes first
        dense_len = engine.sparse.dense_len if engine.config.mode != "dense" else 0
        name = f"{engine.model.config}{engine.sparse}{engine.config.mode}"
        self._prefixes = PrefixIndex(name, self._size, dense_len)

    @property
    def free(self) -> int:
        """Rows that no request has."""
        return len(self._free)

    def blocks(self, tokens: int) -> int:
        """KV blocks of so many tokens, in each layer."""
        return -(-tokens // self._size)

    def find(self, prompt: Sequence[int], tokens: int) -> Place | None:
        """A place for a request, which has it from now on; None: it has to wait.

        Args:
          prompt: its prompt.
          tokens: of prompt and answer.
        """
        if not self._free:
            return None
        known, source = self._known(prompt)
        # In the row that holds the prefix, if it is free: what others hold stays.
        row = next(iter(self._free)) if source is None or source not in self._free else source
        if not self._make_room(row, tokens, known, source):
            if source is None or source not in self._free:
                return None
            # What it would share is in its own way.
            self._forget(source)
            known, source = 0, None
            if not self._make_room(row, tokens, 0, None):
                return None
        del self._free[row]
        if self._pages is not None:
            self._pages.take(row, self.blocks(tokens), source, self.blocks(known))
        self._prefixes.drop(row)
        return Place(row, known, source)

    def remember(self, row: int, prompt: Sequence[int], answer: Sequence[int], cached: int) -> None:
        """What a row holds, for prompts that begin alike.

        Args:
          row: which.
          prompt: of its request.
          answer: tokens drawn.
          cached: tokens whose KV is there and sound.
        """
        if self._reuse:
            count = reusable_tokens(self._engine.config, len(prompt), cached)
            self._prefixes.hold(row, (*prompt, *answer)[:count], len(prompt))

    def leave(self, row: int) -> None:
        """A request has ended; the row keeps the pages of what it is known to hold."""
        self._free[row] = None
        if self._pages is not None:
            self._pages.shrink(row, self._prefixes.blocks(row))

    def _known(self, prompt: Sequence[int]) -> tuple[int, int | None]:
        """Leading tokens of a prompt that need no prefill, and the row that holds their KV."""
        engine = self._engine
        matched, rows = self._prefixes.find(prompt)
        lag = settled_lag(engine.sparse, engine.config, len(engine.layers)) if matched else 0
        # The last token is run in any case: its hidden state draws the first one.
        known = max(min(matched - lag, len(prompt) - 1), 0) // self._piece * self._piece
        if not known:
            return 0, None
        return known, next((row for row in rows if row in self._free), rows[0])

    def _make_room(self, row: int, tokens: int, known: int, source: int | None) -> bool:
        """Frees pages that idle rows hold, of those left longest ago first, as far as needed."""
        if self._pages is None:
            return True
        needed = self.blocks(tokens) - self.blocks(known)
        for idle in list(self._free):
            if self._pages.free >= needed:
                return True
            if idle != source:
                self._forget(idle)
        if source == row:
            self._pages.shrink(row, self.blocks(known))
        return self._pages.free >= needed

    def _forget(self, row: int) -> None:
        """What an idle row holds is known no more."""
        self._prefixes.drop(row)
        if self._pages is not None:
            self._pages.shrink(row, 0)
