"""A batch on its way: requests join and leave at block boundaries, pools change there.

One turn gives every running request one block. With lookahead:

    device   first forward | forward with draft and next rows | denoise ... commit |
    host                     scan, gather, copy for the next block, layer by layer | swap
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from host_offload import memory
from host_offload.cpu_selection import CpuSelector
from host_offload.retrieval import Retrieval, Retrieved, Span
from host_offload.row_store import RowStore
from sparda_jax.config import SamplingParams
from sparda_jax.diffusion.config import DenoiseParams
from sparda_jax.diffusion.generate import Block
from sparda_jax.diffusion.plan import BlockPlan
from sparda_jax.herald import forward
from sparda_jax.herald import layout as layouts
from sparda_jax.herald.admission import Admitted, admitted, admitting
from sparda_jax.herald.layerwise import LayerBefore, LookAhead, OnDevice, OwnQueries, run_layers
from sparda_jax.herald.report import Event, HeraldReport, host_events
from sparda_jax.herald.requests import Request, block_fields
from sparda_jax.herald.state import Pool, Turn

if TYPE_CHECKING:
    from sparda_jax.herald.engine import HeraldEngine

# More forwards than any block takes.
_NO_LIMIT = np.int32(2**30)


class HeraldSession:
    """Runs up to B requests at a time; a context, so that the host's threads end.

    Attributes:
        layout: what lies where.
        state: of the batch.
        pools: chosen rows of each layer; None where a layer attends its cache.
        requests: by row; None where it is free.
        store: committed rows in host memory; None where all KV is on the device. One that another
            session has left can be given, since its pages take a while.
        report: counters, current at any time.
        chosen: rows of the last selection of each (layer, row), where the host chose.
        events: of the last turn: "GPU" from its begin until all rows had given their block;
            "scan" (with the choice), "gather" and "copy" of each request or layer; "ahead",
            "swap" and "commit", the calling thread at these.
    """

    def __init__(
        self, engine: HeraldEngine, batch: int, plan: BlockPlan, store: RowStore | None = None
    ):
        config, model = engine.config, engine.model
        self._engine, self._plan, self._config, self._policy = engine, plan, config, config.policy
        self.layout = engine.layout(batch, plan)
        self.requests: list[Request | None] = [None] * batch
        self.report = HeraldReport(mode=config.mode, device_kv_bytes=self.layout.device_bytes)
        self.chosen: dict[tuple[int, int], np.ndarray] = {}
        self.events: list[Event] = []
        self.store = store
        self._retrieval: Retrieval | None = None
        self._broken: Exception | None = None
        self._first: list[Block] = []
        what = f"the KV of {batch} requests in mode {config.mode} on the device"
        limit = config.device_kv_bytes
        memory.check_device_budget(what, self.layout.device_bytes, limit, engine.device)
        idle = block_fields(Request(0, [0], SamplingParams(), DenoiseParams(), model.config))
        block = jax.tree.map(lambda array: np.repeat(array, batch, axis=0), idle)
        block = engine.put(dataclasses.replace(block, active=np.zeros(batch, bool)))
        self.state, self.pools = engine.run_plain(layouts.empty_state, block, layout=self.layout)
        if self._policy.offload and self.layout.sparse:
            self._open_store()

    def _open_store(self) -> None:
        engine, config, layout = self._engine, self._config, self.layout
        shape = layout.store(config.quantised_keys)
        if self.store is None:
            self.store = RowStore(shape, engine.device, budget=config.host_kv_bytes)
        elif not self.store.shape.holds(shape):
            raise ValueError(f"a store of {self.store.shape} is not one of {shape}")
        self.report.host_kv_bytes = self.store.shape.nbytes
        self._retrieval = Retrieval(
            self.store,
            CpuSelector(config.rule, shape.width**-0.5),
            layout.slots * config.kv_block,
            config.kv_block,
            engine.device,
            workers=config.workers,
            quantised=config.quantised_keys,
            implementation=config.selection,
        )
        self.report.pinning_seconds = self._retrieval.pinning_seconds

    def __enter__(self) -> HeraldSession:
        return self

    def __exit__(self, *args: object) -> None:
        if self._retrieval is not None:
            self._retrieval.close(wait=self._broken is None)

    @property
    def busy(self) -> bool:
        """Whether a request runs."""
        return any(request is not None for request in self.requests)

    @property
    def free(self) -> bool:
        """Whether a request can join."""
        return any(request is None for request in self.requests)

    def admit(self, request: Request) -> None:
        """Prefills a request and gives it a row, between two turns.

        Args:
            request: not begun; its lengths were checked by the plan.
        """
        if self._broken is not None:
            request.fail(f"{type(self._broken).__name__}: {self._broken}")
            return
        begun, compiled = time.perf_counter(), self._engine.compile_seconds
        self.place(request, self.prefilled(request))
        late = self._engine.compile_seconds - compiled
        self.report.compile_seconds += late
        self.report.prefill_seconds += time.perf_counter() - begun - late
        self.report.prefill_tokens += request.aligned

    def prefilled(self, request: Request) -> Admitted:
        """A request as a batch of one; equal prompts can share it."""
        span = self._span(0, request.aligned - self.layout.width)
        return admitted(self._engine, self.layout, self._plan, request, span)

    def prefilling(self, request: Request) -> Generator[jax.Array, None, Admitted]:
        """`prefilled` in units, between which turns may run; see `admission.admitting`."""
        span = self._span(0, request.aligned - self.layout.width)
        return admitting(self._engine, self.layout, self._plan, request, span)

    def place(self, request: Request, found: Admitted, row: int | None = None) -> None:
        """Gives a prefilled request a row: this one, which is free, or any."""
        engine, row = self._engine, self.requests.index(None) if row is None else row
        both, one = (self.state, self.pools), (found.state, found.pools)
        place = engine.put(np.int32(row))
        self.state, self.pools = engine.run_plain(layouts.insert, both, one, place, donate=(0,))
        if self._retrieval is not None:
            self._settle_commits()  # one prompt's rows on their way at a time
            self._retrieval.commit(found.rows, [(0, row, 0)])
        self.requests[row] = request
        if request.tokens:
            self._first.append(Block(request.number, list(request.tokens), 0))
            self.report.decode_tokens += len(request.tokens)

    def _span(self, row: int, end: int) -> Span:
        """What is scanned for a block whose previous block begins at `end`."""
        first = self._config.init_rows
        end = max(end, first)
        return Span(row, first, end, self._config.budget.count(end - first, self._config.rule.run))

    def _spans(self, ahead: int) -> list[Span]:
        """Of the requests that need rows: for the block at work, or the one after it."""
        width = self.layout.width
        spans = []
        for row, request in enumerate(self.requests):
            if request is None or request.reason is not None or (ahead and not request.has_next):
                continue
            spans.append(self._span(row, request.start + (ahead - 1) * width))
        return spans

    def turn(self) -> list[Block]:
        """Gives every running request one block; swaps the pools.

        Returns:
            What each gained.
        """
        if not self.busy:
            return []
        engine, policy = self._engine, self._policy
        begun, compiled = time.perf_counter(), engine.compile_seconds
        self.events = []
        batch, width = len(self.requests), self.layout.width
        turn = engine.run_plain(forward.new_turn, batch=batch, width=width)
        ahead: dict[int, Future[Retrieved]] = {}
        spans = self._spans(ahead=int(policy.when == "ahead"))
        if spans and self.layout.sparse and policy.when == "ahead":
            turn = self._denoise(turn, np.int32(1))
            source = LookAhead(self._required(), self.layout.sparse, spans, self.pools)
            with self._timed("ahead"):
                self.state, turn = run_layers(engine, self.state, turn, source, lookahead=True)
            ahead = source.futures
        elif self.layout.sparse and policy.when == "block":
            turn = self._choosing_forward(turn, spans)
        elif self.layout.sparse and policy.when == "step":
            while not np.all(jax.device_get(turn.gave | ~self.state.block.active)):
                turn = self._choosing_forward(turn, spans)
        turn = self._denoise(turn, _NO_LIMIT)
        counts = [pool.count for pool in self.pools if pool is not None]
        block = self.state.block
        told, active, failed, counts = jax.device_get((turn, block.active, block.failed, counts))
        self.events.append(("GPU", begun, time.perf_counter()))
        if ahead:
            with self._timed("swap"):
                self._swap(ahead, spans)
        with self._timed("commit"):
            self._settle_commits()
            self._commit(told)
        blocks = self._record(told, failed, counts)
        self.drop_ended(active)
        late = engine.compile_seconds - compiled
        self.report.compile_seconds += late
        self.report.decode_seconds += time.perf_counter() - begun - late
        self.report.turns += 1
        first, self._first = self._first, []
        return first + blocks

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.events.append((what, begun, time.perf_counter()))

    def _required(self) -> Retrieval:
        assert self._retrieval is not None
        return self._retrieval

    def _choosing_forward(self, turn: Turn, spans: Sequence[Span]) -> Turn:
        """A forward whose rows are chosen in it."""
        engine, sparse = self._engine, self.layout.sparse
        source: OnDevice | OwnQueries | LayerBefore
        if not self._policy.offload:
            source = OnDevice(
                engine, self.state.caches, sparse, self._scanned(spans), self.layout.slots
            )
        elif self._policy.when == "block":
            layers = len(engine.layers)
            source = OwnQueries(self._required(), sparse, spans, self._wait, layers)
        else:
            source = LayerBefore(engine, self._required(), sparse, spans, self._wait)
        self.state, turn = run_layers(engine, self.state, turn, source, lookahead=False)
        self.pools = tuple(source.pools)
        return turn

    def _scanned(self, spans: Sequence[Span]) -> Any:
        """Spans as arrays; nothing for rows that are not among them."""
        table = np.zeros((3, len(self.requests)), np.int32)
        for span in spans:
            table[:, span.row] = span.first, span.end, span.count
        return self._engine.put(tuple(table))

    def _denoise(self, turn: Turn, most: np.int32) -> Turn:
        engine = self._engine
        self.state, turn = engine.run(
            forward.denoise,
            engine.rope,
            self.state,
            self.pools,
            turn,
            engine.put(most),
            donate=(2, 4),
        )
        return turn

    def _wait(self, number: int, asked: Future[Retrieved], spans: Sequence[Span]) -> Pool:
        """The rows of a layer, waited for and counted."""
        return self._pools_of({number: self._arrival(number, asked, spans)})[number]

    def _arrival(
        self, number: int, asked: Future[Retrieved], spans: Sequence[Span]
    ) -> Retrieved | None:
        """What was asked for a layer, once it is there; what fails ends its requests."""
        started = time.perf_counter()
        try:
            if self._broken is not None:
                raise self._broken
            found = asked.result(self._config.patience)
            found.kv.block_until_ready()
        except Exception as caught:
            error = caught
            if isinstance(caught, TimeoutError) and self._broken is None:
                limit = self._config.patience
                error = TimeoutError(f"the selection of layer {number} took over {limit:g} s")
                self._broken = error
            for span in spans:
                self._fail(span.row, error)
            return None
        self.report.retrieval_stall_seconds += time.perf_counter() - started
        self.report.add(found)
        self.events += host_events(found)
        for row, error in found.errors.items():
            self._fail(row, error)
        self.chosen.update({(number, row): ids for row, ids in found.ids.items()})
        return found

    def _pools_of(self, arrived: dict[int, Retrieved | None]) -> dict[int, Pool]:
        """Pools of what arrived for some layers; without rows where nothing did."""
        there = {n: found for n, found in arrived.items() if found is not None}
        size, batch = self._config.kv_block, len(self.requests)
        counts = np.array([found.counts for found in there.values()]).reshape(-1, batch)
        rows = tuple(found.kv for found in there.values())
        made = self._engine.run_plain(layouts.as_pools, rows, self._engine.put(counts), size=size)
        pools = dict(zip(there, made, strict=True))
        for number in arrived.keys() - there.keys():
            empty = self._engine.run_plain(layouts.empty_pool, layout=self.layout, batch=batch)
            pools[number] = empty
        return pools

    def _fail(self, row: int, error: Exception) -> None:
        request = self.requests[row]
        if request is not None:
            request.fail(f"{type(error).__name__}: {error}")

    def _swap(self, ahead: dict[int, Future[Retrieved]], spans: Sequence[Span]) -> None:
        """The rows chosen for the next block take the place of those of the last."""
        arrived = {n: self._arrival(n, asked, spans) for n, asked in ahead.items()}
        pools: list[Pool | None] = [None] * self.layout.layers
        self.pools = ()  # before the new ones are made
        for number, pool in self._pools_of(arrived).items():
            pools[number] = pool
        self.pools = tuple(pools)

    def _settle_commits(self) -> None:
        """Waits for the host's copies of committed rows; without them no scan would be right."""
        if self._retrieval is None or self._broken is not None:
            return
        try:
            self.report.d2h_bytes += self._retrieval.settle(self._config.patience)
        except Exception as error:
            self._broken = error
            for row in range(len(self.requests)):
                self._fail(row, error)

    def _commit(self, turn: Turn) -> None:
        """Sends the KV of finished blocks to the host."""
        if self._retrieval is None:
            return
        rows = [
            (row, row, request.start)
            for row, request in enumerate(self.requests)
            if request is not None and turn.committed[row]
        ]
        if rows:
            self._retrieval.commit([self.state.previous[n] for n in self.layout.sparse], rows)

    def _record(self, turn: Turn, failed: np.ndarray, counts: Sequence[np.ndarray]) -> list[Block]:
        """What the running requests gained in a turn."""
        blocks, report = [], self.report
        report.forwards += int(turn.forwards)
        for row, request in enumerate(self.requests):
            if request is None or request.reason is not None:
                continue
            if failed[row]:
                request.fail("FloatingPointError: logits are not finite")
                continue
            new = request.gain_block(np.asarray(turn.tokens[row]), int(turn.handover[row]))
            steps = int(turn.steps[row])
            report.steps[steps] += 1
            report.decode_tokens += len(new)
            if self._policy.when == "ahead":
                report.drafted += int(turn.open[row].sum())
                report.draft_equal += int(turn.equal[row])
            near = self.layout.width if request.start else 0
            near += min(self._config.init_rows, max(request.start - near, 0))
            for count in counts:
                report.chosen_rows += int(count[row])
                report.attended_rows += int(count[row]) + near
                report.prefix_rows += request.start
                report.selections += 1
            blocks.append(Block(request.number, new, steps))
            if turn.committed[row]:
                request.start += self.layout.width
        return blocks

    @property
    def broken(self) -> Exception | None:
        """What ended the session for all requests."""
        return self._broken

    def drop_ended(self, active: np.ndarray | None = None) -> None:
        """Rows whose requests have ended rest and can be given away.

        Args:
            active: rows that the device takes for running; None: it is asked.
        """
        if active is None:
            active = jax.device_get(self.state.block.active)
        for row, request in enumerate(self.requests):
            if request is not None and request.reason is not None:
                self.requests[row] = None
        running = np.array([request is not None for request in self.requests])
        if np.any(active & ~running):
            block = dataclasses.replace(self.state.block, active=self._engine.put(active & running))
            self.state = dataclasses.replace(self.state, block=block)
