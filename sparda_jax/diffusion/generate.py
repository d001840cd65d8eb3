"""From prompts to blocks of tokens: prefill of the aligned prompt, then block after block."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
import numpy as np

from host_offload import memory, overlap
from sparda_jax.config import SamplingParams
from sparda_jax.diffusion import decode, prefill
from sparda_jax.diffusion.config import DenoiseParams, RuleState, diffusion_of, rule_fields
from sparda_jax.diffusion.plan import (
    BlockEngineConfig,
    BlockPlan,
    check_block_size,
    check_dual_cache,
    plan_blocks,
    settings_of_each,
)
from sparda_jax.diffusion.report import BlockReport
from sparda_jax.diffusion.state import BlockOutput, BlockState, LayerKV
from sparda_jax.engine.modules import Parameters
from sparda_jax.engine.plan import pad_prompts
from sparda_jax.engine.programs import Program, Programs
from sparda_jax.engine.report import FinishReason, RequestResult
from sparda_jax.engine.requests import StopStrings
from sparda_jax.engine.state import SamplingState, sampling_fields
from sparda_jax.models.decoder import Decoder
from sparda_jax.models.rope import rope_table
from sparda_jax.tokenization import Tokenizer

# One CUDA graph a forward, in which q, k and v, and gate and up, run side by side; and without the
# copy that XLA makes to multiply by k and v at once, in every forward: 17 MB a layer of SDAR-8B.
# GPUs alone read such options.
FORWARD_OPTIONS = overlap.CONCURRENT_OPTIONS | {"xla_gpu_dot_merger_threshold_mb": 0}


@dataclasses.dataclass(frozen=True)
class Block:
    """Tokens that one request gained.

    Attributes:
        row: which request.
        tokens: new ones, cut at the stop token and at the tokens asked for.
        steps: denoising forwards that the block took.
    """

    row: int
    tokens: list[int]
    steps: int


def gained(
    new: list[int], before: int, sampling: SamplingParams
) -> tuple[list[int], FinishReason | None]:
    """New tokens cut at the stop token and the limit, and how the request ends in them, if so.

    Args:
        new: tokens that a block gave.
        before: how many the request had.
        sampling: its settings.
    """
    new = new[: sampling.max_new_tokens - before]
    stop = next((i for i, token in enumerate(new) if token in sampling.stop_token_ids), None)
    if stop is not None:
        return new[: stop + 1], "stop"
    return new, "length" if before + len(new) == sampling.max_new_tokens else None


class BlockEngine:
    """Runs batches of requests of a block-diffusion model on one device.

    Example:
        >>> engine = BlockEngine(model)
        >>> results, report = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=64))

    Attributes:
        model: parameters.
        config: how batches are run.
        programs: everything compiled so far.

    Raises:
        ValueError: a model without block diffusion or without a mask token.
        NotImplementedError: a block size that does not divide the KV block.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        config: BlockEngineConfig | None = None,
        device: jax.Device | None = None,
    ):
        self.model, self.config = model, config or BlockEngineConfig()
        check_block_size(model.config, self.config)
        self.device = device or jax.devices()[0]
        self.parameters = Parameters.of(model)
        # Only whole-model programs are run, so one layer stands for all.
        self.programs = Programs(self.parameters, (Parameters.of(model.layers[0]),))
        length = self.config.max_length or model.config.max_position_embeddings
        table = jax.jit(rope_table, static_argnums=(0, 1))(model.config.rope, length)
        self.rope = self.put(table)

    def put(self, tree: Any) -> Any:
        """Copies a pytree of arrays to the device, explicitly."""
        return jax.device_put(tree, memory.device_sharding(self.device))

    def decode_program(self) -> Program:
        """`decode.decode_blocks`; arguments: parameters, rope, the state (donated)."""
        blocks = self.config.blocks_per_call
        options = FORWARD_OPTIONS if self.device.platform == "gpu" else None
        return self.programs.on_model(
            decode.decode_blocks,
            donate=(2,),
            options=options,
            blocks=blocks,
            sub_block=self.config.dual_cache,
        )

    def prepare(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        denoise: DenoiseParams | Sequence[DenoiseParams] | None = None,
        *,
        stop: Sequence[str] = (),
        tokenizer: Tokenizer | None = None,
    ) -> BlockGeneration:
        """Checks a batch against every limit, before any work, and returns it ready to run.

        Args:
            prompts: token ids of each request; lengths may differ.
            sampling: settings for all, or one for each.
            denoise: likewise; None: what the family's authors publish.
            stop: strings that end a request; its tokens end with the one that completes a string.
            tokenizer: of the model, to find them.

        Raises:
            ValueError: naming the value and the limit that it breaks; stop strings and no
                tokenizer.
        """
        requests, rules = settings_of_each(self.model.config, prompts, sampling, denoise)
        check_dual_cache(self.config, rules)
        stops = None
        if stop:
            if tokenizer is None:
                raise ValueError(f"stop strings {list(stop)} need a tokenizer")
            stops = [StopStrings(tokenizer.stream_decoder(), stop) for _ in prompts]
        dtype = self.model.dtype
        plan = plan_blocks(self.model.config, self.config, prompts, requests, dtype)
        what = f"the KV of {len(prompts)} x {plan.num_blocks} blocks on the device"
        limit = self.config.device_kv_bytes
        memory.check_device_budget(what, plan.kv_bytes, limit, self.device)
        width = diffusion_of(self.model.config)[0].block_size
        return BlockGeneration(self, plan, prompts, requests, rule_fields(rules, width), stops)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        denoise: DenoiseParams | Sequence[DenoiseParams] | None = None,
        *,
        stop: Sequence[str] = (),
        tokenizer: Tokenizer | None = None,
        on_block: Callable[[Block], None] | None = None,
    ) -> tuple[list[RequestResult], BlockReport]:
        """Runs a batch to its end; arguments as those of `prepare`.

        Args:
            prompts: token ids of each request.
            sampling: settings for all, or one for each.
            denoise: likewise.
            stop: strings that end a request.
            tokenizer: to find them.
            on_block: called as blocks are finished.
        """
        generation = self.prepare(prompts, sampling, denoise, stop=stop, tokenizer=tokenizer)
        generation.prefill()
        for block in generation:
            if on_block is not None:
                on_block(block)
        return generation.results(), generation.report


