"""From prompts to tokens: the loop that drives prefill, decode and the host pool."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from host_offload import memory, overlap
from host_offload.host_pool import HostPool
from sparda_jax.config import EngineConfig, SamplingParams, SparseConfig
from sparda_jax.engine import decode, spmd
from sparda_jax.engine.batch import Batch, Gain
from sparda_jax.engine.choosers import (
    ForecastAhead,
    forecast_choosers,
    infinigen_choosers,
    own_choosers,
)
from sparda_jax.engine.modules import Parameters
from sparda_jax.engine.placement import Estimate, estimate
from sparda_jax.engine.plan import BatchPlan, check_memory, check_settings, plan_batch
from sparda_jax.engine.programs import Program, Programs
from sparda_jax.engine.prompts import Progress, PromptRun, first_tokens
from sparda_jax.engine.report import FinishReason, Report, RequestResult
from sparda_jax.engine.rows import Rows
from sparda_jax.engine.service import SchedulerConfig
from sparda_jax.engine.serving import Serving
from sparda_jax.engine.state import DecodeState, LayerCache
from sparda_jax.forecast.projection import Forecast
from sparda_jax.models.decoder import Decoder
from sparda_jax.models.rope import RopeTable, rope_table
from sparda_jax.sparse.infinigen import InfiniGen

OnToken = Callable[[int, int], None]


class Engine(Serving):
    """Runs batches of requests on one device, or on those that the model's parameters lie on.

    `generate` runs one batch to its end; `submit` takes requests that come and go (see `Serving`).

    Example:
      >>> engine = Engine(model, config=EngineConfig(mode="sparse", offload="host"))
      >>> results, report = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=8))

    Attributes:
      model: parameters.
      sparse: selection rules of the modes other than dense.
      config: how batches are run.
      device: where; of several, the first.
      mesh: of several devices, else None.
      programs: everything compiled so far.

    Raises:
      NotImplementedError: dense attention over offloaded KV.
      ValueError: more steps a call than a block has tokens, when offloaded; mode "sparda" without
        Forecast weights or "infinigen" without its skews, or these in another mode; rules under
        which "sparda" would miss blocks.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        sparse: SparseConfig | None = None,
        config: EngineConfig | None = None,
        forecast: Forecast | None = None,
        infinigen: InfiniGen | None = None,
        device: jax.Device | None = None,
    ):
        self.model = model
        self.sparse = sparse or SparseConfig()
        self.config = config or EngineConfig()
        self.mesh = spmd.mesh_of(model)
        first = jax.devices()[0] if self.mesh is None else self.mesh.devices.flat[0]
        self.device = device or first
        check_settings(self.config, self.sparse)
        self._check_weights("sparda", "Forecast weights", forecast)
        self._check_weights("infinigen", "a calibrated InfiniGen", infinigen)
        self.choosers = own_choosers(len(model.layers))
        if forecast is not None:
            self.choosers = forecast_choosers(forecast)
        elif infinigen is not None:
            self.choosers = infinigen_choosers(infinigen)
        self.partial_channels = 0 if infinigen is None else infinigen.channels
        self.parameters = Parameters.of(model)
        self.layers = tuple(Parameters.of(layer) for layer in model.layers)
        self.programs = Programs(self.parameters, self.layers, self.mesh)
        if self.mesh is not None:
            if self.config.fetch == "eager" or self.config.mode == "infinigen":
                raise NotImplementedError(
                    f"mode {self.config.mode!r} with fetch {self.config.fetch!r} on several devices"
                )
            spmd.check_on_mesh(self.choosers, self.mesh, "Forecast weights")
        # LongRoPE's factors depend on the requested maximum length, so there is one table.
        length = self.config.max_length or model.config.max_position_embeddings
        table = jax.jit(rope_table, static_argnums=(0, 1))(model.config.rope, length)
        self.rope: RopeTable = (
            self.put(table) if self.mesh is None else spmd.place(self.mesh, table, spmd.P())
        )

    def _check_weights(self, mode: str, what: str, given: object | None) -> None:
        if (self.config.mode == mode) != (given is not None):
            verb = "needs" if given is None else "takes no"
            raise ValueError(f"mode {self.config.mode!r} {verb} {what}")

    def forecast_kernel(self, index: int) -> jax.Array:
        """The projection that chooses the blocks of layer `index`, in mode "sparda"."""
        chooser = self.choosers[index]
        assert isinstance(chooser, ForecastAhead)
        return chooser.kernel

    def decode_program(self, num_blocks: int) -> Program:
        """`decode.decode_steps` of `steps_per_call` steps.

        Arguments: `parameters.arrays`, `rope`, the pool's layers or None, the state (donated),
        `choosers`.

        Args:
          num_blocks: M, blocks a sequence can hold.
        """
        return self.programs.on_model(
            decode.decode_steps,
            donate=(3,),
            options=overlap.CONCURRENT_OPTIONS if self.device.platform == "gpu" else None,
            steps=self.config.steps_per_call,
            sparse=None if self.config.mode == "dense" else self.sparse,
            num_blocks=num_blocks,
            prefetch=self.config.prefetch,
            top_logprobs=self.config.top_logprobs,
        )

    @property
    def host_dtype(self) -> str | None:
        """Of quantised KV in a host pool; None: the model's."""
        stored = self.config.host_kv_dtype
        return None if stored == "model" else stored

    @property
    def run_bytes(self) -> int:
        """Bytes of one (block, KV head) as it crosses between host and device."""
        size = self.model.dtype.itemsize if self.host_dtype is None else 1
        return 2 * self.sparse.geometry.block_size * self.model.config.head_dim * size

    def host_pool(self, plan: BatchPlan) -> HostPool:
        """An empty pool for the layers whose KV is offloaded."""
        options: dict[str, Any] = {"resident": plan.resident_layers, "dtype": self.host_dtype}
        if self.mesh is not None:
            return spmd.SplitHostPool(len(self.layers), self.mesh, **options)
        return HostPool(len(self.layers), self.device, **options)

    def predict(self, plan: BatchPlan, context: int, hit_rate: float) -> Estimate:
        """What a decode step should take on an H200; see `sparda_jax.engine.placement`.

        Args:
          plan: of the batch; not for dense attention.
          context: tokens of a sequence.
          hit_rate: share of the free blocks that are in slots.
        """
        return estimate(
            self.model.config,
            self.sparse,
            self.config,
            batch=plan.batch,
            context=context,
            resident=plan.resident_layers,
            weight_bytes=memory.tree_bytes(self.parameters.arrays),
            itemsize=self.model.dtype.itemsize,
            hit_rate=hit_rate,
        )

    def put(self, tree: Any) -> Any:
        """Copies a pytree of (numpy or jax) arrays to the device, explicitly.

        On several devices each gets its requests' part of every array that has axes.
        """
        if self.mesh is not None:
            return spmd.place(self.mesh, tree, spmd.ROWS)
        return jax.device_put(tree, memory.device_sharding(self.device))

    def places(self, config: SchedulerConfig) -> Rows:
        """Rows for requests that come and go; for `Scheduler`.

        Raises:
          ValueError: rows that do not fit in memory, or more tokens than the engine's limit.
          NotImplementedError: several devices; a model with importance biases (NOSA).
        """
        if self.mesh is not None or self.model.config.kv_importance:
            what = "a model with importance biases" if self.mesh is None else "several devices"
            raise NotImplementedError(f"the scheduler does not serve {what}")
        limit = self.config.max_length or self.model.config.max_position_embeddings
        length = config.length(limit)
        reuse = config.prefix_reuse
        return Rows(self, config.rows, length, stop_width=config.stop_tokens, reuse=reuse)

    def prepare(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> Generation:
        """Checks a batch against every limit, before any work, and returns it ready to run.

        Raises:
          ValueError: naming the value and the limit that it breaks.
        """
        requests = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        if len(requests) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(requests)} sampling settings")
        plan = plan_batch(
            self.model.config,
            self.sparse,
            self.config,
            prompts,
            requests,
            self.model.dtype,
            partial_channels=self.partial_channels,
        )
        check_memory(spmd.share(plan, self.mesh), self.config, self.device)
        return Generation(self, plan, prompts, requests)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        on_token: OnToken | None = None,
        on_prefill: Progress | None = None,
    ) -> tuple[list[RequestResult], Report]:
        """Runs a batch to its end.

        Args:
          prompts: token ids of each request; lengths may differ.
          sampling: settings for all, or one for each.
          on_token: called with (request, token) as tokens arrive.
          on_prefill: called with (done, total) units of prefill work.

        Raises:
          ValueError: naming the value and the limit that it breaks; nothing was run then.
        """
        generation = self.prepare(prompts, sampling)
        generation.prefill(on_prefill)
        for row, token in generation:
            if on_token is not None:
                on_token(row, token)
        return generation.results(), generation.report


