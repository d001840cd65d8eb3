"""The rows of one fixed-shape decode program as places for requests that come and go."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from host_offload import memory
from host_offload.paged_pool import PagedPool
from sparda_jax.config import SamplingParams
from sparda_jax.engine.batch import Batch, Gain
from sparda_jax.engine.capacity import check_rows, pool_pages
from sparda_jax.engine.holdings import Holdings, Place
from sparda_jax.engine.pages import Pages
from sparda_jax.engine.pieces import capacities, cut, piece_sizes
from sparda_jax.engine.places import Admission, Total
from sparda_jax.engine.plan import BatchPlan, check_request, plan_sizes
from sparda_jax.engine.prompts import first_tokens
from sparda_jax.engine.report import Report
from sparda_jax.engine.row_state import empty_layer, insert_row, read_blocks, read_tokens
from sparda_jax.engine.state import (
    DecodeState,
    DenseCache,
    SamplingState,
    sampling_fields,
)
from sparda_jax.engine.units import LayerKV, Paged, Prompt, run_prompt
from sparda_jax.validation import require

if TYPE_CHECKING:
    from sparda_jax.engine.generate import Engine


class Rows(Batch):
    """B rows of one decode state, and of the host pool, in which requests are run.

    A request is prefilled alone, in units between which the others decode, and then takes a row.
    A row that has none computes along idle. Which row is free is the caller's business.

    Attributes:
      max_length: tokens that a prompt and its answer may have together.
      pages: of the host pool; None where the KV is resident.

    Raises:
      ValueError: rows that do not fit in memory; says how many would.
    """

    def __init__(
        self,
        engine: Engine,
        batch: int,
        max_length: int,
        *,
        stop_width: int = 8,
        reuse: bool = True,
    ):
        size = engine.sparse.geometry.block_size
        self._engine, self._stop_width = engine, stop_width
        self.max_length = max_length
        chunk = -(-min(engine.config.prefill_chunk, max_length) // size) * size
        self._pieces = piece_sizes(chunk, size)
        self._capacities = capacities(self._pieces, max_length)
        check_rows(self._plan, batch, engine.config, engine.device)
        plan = self._plan(batch)
        self.pages: Pages | None = None
        if plan.slots:
            count = pool_pages(plan, engine.config, engine.device)
            self.pages = Pages(count, batch, plan.num_blocks)
        self.holdings = Holdings(engine, batch, self._pieces[-1], self.pages, reuse)
        state, self._pool = self._empty_state(plan), self._empty_pool(plan)
        pool = self._pool
        scales = 0 if pool is None else pool.scale_bytes
        report = Report(
            device_kv_bytes=memory.tree_bytes(state.layers) + scales,
            host_kv_bytes=0 if pool is None else pool.nbytes,
            full_kv_bytes=plan.full_kv_bytes,
            run_bytes=engine.run_bytes,
        )
        super().__init__(engine, plan, state, pool, report)

    def _plan(self, batch: int) -> BatchPlan:
        engine, length = self._engine, self._capacities[-1]
        return plan_sizes(
            engine.model.config,
            engine.sparse,
            engine.config,
            batch=batch,
            padded_length=length,
            num_blocks=length // engine.sparse.geometry.block_size,
            dtype=engine.model.dtype,
            partial_channels=engine.partial_channels,
        )

    def _empty_state(self, plan: BatchPlan) -> DecodeState:
        engine, batch = self._engine, plan.batch
        nobody = [SamplingParams(max_new_tokens=1)] * batch
        fields: dict[str, Any] = {
            "lengths": np.zeros(batch, np.int32),
            "last_token": np.zeros(batch, np.int32),
            "active": np.zeros(batch, bool),
            "failed": np.zeros(batch, bool),
            "remaining": np.zeros(batch, np.int32),
            "pages": None if self.pages is None else self.pages.of(range(batch)),
        }
        layers, resident = [], dataclasses.replace(plan, slots=0)
        for index in range(len(engine.layers)):
            make = engine.programs.plain(
                empty_layer,
                model=engine.model.config,
                sparse=engine.sparse,
                dense=engine.config.mode == "dense",
                plan=plan if index >= plan.resident_layers else resident,
                partial=engine.partial_channels if index else 0,
                dtype=engine.model.dtype,
            )
            layers.append(make())
        sampling = SamplingState(**engine.put(sampling_fields(nobody, width=self._stop_width)))
        return DecodeState(sampling=sampling, layers=tuple(layers), **engine.put(fields))

    def _empty_pool(self, plan: BatchPlan) -> PagedPool | None:
        if self.pages is None:
            return None
        engine, model = self._engine, self._engine.model.config
        return PagedPool(
            len(engine.layers),
            engine.device,
            pages=self.pages.count,
            block=(model.num_kv_heads, engine.sparse.geometry.block_size, model.head_dim),
            compute_dtype=engine.model.dtype,
            resident=plan.resident_layers,
            dtype=engine.host_dtype,
        )

    def store_tails(self, targets: np.ndarray) -> None:
        """See `Batch`."""
        assert self.pages is not None and self._pool is not None
        own = np.take_along_axis(self.pages.table, np.maximum(targets, 0)[:, None], axis=1)[:, 0]
        pages = np.where(targets < 0, -1, own)
        self._pool.write_back_pages(self.tails(), *self._engine.put((targets, pages)))

    def capacity(self, length: int) -> int:
        """Tokens of the bucket that a prompt of `length` tokens is prefilled in."""
        return next(size for size in self._capacities if size >= length)

    @property
    def free(self) -> int:
        """Rows that no request has."""
        return self.holdings.free

    @property
    def blocks(self) -> int:
        """KV blocks of each layer that there are for all requests."""
        whole = self.plan.batch * self.plan.num_blocks
        return whole if self.pages is None else self.pages.count

    def blocks_used(self, running: Mapping[int, int]) -> int:
        """KV blocks of running requests, in each layer; shared ones count once.

        Args:
          running: tokens of prompt and answer that each row's request may have.
        """
        if self.pages is not None:
            return self.pages.used(list(running))
        return sum(map(self.holdings.blocks, running.values()))

    def check(self, prompt: Sequence[int], params: SamplingParams, rule: None) -> None:
        """Raises ValueError for a request that can never run; names what it needs."""
        engine = self._engine
        require(rule is None, "denoising settings are for models of block diffusion")
        check_request("the prompt", prompt, params, engine.model.config, self.max_length)
        most, stops = self._stop_width, len(params.stop_token_ids)
        require(stops <= most, f"{stops} stop tokens, at most {most} are possible")
        top, likely = engine.config.top_logprobs, params.logprobs or 0
        require(likely <= top, f"{likely} likeliest tokens asked for, at most {top} are reported")

    def admit(self, prompt: Sequence[int], params: SamplingParams, rule: None) -> Admission | None:
        """Gives a request a row and begins its prefill; None: it has to wait.

        Args:
          prompt: the prompt.
          params: how to sample.
          rule: None.
        """
        place = self.holdings.find(prompt, len(prompt) + params.max_new_tokens)
        if place is None:
            return None
        return Admission(place.row, place.known, self._prefill(place, prompt, params))

    def remember(self, row: int, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """What a row has computed so far is there for prompts that begin alike."""
        size = self._engine.sparse.geometry.block_size
        # The block being written is not with the others yet, and what failed may not be finite.
        cached = 0 if self.failed[row] else int(self.lengths[row] - 1) // size * size
        self.holdings.remember(row, prompt, answer, cached)

    def leave(self, row: int) -> None:
        """A row's request has ended."""
        if self.active[row]:
            self.stop(row)
        self.holdings.leave(row)

    def failure(self, row: int) -> str | None:
        """Why a row's request failed; None: it did not."""
        return "the model's logits were not finite" if self.failed[row] else None

    @property
    def batch(self) -> int:
        """B."""
        return self.plan.batch

    @property
    def compilations(self) -> tuple[int, float]:
        """Programs compiled so far, and seconds that it took."""
        programs = self._engine.programs
        copies = 0 if self._pool is None else self._pool.compilations
        return programs.compilations + copies, programs.compile_seconds

    def totals(self) -> dict[str, Total]:
        """Counters for people who watch; see `Places`."""
        report, size = self.report, self.report.run_bytes
        return {
            "decode_seconds": (report.decode_seconds, "Time in decode calls"),
            "free_blocks": (report.free_blocks, "Blocks selected freely"),
            "hit_blocks": (report.hit_blocks, "Free blocks that were on the device"),
            "fetched_bytes": (
                (report.fetched_runs + report.cold_runs) * size,
                "KV copied from the host to the device in decode",
            ),
            "written_bytes": (
                report.written_back_runs * size,
                "KV copied from the device to the host in decode",
            ),
        }

    def close(self) -> None:
        """Nothing to end."""

    def _prefill(
        self, place: Place, tokens: Sequence[int], request: SamplingParams
    ) -> Generator[jax.Array, None, Gain]:
        """Runs a prompt and puts the request into its row, which decodes from then on.

        Yields:
          After each unit of work an array to wait for.

        Returns:
          The first token, or none if its logits were not finite.
        """
        row, first, engine = place.row, place.known, self._engine
        capacity = self.capacity(len(tokens))
        at = engine.put(np.int32(row))
        prompt = Prompt(
            tokens=tokens,
            pieces=list(cut(first, len(tokens), capacity, self._pieces)),
            chunk=self._pieces[0],
            capacity=capacity,
            kept=self._kept(place.source, capacity),
            paged=self._paged(row, first, len(tokens), capacity),
        )
        x, lengths, layers = yield from run_prompt(engine, prompt)
        pages = None if self.pages is None else self.pages.of([row])
        one, drawn = first_tokens(
            engine, x, lengths, [request], width=self._stop_width, pages=pages
        )
        insert = engine.programs.plain(insert_row, donate=(0,))
        self.state = insert(self.state, one, layers, at)
        drawn, active, failed = jax.device_get((drawn, one.active, one.failed))
        self.alternatives[row] = request.logprobs
        self.lengths[row] = len(tokens)
        self.active[row], self.failed[row] = active[0], failed[0]
        self.report.prefill_tokens += len(tokens) - first
        # As the outputs of a call of one step.
        return self.gain(row, *jax.tree.map(lambda leaf: leaf[None], drawn), column=0)

    def _kept(self, source: int | None, capacity: int) -> Callable[[int], LayerKV] | None:
        """The first KV of a layer that stays on the device, from the row that has it."""
        if source is None:
            return None
        programs, at = self._engine.programs, self._engine.put(np.int32(source))
        count = self.holdings.blocks(capacity)

        def kept(index: int) -> LayerKV:
            cache = self.state.layers[index]
            kv: LayerKV
            if isinstance(cache, DenseCache):
                kv = programs.plain(read_tokens, count=capacity)(cache, at)
            else:
                kv = programs.plain(read_blocks, count=count)(cache.blocks, at)
            return kv

        return kept

    def _paged(self, row: int, known: int, length: int, capacity: int) -> Paged | None:
        """A prompt's pages: those of what is known, and where the rest goes."""
        if self.pages is None or self._pool is None:
            return None
        first, last, count = map(self.holdings.blocks, (known, length, capacity))
        pages = self.pages.of([row])[0, :count]
        # Those of a chunk, where the rest is no longer, or all: few programs exist.
        chunk = self.holdings.blocks(self._pieces[0])
        some = chunk if last - first <= chunk else count
        begin = min(first, count - some)
        number = np.arange(begin, begin + some)
        new = np.where((number >= first) & (number < last), pages[number], -1)
        where, there = self._engine.put(((np.int32(begin), new), (pages, np.int32(first))))
        return Paged(self._pool, there if known else None, where)
