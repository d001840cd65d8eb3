"""A batch of requests on its way: the decode loop, whoever filled the rows and with what."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from host_offload.fetch import EagerFetcher
from host_offload.host_pool import BlockPool, HostPool
from sparda_jax.engine.eager import eager_step
from sparda_jax.engine.plan import BatchPlan
from sparda_jax.engine.report import Report
from sparda_jax.engine.state import DecodeState, LogProbabilities, SparseCache, StepOutput

if TYPE_CHECKING:
    from sparda_jax.engine.generate import Engine

Call = Callable[[DecodeState], tuple[DecodeState, StepOutput]]


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """How likely one token was, by the model.

    Attributes:
      drawn: its log-probability.
      top: the likeliest tokens and their log-probabilities, likeliest first.
    """

    drawn: float
    top: list[tuple[int, float]]


@dataclasses.dataclass(frozen=True)
class Gain:
    """What one row gained in one call.

    Attributes:
      row: which.
      tokens: drawn, in order; the stop token included.
      likelihoods: of each; None where the request did not ask.
      steps: denoising steps of the block that they are; None where there are no blocks.
    """

    row: int
    tokens: list[int]
    likelihoods: list[Likelihood] | None
    steps: int | None = None


class Batch:
    """Rows that decode together, call by call.

    Attributes:
      plan: sizes.
      state: of all rows.
      pool: their blocks on the host; None when the KV is resident.
      report: counters, current at any time.
      lengths: tokens whose KV is cached, of each row. What the host knows of the rows: the state's
        own arrays are gone while a call runs.
      active: rows that still generate.
      failed: rows that met logits which are not finite.
      alternatives: likeliest tokens whose log-probabilities each row's request wants; None: it
        wants no log-probabilities.
    """

    def __init__(
        self,
        engine: Engine,
        plan: BatchPlan,
        state: DecodeState,
        pool: BlockPool | None,
        report: Report,
    ):
        self.plan, self.state, self.pool, self.report = plan, state, pool, report
        self.lengths = np.zeros(plan.batch, np.int32)
        self.active = np.zeros(plan.batch, bool)
        self.failed = np.zeros(plan.batch, bool)
        self.alternatives: list[int | None] = [None] * plan.batch
        self._engine = engine
        self._call: Call | None = None

    def look(self, alternatives: Sequence[int | None]) -> None:
        """Takes over what the state says of its rows, all of them new.

        Args:
          alternatives: see there.
        """
        state = self.state
        known = jax.device_get((state.lengths, state.active, state.failed))
        self.lengths, self.active, self.failed = (np.array(each) for each in known)
        self.alternatives = list(alternatives)

    def stop(self, row: int) -> None:
        """Ends a row between two calls; it stays as it is until another request takes it."""
        self.active[row] = False
        active = self._engine.put(self.active)
        self.state = dataclasses.replace(self.state, active=active)

    def decode(self) -> list[Gain]:
        """One decode call for all active rows.

        Returns:
          What each of them gained; nothing, where its logits were not finite at once. Those that
          ended are no longer `active`.
        """
        programs, report = self._engine.programs, self.report
        rows = np.flatnonzero(self.active)
        call = self.compile()
        begun, compiled = time.perf_counter(), programs.compile_seconds
        self.state, outputs = call(self.state)
        outputs, lengths, active, failed = jax.device_get(
            (outputs, self.state.lengths, self.state.active, self.state.failed)
        )
        self._write_back(lengths)
        # Copies: what device_get returns may be the device's memory and read-only.
        self.lengths, self.active, self.failed = (np.array(a) for a in (lengths, active, failed))
        late = programs.compile_seconds - compiled
        report.decode_compile_seconds += late
        report.decode_seconds += time.perf_counter() - begun - late
        report.add_steps(outputs)
        report.context_tokens = int(np.max(lengths))
        return self.gains(rows, outputs.tokens, outputs.emitted, outputs.logprobs)

    def gains(
        self, rows: np.ndarray, tokens: np.ndarray, emitted: np.ndarray, logprobs: LogProbabilities
    ) -> list[Gain]:
        """What some rows gained, from outputs stacked over steps."""
        return [self.gain(row, tokens, emitted, logprobs, column=row) for row in rows.tolist()]

    def compile(self) -> Call:
        """The decode call, compiled now if it is new."""
        if self._call is None:
            begun = time.perf_counter()
            self._call = self._prepare()
            self.report.decode_compile_seconds += time.perf_counter() - begun
        return self._call

    def _prepare(self) -> Call:
        """How to run one decode call, compiled."""
        engine, pool = self._engine, self.pool
        arrays, rope, num_blocks = engine.parameters.arrays, engine.rope, self.plan.num_blocks
        if pool is not None:
            # Compiles the write-back, which is first needed some tokens later; writes nothing.
            self.store_tails(np.full(self.plan.batch, -1, np.int32))
        if pool is not None and engine.config.fetch == "eager":
            fetcher = EagerFetcher(pool, engine.device)
            return lambda state: eager_step(
                engine.programs,
                engine.parameters,
                engine.layers,
                rope,
                state,
                fetcher,
                engine.sparse,
                num_blocks,
                engine.choosers,
                engine.config.top_logprobs,
            )
        program = engine.decode_program(num_blocks)
        program.compile(arrays, rope, pool and pool.layers, self.state, engine.choosers)
        return lambda state: program(arrays, rope, pool and pool.layers, state, engine.choosers)

    def tails(self) -> tuple[jax.Array, ...]:
        """The tail rings of all layers."""
        return tuple(cache.tail for cache in self.state.layers if isinstance(cache, SparseCache))

    def store_tails(self, targets: np.ndarray) -> None:
        """Writes one block of some rows from the tail rings to the pool; targets: -1: none."""
        assert isinstance(
            self.pool, HostPool
        )  # rows whose blocks have pages have a way of their own
        self.pool.write_back(self.tails(), self._engine.put(targets))

    def _write_back(self, lengths: np.ndarray) -> None:
        """Writes the tail blocks that filled between ``self.lengths`` and ``lengths``."""
        engine, size = self._engine, self._engine.sparse.geometry.block_size
        filled = lengths // size > self.lengths // size
        if self.pool is not None and np.any(filled):
            targets = np.where(filled, lengths // size - 1, -1).astype(np.int32)
            self.store_tails(targets)
            layers = len(engine.layers) - self.plan.resident_layers
            heads = engine.model.config.num_kv_heads
            self.report.written_back_runs += int(np.sum(filled)) * heads * layers

    def gain(
        self,
        row: int,
        tokens: np.ndarray,
        emitted: np.ndarray,
        logprobs: LogProbabilities,
        *,
        column: int,
    ) -> Gain:
        """What a row gained, from outputs stacked over steps."""
        steps, count = np.flatnonzero(emitted[:, column]), self.alternatives[row]
        likelihoods = None
        if count is not None:
            of_row = jax.tree.map(lambda leaf: leaf[steps, column].tolist(), logprobs)
            likelihoods = [
                Likelihood(drawn, list(zip(ids[:count], top[:count], strict=True)))
                for drawn, ids, top in zip(of_row.drawn, of_row.top_tokens, of_row.top, strict=True)
            ]
        return Gain(row, tokens[steps, column].tolist(), likelihoods)