class Generation:
    """One batch on its way: prefill once, then iterate over (request, token).

    Attributes:
      plan: its sizes.
      report: counters, current at any time.
      pool: the host pool; None when the KV is resident.
      batch: the rows that decode; None before prefill.
    """

    def __init__(
        self,
        engine: Engine,
        plan: BatchPlan,
        prompts: Sequence[Sequence[int]],
        requests: Sequence[SamplingParams],
    ):
        self.plan = plan
        self.report = Report(full_kv_bytes=plan.full_kv_bytes, run_bytes=engine.run_bytes)
        self.batch: Batch | None = None
        self.pool: HostPool | None = None
        self._engine, self._prompts, self._requests = engine, prompts, requests
        self._tokens: list[list[int]] = [[] for _ in prompts]
        self._first: list[Gain] = []
        self._cancelled = np.zeros(len(prompts), bool)
        if plan.slots:
            self.pool = engine.host_pool(plan)

    def prefill(self, progress: Progress | None = None) -> None:
        """Runs the prompts and draws the first tokens.

        Args:
          progress: called with (done, total) units of work.
        """
        report, programs = self.report, self._engine.programs
        start, compiled = time.perf_counter(), programs.compile_seconds
        try:
            run = PromptRun(self._engine, self.plan, self.pool)
            x, lengths, layers = run(self._prompts, progress)
            self._first_token(x, lengths, tuple(layers))
        finally:
            # Also those of an interrupted prefill, of which no prompt token counts as done.
            report.prefill_compile_seconds = programs.compile_seconds - compiled
            report.prefill_seconds = time.perf_counter() - start - report.prefill_compile_seconds
            if self.pool is not None:
                report.host_kv_bytes = self.pool.nbytes
        sizes = [len(prompt) for prompt in self._prompts]
        report.prefill_tokens, report.context_tokens = sum(sizes), max(sizes)
        report.device_kv_bytes = memory.tree_bytes(layers)
        if self.pool is not None:
            report.device_kv_bytes += self.pool.scale_bytes

    def _first_token(
        self, x: jax.Array, lengths: jax.Array, layers: tuple[LayerCache, ...]
    ) -> None:
        state, drawn = first_tokens(self._engine, x, lengths, self._requests)
        state = dataclasses.replace(state, layers=layers)
        self.batch = Batch(self._engine, self.plan, state, self.pool, self.report)
        self.batch.look([request.logprobs for request in self._requests])
        # As the outputs of a call of one step.
        drawn = jax.tree.map(lambda leaf: leaf[None], jax.device_get(drawn))
        self._first = self.batch.gains(np.arange(self.plan.batch), *drawn)

    @property
    def state(self) -> DecodeState | None:
        """The decode state; None before prefill."""
        return None if self.batch is None else self.batch.state

    def _rows(self) -> Batch:
        if self.batch is None:
            raise RuntimeError("prefill has not run")
        return self.batch

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yields (request, token) as they are drawn, those of prefill first.

        Raises:
          RuntimeError: before prefill.
        """
        batch = self._rows()
        first, self._first = self._first, []
        yield from self._record(first)
        while np.any(batch.active):
            yield from self._record(batch.decode())

    def _record(self, gains: list[Gain]) -> list[tuple[int, int]]:
        """Keeps what was drawn before the caller, who may stop at any token, sees the first."""
        for gain in gains:
            self._tokens[gain.row] += gain.tokens
        steps = itertools.zip_longest(*(gain.tokens for gain in gains))
        return [
            (gain.row, token)
            for drawn in steps
            for gain, token in zip(gains, drawn, strict=True)
            if token is not None
        ]

    def cancel(self, row: int) -> None:
        """Ends one request between two tokens; it computes along idle and the others go on.

        Raises:
          RuntimeError: before prefill.
        """
        batch = self._rows()
        self._cancelled[row] = batch.active[row]
        batch.stop(row)

    def results(self) -> list[RequestResult]:
        """The requests as they stand; unfinished ones count as interrupted."""
        results, batch = [], self.batch
        for row, (prompt, tokens) in enumerate(zip(self._prompts, self._tokens, strict=True)):
            reason: FinishReason = "length"
            if batch is None:
                reason = "interrupted"
            elif batch.failed[row]:
                reason = "failed"
            elif self._cancelled[row]:
                reason = "cancelled"
            elif batch.active[row]:
                reason = "interrupted"
            elif tokens and tokens[-1] in self._requests[row].stop_token_ids:
                reason = "stop"
            results.append(RequestResult(len(prompt), tokens, reason))
        return results
