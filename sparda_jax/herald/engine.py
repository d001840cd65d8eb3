"""The engine: what is compiled and checked once, and the batches that it runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import jax

from host_offload import memory
from sparda_jax.config import SamplingParams
from sparda_jax.diffusion.config import DenoiseParams, diffusion_of
from sparda_jax.diffusion.generate import Block
from sparda_jax.diffusion.plan import BlockEngineConfig, BlockPlan, plan_blocks, settings_of_each
from sparda_jax.engine.modules import Parameters
from sparda_jax.engine.programs import Programs
from sparda_jax.engine.report import RequestResult
from sparda_jax.engine.service import SchedulerConfig
from sparda_jax.engine.serving import Serving
from sparda_jax.herald.config import HeraldConfig
from sparda_jax.herald.generation import HeraldGeneration
from sparda_jax.herald.layout import Layout
from sparda_jax.herald.report import HeraldReport
from sparda_jax.herald.requests import Request
from sparda_jax.herald.rows import BlockRows
from sparda_jax.models.decoder import Decoder
from sparda_jax.models.rope import rope_table


class HeraldEngine(Serving):
    """Runs requests of a block-diffusion model against pools of chosen rows.

    `generate` runs some to their ends; `submit` takes requests that come and go (see `Serving`).

    Example:
        >>> engine = HeraldEngine(model, config=HeraldConfig(mode="herald"))
        >>> results, report = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=64))

    Attributes:
        model: parameters.
        config: how batches are run.
        device: where the model runs.

    Raises:
        ValueError: a model without block diffusion, or settings that do not fit it.
        NotImplementedError: block sizes that do not fit together.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        config: HeraldConfig | None = None,
        device: jax.Device | None = None,
    ):
        self.model, self.config = model, config or HeraldConfig()
        self.config.check(model.config)
        self.device = device or jax.devices()[0]
        self.parameters = Parameters.of(model)
        self.layers = tuple(Parameters.of(layer) for layer in model.layers)
        # Layers of one structure share programs; a dense layer among experts has its own.
        self._programs: list[tuple[Any, Programs]] = []
        for layer in self.layers:
            if all(layer.structure != known for known, _ in self._programs):
                made = Programs(self.parameters, (layer,))
                self._programs.append((layer.structure, made))
        self.rope = self._rope()

    def _rope(self) -> Any:
        model = self.model.config
        length = self.config.max_length or model.max_position_embeddings
        return self.put(jax.jit(rope_table, static_argnums=(0, 1))(model.rope, length))

    def with_config(self, config: HeraldConfig) -> HeraldEngine:
        """An engine with other settings that shares this one's compiled programs."""
        config.check(self.model.config)
        other = copy.copy(self)
        other.config, other._scheduler = config, None
        if config.max_length != self.config.max_length:
            other.rope = other._rope()
        return other

    @property
    def width(self) -> int:
        """W of the model."""
        return diffusion_of(self.model.config)[0].block_size

    @property
    def compile_seconds(self) -> float:
        """Time spent compiling so far."""
        return sum(programs.compile_seconds for _, programs in self._programs)

    @property
    def compilations(self) -> int:
        """Programs compiled so far."""
        return sum(programs.compilations for _, programs in self._programs)

    def places(self, config: SchedulerConfig) -> BlockRows:
        """Rows for requests that come and go; for `Scheduler`.

        Raises:
            ValueError: rows that do not fit in memory, or more tokens than the engine's limit.
        """
        limit = self.config.max_length or self.model.config.max_position_embeddings
        return BlockRows(self, config.rows, config.length(limit))

    def put(self, tree: Any) -> Any:
        """Copies a pytree of arrays to the device, explicitly."""
        return jax.device_put(tree, memory.device_sharding(self.device))

    def run(
        self, function: Callable[..., Any], *args: Any, donate: Sequence[int] = (), **static: Any
    ) -> Any:
        """`function(model, *args, **static)` as a compiled program; donated: positions, model 0."""
        program = self._programs[0][1].on_model(function, donate=donate, **static)
        return program(self.parameters.arrays, *args)

    def run_layer(
        self,
        function: Callable[..., Any],
        number: int,
        *args: Any,
        donate: Sequence[int] = (),
        **static: Any,
    ) -> Any:
        """`function(layer, *args, **static)` likewise."""
        layer = self.layers[number]
        programs = next(made for known, made in self._programs if known == layer.structure)
        return programs.on_layer(function, donate=donate, **static)(layer.arrays, *args)

    def run_plain(
        self, function: Callable[..., Any], *args: Any, donate: Sequence[int] = (), **static: Any
    ) -> Any:
        """`function(*args, **static)` likewise."""
        return self._programs[0][1].plain(function, donate=donate, **static)(*args)

    def plan(
        self, prompts: Sequence[Sequence[int]], requests: Sequence[SamplingParams]
    ) -> BlockPlan:
        """Checks requests against the model's limits and works out the sizes of a batch."""
        config = self.config
        settings = BlockEngineConfig(
            kv_block=config.kv_block,
            prefill_chunk=config.prefill_chunk,
            max_length=config.max_length,
        )
        return plan_blocks(self.model.config, settings, prompts, requests, self.model.dtype)

    def layout(self, batch: int, plan: BlockPlan) -> Layout:
        """What lies where in a batch."""
        return Layout.of(self.config, self.model.config, plan, batch, self.model.dtype)

    def prepare(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        denoise: DenoiseParams | Sequence[DenoiseParams] | None = None,
    ) -> HeraldGeneration:
        """Checks requests against every limit, before any work, and returns them ready to run.

        Args:
            prompts: token ids of each request; lengths may differ.
            sampling: settings for all, or one for each.
            denoise: likewise; None: what the family's authors publish.

        Raises:
            ValueError: naming the value and the limit that it breaks.
        """
        samplings, rules = settings_of_each(self.model.config, prompts, sampling, denoise)
        plan = self.plan(prompts, samplings)
        requests = [
            Request(number, prompt, request, rule, self.model.config)
            for number, (prompt, request, rule) in enumerate(
                zip(prompts, samplings, rules, strict=True)
            )
        ]
        batch = min(self.config.batch or len(prompts), len(prompts))
        return HeraldGeneration(self, plan, requests, batch)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        denoise: DenoiseParams | Sequence[DenoiseParams] | None = None,
        *,
        on_block: Callable[[Block], None] | None = None,
    ) -> tuple[list[RequestResult], HeraldReport]:
        """Runs requests to their ends; arguments as those of `prepare`.

        Args:
            prompts: token ids of each request.
            sampling: settings for all, or one for each.
            denoise: likewise.
            on_block: called as blocks are finished; its `row` is the request's number.
        """
        generation = self.prepare(prompts, sampling, denoise)
        for block in generation:
            if on_block is not None:
                on_block(block)
        return generation.results(), generation.report
