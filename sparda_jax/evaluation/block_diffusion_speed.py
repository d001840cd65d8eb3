"""Speed of block decoding with resident KV, large shapes with random weights, against a floor."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparda_jax.config import DiffusionConfig, ModelConfig, SamplingParams
from sparda_jax.diffusion.attention import attend, block_mask, dense_prefix, pack
from sparda_jax.diffusion.config import DenoiseParams, RuleState, diffusion_of, rule_fields
from sparda_jax.diffusion.decode import finished_rows, settle
from sparda_jax.diffusion.generate import BlockEngine
from sparda_jax.diffusion.plan import BlockEngineConfig
from sparda_jax.diffusion.state import BlockState
from sparda_jax.engine.state import SamplingState, sampling_fields
from sparda_jax.evaluation.kernel_benchmarks.harness import Row, Session, Timing, time_calls
from sparda_jax.evaluation.timeline import read_trace
from sparda_jax.models.decoder import Decoder, DecoderLayer
from sparda_jax.models.moe import MoE
from sparda_jax.models.rope import RopeTable, rope_rows
from sparda_jax.typing import Array

# Share of the wall time in which the device computes, at batch 1; and a step over its floor.
BUSY_TARGET, STEP_TARGET = 0.9, 1.3


@dataclasses.dataclass(frozen=True)
class SpeedPlan:
    """What is timed.

    Attributes:
        name: of the shape.
        contexts: tokens before the block; one program serves all.
        batches: requests; one program each.
        steps: U; every block takes as many, and a commit.
        repetitions: timed calls of one block a request, after one that is not.
    """

    name: str
    contexts: Sequence[int]
    batches: Sequence[int]
    steps: int = 20
    repetitions: int = 5


@dataclasses.dataclass(frozen=True)
class Rates:
    """What the device reaches, measured.

    Attributes:
        bandwidth: of a copy, bytes read plus written a second.
        matmul: of a large bfloat16 product, FLOP/s.
    """

    bandwidth: float
    matmul: float

    @classmethod
    def measured(cls, size: int = 8192) -> Rates:
        """Of the first device; a copy of 4 GiB and a product of `size` cubed."""
        draw = jax.jit(partial(jax.random.normal, shape=(size, size), dtype=jnp.bfloat16))
        left, right = draw(jax.random.key(0)), draw(jax.random.key(1))
        multiply = jax.jit(jnp.matmul)
        product = time_calls(lambda: multiply(left, right), calls=1, repetitions=9)
        return cls(Session().copy_bandwidth, 2e6 * size**3 / product.median)


def speed_rows(
    config: ModelConfig, plan: SpeedPlan, rates: Rates, *, width: int = 32
) -> Iterator[Row]:
    """Tokens a second of one block per request: fixed U, resident KV, random weights and caches.

    Args:
        config: of the model.
        plan: what is timed.
        rates: of the device.
        width: W, where the model does not say.
    """
    facts = config.diffusion or DiffusionConfig(width, 0)
    model = Decoder.random(dataclasses.replace(config, diffusion=facts), dtype=jnp.bfloat16)
    room = max(plan.contexts) + (plan.repetitions + 4) * facts.block_size
    engine = BlockEngine(model, config=BlockEngineConfig(max_length=room))
    for batch in plan.batches:
        state = random_state(engine, batch, -(-room // engine.config.kv_block), plan.steps)
        for context in plan.contexts:
            start = engine.put(np.full(batch, context, np.int32))
            state = dataclasses.replace(state, start=start)
            touched = touched_experts(engine, state, plan.steps) if config.moe else None
            state, times = timed_blocks(engine, state, plan.repetitions)
            floor = step_floor(config, batch, facts.block_size, context, rates, touched)
            name = f"block_diffusion/{plan.name}/{context}/B{batch}/U{plan.steps}"
            speeds = [batch * facts.block_size / seconds for seconds in times]
            yield Row(name, Timing.of(speeds), "tok/s", "higher")
            yield _floor_row(name, [seconds / (plan.steps + 1) for seconds in times], floor, rates)
            if batch == 1:
                state, busy, wall = busy_time(engine, state)
                timing = Timing.of([busy / seconds for seconds in times])
                details = {"with_profiler": busy / wall}
                yield Row(
                    f"{name}/busy",
                    timing,
                    "of wall time",
                    "higher",
                    target=BUSY_TARGET,
                    details=details,
                )
        del state  # before the next batch's


def _floor_row(name: str, steps: list[float], floor: Floor, rates: Rates) -> Row:
    """Time of a forward, in seconds, over what it takes at least."""
    details = {
        "step_ms": 1e3 * statistics.median(steps),
        "floor_ms": 1e3 * floor.seconds,
        "copy_GB_s": 1e-9 * rates.bandwidth,
        "matmul_TFLOP_s": 1e-12 * rates.matmul,
    }
    if floor.touched is not None:
        details["experts_touched"] = floor.touched
    ratio = Timing.of([step / floor.seconds for step in steps])
    return Row(f"{name}/step_over_floor", ratio, "x", "lower", target=STEP_TARGET, details=details)


def timed_blocks(
    engine: BlockEngine, state: BlockState, repetitions: int
) -> tuple[BlockState, list[float]]:
    """Seconds of each call of one block a request; a first one, which may compile, is left out."""
    program, times = engine.decode_program(), []
    for _ in range(repetitions + 1):
        begun = time.perf_counter()
        state, output = program(engine.parameters.arrays, engine.rope, state)
        jax.block_until_ready(output)
        times.append(time.perf_counter() - begun)
    return state, times[1:]


def busy_time(engine: BlockEngine, state: BlockState) -> tuple[BlockState, float, float]:
    """Seconds in which the device computes in a traced call, and how long that call takes.

    The trace lengthens the gaps between kernels: of a call without it the kernels take a larger
    share.
    """
    program = engine.decode_program()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            begun = time.perf_counter()
            state, output = program(engine.parameters.arrays, engine.rope, state)
            jax.block_until_ready(output)
            wall = time.perf_counter() - begun
        events = read_trace(Path(folder))
    busy = end = 0.0
    for event in events:  # sorted by their start
        until = event.start + event.duration
        busy += max(0.0, until - max(event.start, end))
        end = max(end, until)
    return state, 1e-6 * busy, wall


def random_state(engine: BlockEngine, batch: int, blocks: int, steps: int) -> BlockState:
    """A batch at the start of a block; it goes on for ever.

    Caches are drawn at random, every request's alike: drawn apart, their random bits would not fit
    beside the caches of the largest batch.
    """
    config = engine.model.config
    width = diffusion_of(config)[0].block_size
    shape = (config.num_kv_heads, blocks, 2, engine.config.kv_block, config.head_dim)
    rule = DenoiseParams("low_confidence_static", steps)
    fields: dict[str, Any] = {
        "start": np.zeros(batch, np.int32),
        "tokens": np.zeros((batch, width), np.int32),
        "masked": np.ones((batch, width), bool),
        "step": np.zeros(batch, np.int32),
        "last_sub": np.full(batch, -1, np.int32),
        "active": np.ones(batch, bool),
        "failed": np.zeros(batch, bool),
        "prompt_length": np.zeros(batch, np.int32),
        "limit": np.full(batch, 2**30, np.int32),
    }
    sampling = SamplingState(**engine.put(sampling_fields([SamplingParams()] * batch)))
    rules = RuleState(**engine.put(rule_fields([rule] * batch, width)))

    @jax.jit
    def draw(key: Array) -> Array:
        own = jax.random.normal(key, shape, engine.model.dtype)
        return jnp.broadcast_to(own, (batch, *shape))

    layers = tuple(draw(jax.random.key(layer)) for layer in range(config.num_layers))
    return BlockState(layers=layers, sampling=sampling, rule=rules, **engine.put(fields))


def touched_experts(engine: BlockEngine, state: BlockState, steps: int) -> float:
    """Experts that a mixture's weights are read of in a forward, mean over its layers and U steps.

    Counted in the forwards of one block from this state, which stays as it is.
    """
    program = engine.programs.on_model(_touched, steps=steps)
    return float(program(engine.parameters.arrays, engine.rope, state))


def _touched(model: Decoder, rope: RopeTable, state: BlockState, *, steps: int) -> Array:
    facts, mask_token_id = diffusion_of(model.config)
    width, caches = state.tokens.shape[1], state.layers

    def step(_: int, carry: tuple[BlockState, Array]) -> tuple[BlockState, Array]:
        state, total = carry
        committing = finished_rows(state)
        cos, sin = rope_rows(rope, state.start[:, None] + jnp.arange(width))
        mask = block_mask(committing, width, causal_clean=facts.causal_clean)
        x = model.embed(jnp.where(state.masked, mask_token_id, state.tokens))
        for layer, cache in zip(model.layers, caches, strict=True):
            q, k, v = layer.qkv(x, cos, sin)
            attention = attend(q, dense_prefix(cache, state.start), pack(k, v), mask)
            if isinstance(layer.mlp, MoE):
                total += _distinct(layer, layer.mlp, x, attention)
            x = layer.finish(x, attention)
        return settle(model, state, x, committing)[0], total

    bare = dataclasses.replace(state, layers=())
    _, total = lax.fori_loop(0, steps, step, (bare, jnp.zeros((), jnp.int32)))
    return total / (steps * sum(isinstance(layer.mlp, MoE) for layer in model.layers))


def _distinct(layer: DecoderLayer, mlp: MoE, x: Array, attention: Array) -> Array:
    """How many experts the rows of a layer choose, all together."""
    rows = layer.mlp_norm(x + layer.o(attention.reshape(*attention.shape[:2], -1)))
    chosen, _ = mlp.router(rows.reshape(-1, rows.shape[-1]))
    experts = jnp.arange(mlp.router.config.num_experts)
    return jnp.any(chosen.reshape(-1) == experts[:, None], axis=1).sum(dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class Floor:
    """What a forward takes at least.

    Attributes:
        seconds: sum over its operations.
        touched: experts counted of each mixture; None without one.
    """

    seconds: float
    touched: float | None


def step_floor(
    config: ModelConfig,
    batch: int,
    width: int,
    context: int,
    rates: Rates,
    touched: float | None = None,
) -> Floor:
    """Of each operation the larger of its bytes and its FLOPs, at the device's rates, summed.

    Operations: the projections, attention, the MLP or its experts of each layer, and the head.
    Weights are read once, 2 bytes each; of a mixture, those of `touched` experts.

    Raises:
        ValueError: a mixture of experts and no `touched`.
    """
    rows, size = batch * width, config.hidden_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if config.moe is not None and touched is None:
        raise ValueError("a mixture of experts: how many are touched must be counted")

    def product(weights: float, used: float | None = None) -> float:
        """Of matrices read once and used by all rows (or `used` weights a row)."""
        flops = 2 * rows * (weights if used is None else used)
        return max(2 * weights / rates.bandwidth, flops / rates.matmul)

    cached = 2 * batch * (context + width) * kv_heads
    attention = max(
        2 * cached / rates.bandwidth, 4 * rows * (context + width) * heads / rates.matmul
    )
    seconds = product(size * config.vocab_size)
    for layer in range(config.num_layers):
        seconds += product(size * (2 * heads + 2 * kv_heads)) + attention
        moe = config.moe
        if moe is None or layer < moe.dense_layers:
            seconds += product(3 * size * config.intermediate_size)
            continue
        assert touched is not None
        each = 3 * size * moe.intermediate_size
        seconds += product(each * touched, each * moe.experts_per_token)
        seconds += product(3 * size * moe.shared_intermediate_size)
    return Floor(seconds, touched)