class BlockGeneration:
    """One batch on its way: prefill once, then iterate over finished blocks.

    Attributes:
        plan: its sizes.
        report: counters, current at any time.
        state: of the batch; None before prefill.
    """

    def __init__(
        self,
        engine: BlockEngine,
        plan: BlockPlan,
        prompts: Sequence[Sequence[int]],
        requests: Sequence[SamplingParams],
        rules: dict[str, np.ndarray],
        stops: list[StopStrings] | None = None,
    ):
        self.plan, self.report = plan, BlockReport(device_kv_bytes=plan.kv_bytes)
        self.state: BlockState | None = None
        self._engine, self._prompts, self._requests = engine, prompts, requests
        self._rules, self._stops = rules, stops
        self._tokens: list[list[int]] = [[] for _ in prompts]
        self._first: list[Block] = []
        count = len(prompts)
        self._active, self._failed = np.ones(count, bool), np.zeros(count, bool)
        self._ended: dict[int, FinishReason] = {}

    def prefill(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Runs the aligned prompts and sets up the first block of each request.

        Args:
            progress: called with (done, total) tokens.
        """
        engine, plan, programs = self._engine, self.plan, self._engine.programs
        begun, compiled = time.perf_counter(), programs.compile_seconds
        aligned = engine.put(np.array(plan.aligned, np.int32))
        sampling = SamplingState(**engine.put(sampling_fields(self._requests)))
        make = programs.plain(
            prefill.empty_caches,
            shape=plan.cache_shape,
            layers=engine.model.config.num_layers,
            size=engine.model.config.hidden_size,
            dtype=engine.model.dtype,
        )
        layers, last = make()
        tokens, _ = pad_prompts(
            [prompt[:size] for prompt, size in zip(self._prompts, plan.aligned, strict=True)],
            plan.padded,
        )
        run = programs.on_model(prefill.prefill_chunk, donate=(5, 6))
        for at in range(0, plan.padded, plan.chunk):
            part, start = engine.put((tokens[:, at : at + plan.chunk], np.int32(at)))
            layers, last = run(
                engine.parameters.arrays, engine.rope, part, start, aligned, layers, last
            )
            if progress is not None:
                last.block_until_ready()
                progress(at + plan.chunk, plan.padded)
        self.state = self._first_blocks(layers, last, aligned, sampling)
        jax.block_until_ready(self.state)
        late = programs.compile_seconds - compiled
        self.report.compile_seconds += late
        self.report.prefill_seconds = time.perf_counter() - begun - late
        self.report.prefill_tokens = sum(plan.aligned)

    def _first_blocks(
        self,
        layers: tuple[LayerKV, ...],
        last: jax.Array,
        aligned: jax.Array,
        sampling: SamplingState,
    ) -> BlockState:
        """The prompt's tail as fixed tokens, then masks; or the hand-over token, where one is."""
        engine, model = self._engine, self._engine.model.config
        facts, _ = diffusion_of(model)
        width, count = facts.block_size, len(self._prompts)
        tokens, masked = np.zeros((count, width), np.int32), np.ones((count, width), bool)
        for row, (prompt, size) in enumerate(zip(self._prompts, self.plan.aligned, strict=True)):
            tail = prompt[size:]
            tokens[row, : len(tail)], masked[row, : len(tail)] = tail, False
        if facts.logit_shift:
            run = engine.programs.on_model(prefill.first_handover)
            drawn = jax.device_get(run(engine.parameters.arrays, last, aligned, sampling))
            for row in np.flatnonzero(masked[:, 0]).tolist():
                tokens[row, 0], masked[row, 0] = drawn[row], False
                self._first += self._gain(row, [int(drawn[row])], 0)
        shape = (*self.plan.cache_shape[:2], 2, width, model.head_dim)
        empty = np.zeros(shape, engine.model.dtype)
        block_kv = (empty,) * model.num_layers if engine.config.dual_cache is not None else None
        fields = {
            "start": np.array(self.plan.aligned, np.int32),
            "tokens": tokens,
            "masked": masked,
            "step": np.zeros(count, np.int32),
            "last_sub": np.full(count, -1, np.int32),
            "active": self._active,
            "failed": self._failed,
            "prompt_length": np.array([len(prompt) for prompt in self._prompts], np.int32),
            "limit": np.array(self._limits(), np.int32),
            "block_kv": block_kv,
        }
        rule = RuleState(**engine.put(self._rules))
        return BlockState(layers=layers, sampling=sampling, rule=rule, **engine.put(fields))

    def _limits(self) -> list[int]:
        pairs = zip(self._prompts, self._requests, strict=True)
        return [len(prompt) + request.max_new_tokens for prompt, request in pairs]

    def __iter__(self) -> Iterator[Block]:
        """Yields what each request gains, block by block.

        Raises:
            RuntimeError: before prefill.
        """
        if self.state is None:
            raise RuntimeError("prefill has not run")
        first, self._first = self._first, []
        yield from first
        engine, report = self._engine, self.report
        program = engine.decode_program()
        while np.any(self._active):
            begun, compiled = time.perf_counter(), program.compile_seconds
            starts = jax.device_get(self.state.start)
            arguments = engine.parameters.arrays, engine.rope, self.state
            self.state, output = program(*arguments)
            output, active, self._failed = jax.device_get(
                (output, self.state.active, self.state.failed)
            )
            self._active = active & self._active
            late = program.compile_seconds - compiled
            report.compile_seconds += late
            report.decode_seconds += time.perf_counter() - begun - late
            report.forwards += int(output.forwards)
            report.narrow_forwards += int(output.narrow)
            blocks = self._record(starts, output)
            if np.any(active & ~self._active):
                self._tell_device()  # of stop strings
            yield from blocks

    def _record(self, starts: np.ndarray, output: BlockOutput) -> list[Block]:
        """Keeps what came before the caller, who may stop at any block, sees the first."""
        blocks = []
        width = output.tokens.shape[2]
        for row, index in np.argwhere(np.arange(output.tokens.shape[1]) < output.count[:, None]):
            known = len(self._prompts[row]) + len(self._tokens[row])
            new = output.tokens[row, index].tolist()[known - int(starts[row]) - index * width :]
            if output.handover[row, index] >= 0:
                new.append(int(output.handover[row, index]))
            steps = int(output.steps[row, index])
            self.report.steps[steps] += 1
            blocks += self._gain(int(row), new, steps)
        return blocks

    def _gain(self, row: int, new: list[int], steps: int) -> list[Block]:
        """Cuts new tokens at the stop token, stop string and limit and ends the request there."""
        if row in self._ended:
            return []
        new, reason = gained(new, len(self._tokens[row]), self._requests[row])
        for count, token in enumerate(new if self._stops else [], start=1):
            watch = cast(list[StopStrings], self._stops)[row]
            watch.push(token)
            if watch.found:
                new, reason = new[:count], "stop"
                break
        self._tokens[row] += new
        self.report.decode_tokens += len(new)
        if reason is not None:
            self._ended[row] = reason
            self._active[row] = False
        return [Block(row, new, steps)]

    def cancel(self, row: int, reason: FinishReason = "cancelled") -> None:
        """Ends one request between two blocks; it computes along idle and the others go on.

        Raises:
            RuntimeError: before prefill.
        """
        if self.state is None:
            raise RuntimeError("prefill has not run")
        if row not in self._ended and self._active[row]:
            self._ended[row] = reason
        self._active[row] = False
        self._tell_device()

    def _tell_device(self) -> None:
        """Requests that the host has ended go idle."""
        assert self.state is not None
        active = self._engine.put(self._active)
        self.state = dataclasses.replace(self.state, active=active)

    @property
    def errors(self) -> dict[int, str]:
        """By request, what went wrong."""
        failed = np.flatnonzero(self._failed).tolist()
        return {row: "logits are not finite" for row in failed if row not in self._ended}

    def results(self) -> list[RequestResult]:
        """The requests as they stand; unfinished ones count as interrupted."""
        results = []
        for row, (prompt, tokens) in enumerate(zip(self._prompts, self._tokens, strict=True)):
            reason: FinishReason = "failed" if self._failed[row] else "interrupted"
            results.append(RequestResult(len(prompt), tokens, self._ended.get(row, reason)))
        return results
