"""A forward whose layers are programs of their own, and who brings each layer's rows.

Between a layer's queries and its attention somebody may act: send the queries to the host and go on
(lookahead), wait for the rows that they choose, choose them on the device, or use those that the
layer before asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

import jax

from host_offload.retrieval import Retrieval, Retrieved, Span
from sparda_jax.diffusion.config import diffusion_of
from sparda_jax.diffusion.state import LayerKV
from sparda_jax.herald import forward
from sparda_jax.herald.device_selection import select_on_device
from sparda_jax.herald.state import HeraldState, Pool, Turn

if TYPE_CHECKING:
    from sparda_jax.herald.engine import HeraldEngine

# A layer's input, the rotary embedding of its rows, and the row whose query chooses (None: all).
Rows = tuple[jax.Array, tuple[jax.Array, jax.Array], jax.Array | None]
Wait = Callable[[int, Future[Retrieved], Sequence[Span]], Pool]


class Source(Protocol):
    """Brings the rows that a layer attends."""

    def pool(self, number: int, queries: jax.Array, rows: Rows) -> Pool | None:
        """The pool of layer `number`; None: attend the whole cache.

        Args:
            number: which layer.
            queries: that choose, of this layer.
            rows: its input.
        """
        ...


class LookAhead:
    """Sends the queries off for the next block; attends the rows chosen for this one."""

    def __init__(self, retrieval: Retrieval, sparse: range, spans: Sequence[Span], pools: Sequence):
        self._retrieval, self._sparse, self._spans, self._pools = retrieval, sparse, spans, pools
        self.futures: dict[int, Future[Retrieved]] = {}

    def pool(self, number: int, queries: jax.Array, rows: Rows) -> Pool | None:
        """See `Source`."""
        if number in self._sparse:
            index = number - self._sparse.start
            self.futures[number] = self._retrieval.request(index, queries, self._spans)
        return self._pools[number]


class OwnQueries:
    """Waits for the rows that a layer's own queries choose."""

    def __init__(
        self, retrieval: Retrieval, sparse: range, spans: Sequence[Span], wait: Wait, layers: int
    ):
        self._retrieval, self._sparse, self._spans, self._wait = retrieval, sparse, spans, wait
        self.pools: list[Pool | None] = [None] * layers

    def pool(self, number: int, queries: jax.Array, rows: Rows) -> Pool | None:
        """See `Source`."""
        if number in self._sparse:
            index = number - self._sparse.start
            asked = self._retrieval.request(index, queries, self._spans)
            self.pools[number] = self._wait(number, asked, self._spans)
        return self.pools[number]


class LayerBefore:
    """Waits for the rows that were asked for one layer ago, and asks for the next layer's."""

    def __init__(
        self,
        engine: HeraldEngine,
        retrieval: Retrieval,
        sparse: range,
        spans: Sequence[Span],
        wait: Wait,
    ):
        self._engine, self._retrieval, self._sparse = engine, retrieval, sparse
        self._spans, self._wait = spans, wait
        self._asked: dict[int, Future[Retrieved]] = {}
        self.pools: list[Pool | None] = [None] * len(engine.layers)

    def pool(self, number: int, queries: jax.Array, rows: Rows) -> Pool | None:
        """See `Source`."""
        following = number + 1
        if number == self._sparse.start:
            self._ask(number, queries)  # nobody before it knows the pool's rows
        if following in self._sparse:
            width = self._engine.width
            guess = self._engine.run_layer(forward.predict, following, *rows, width=width)
            self._ask(following, guess)
        if number in self._sparse:
            self.pools[number] = self._wait(number, self._asked.pop(number), self._spans)
        return self.pools[number]

    def _ask(self, number: int, queries: jax.Array) -> None:
        if number not in self._asked:
            index = number - self._sparse.start
            self._asked[number] = self._retrieval.request(index, queries, self._spans)


class OnDevice:
    """Chooses on the device from the cache; this forward attends all of it."""

    def __init__(
        self,
        engine: HeraldEngine,
        caches: Sequence[LayerKV | None],
        sparse: range,
        scanned: tuple[jax.Array, jax.Array, jax.Array],
        slots: int,
    ):
        self._engine, self._caches, self._sparse = engine, caches, sparse
        self._scanned, self._slots = scanned, slots
        self.pools: list[Pool | None] = [None] * len(engine.layers)
        self.ids: dict[int, jax.Array] = {}

    def pool(self, number: int, queries: jax.Array, rows: Rows) -> Pool | None:
        """See `Source`."""
        if number in self._sparse:
            self.pools[number], self.ids[number] = self._engine.run_plain(
                select_on_device,
                self._caches[number],
                queries,
                *self._scanned,
                rule=self._engine.config.rule,
                slots=self._slots,
            )
        return None


def run_layers(
    engine: HeraldEngine, state: HeraldState, turn: Turn, source: Source, *, lookahead: bool
) -> tuple[HeraldState, Turn]:
    """One forward, layer by layer.

    Args:
        engine: its programs.
        state: the batch; its arrays are donated.
        turn: what was given before.
        source: brings each layer's rows.
        lookahead: the draft and the next block ride along.
    """
    x, committing, after = hidden_rows(engine, state, turn, source, lookahead=lookahead)
    block, turn = engine.run(forward.conclude, state.block, turn, x, committing)
    return dataclasses.replace(after, block=block), turn


def hidden_rows(
    engine: HeraldEngine, state: HeraldState, turn: Turn, source: Source, *, lookahead: bool
) -> tuple[jax.Array, jax.Array, HeraldState]:
    """What the last layer leaves of all rows, which requests commit, and the state with their KV.

    Args:
        engine: as in `run_layers`.
        state: likewise.
        turn: likewise.
        source: likewise.
        lookahead: likewise.
    """
    facts, _ = diffusion_of(engine.model.config)
    block, width = state.block, engine.width
    x, tables, committing, centre = engine.run(
        forward.begin, engine.rope, block, turn, lookahead=lookahead
    )
    if engine.config.queries_used == "all":
        centre = None
    every = []
    for number in range(len(engine.layers)):
        qkv, queries = engine.run_layer(forward.project, number, x, tables, centre, width=width)
        pool = source.pool(number, queries, (x, tables, centre))
        kept = state.caches[number], state.init[number], state.previous[number]
        x, kept = engine.run_layer(
            forward.attend_layer,
            number,
            *(x, qkv, kept, pool, block.start, committing),
            donate=(1, 3),
            width=width,
            causal=facts.causal_clean,
        )
        every.append(kept)
    caches, init, previous = (tuple(part) for part in zip(*every, strict=True))
    return x, committing, HeraldState(block, caches, init, previous)
