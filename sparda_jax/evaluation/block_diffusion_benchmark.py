"""Block diffusion measured: quality of samples, and speed of large shapes with resident KV."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparda_jax.config import DiffusionConfig, ModelConfig, SamplingParams
from sparda_jax.diffusion.config import DenoiseParams, RuleState, Strategy, rule_fields
from sparda_jax.diffusion.generate import BlockEngine
from sparda_jax.diffusion.plan import BlockEngineConfig
from sparda_jax.diffusion.state import BlockState
from sparda_jax.engine.state import SamplingState, sampling_fields
from sparda_jax.evaluation.kernel_benchmarks.harness import Row, Session, Timing
from sparda_jax.evaluation.sample_quality import SampleQuality, causal_quality, diffusion_quality
from sparda_jax.models.decoder import Decoder

# The gate of the shipped adapter: perplexity of samples over that of the causal model's own.
GATE = 1.5
# Taken for the bfloat16 matrix products of an H200 at best, FLOP/s; not measured here.
MATMUL = 790e12


@dataclasses.dataclass(frozen=True)
class Sampling:
    """What is sampled.

    Attributes:
        prompts: of one length.
        new_tokens: of each.
        temperatures: for both models.
        thresholds: of the rule.
        strategy: of the rule.
        sub_block: of the rule.
    """

    prompts: Sequence[Sequence[int]]
    new_tokens: int
    temperatures: Sequence[float]
    thresholds: Sequence[float]
    strategy: Strategy
    sub_block: int | None


def sample_rows(causal: Decoder, diffusion: Decoder, plan: Sampling) -> Iterator[Row]:
    """Perplexity of both models' samples under the causal one; the rest as details.

    Args:
        causal: the model that the adapter was trained on; also the judge.
        diffusion: with the adapter.
        plan: what is sampled.
    """
    length = len(plan.prompts[0]) + plan.new_tokens + 64
    engine = BlockEngine(diffusion, config=BlockEngineConfig(max_length=length))
    for temperature in plan.temperatures:
        requests = [
            SamplingParams(max_new_tokens=plan.new_tokens, temperature=temperature, seed=seed)
            for seed in range(len(plan.prompts))
        ]
        own = causal_quality(causal, plan.prompts, requests)
        yield _sample_row(f"samples/causal/t{temperature:g}", own, None, len(plan.prompts))
        for threshold in plan.thresholds:
            rule = DenoiseParams(plan.strategy, threshold=threshold, sub_block=plan.sub_block)
            found = diffusion_quality(engine, causal, plan.prompts, requests, rule)
            name = f"samples/{plan.strategy}/t{temperature:g}/{threshold:g}"
            yield _sample_row(name, found, own, len(plan.prompts))


def _sample_row(name: str, found: SampleQuality, own: SampleQuality | None, count: int) -> Row:
    details = {f"distinct_{n}": share for n, share in found.distinct.items()}
    target = None
    if own is not None:
        target = GATE * own.perplexity
        details |= {
            "of_causal": found.perplexity / own.perplexity,
            "distinct_2_of_causal": found.distinct[2] / own.distinct[2],
            "tokens_per_forward": found.tokens_per_forward,
        }
        blocks = np.repeat(list(found.steps), list(found.steps.values()))
        quarters = np.percentile(blocks, (10, 50, 90))
        details |= {f"steps_p{p}": q for p, q in zip((10, 50, 90), quarters, strict=True)}
    value = found.perplexity
    timing = Timing.exact(value, count)
    return Row(name, timing, "perplexity", "lower", target=target, details=details)


def speed_rows(
    name: str,
    config: ModelConfig,
    contexts: Sequence[int],
    batches: Sequence[int],
    *,
    width: int = 32,
    steps: int = 20,
    repetitions: int = 3,
) -> Iterator[Row]:
    """Tokens a second of one block per request: fixed U, resident KV, random weights and caches.

    Args:
        name: of the shape.
        config: of the model.
        contexts: tokens before the block; one program serves all.
        batches: requests; one program each.
        width: W.
        steps: U.
        repetitions: timed blocks.
    """
    facts = dataclasses.replace(config.diffusion or DiffusionConfig(width, 0), block_size=width)
    config = dataclasses.replace(config, diffusion=facts)
    model = Decoder.random(config, dtype=jnp.bfloat16)
    room = max(contexts) + (repetitions + 2) * width
    engine = BlockEngine(model, config=BlockEngineConfig(max_length=room))
    bandwidth = Session().copy_bandwidth
    for batch in batches:
        program = engine.decode_program()
        state = random_state(engine, batch, -(-room // 64), steps)
        for context in contexts:
            start = np.full(batch, context, np.int32)
            state = dataclasses.replace(state, start=engine.put(start))
            times = []
            for _ in range(repetitions + 1):
                begun = time.perf_counter()
                state, output = program(engine.parameters.arrays, engine.rope, state)
                jax.block_until_ready(output)
                times.append(time.perf_counter() - begun)
            seconds = times[1:]  # the first may compile
            rates = [batch * width / second for second in seconds]
            step = statistics.median(seconds) / (steps + 1)
            floor = step_floor(config, batch, width, context, bandwidth)
            yield Row(
                f"block_diffusion/{name}/{context}/B{batch}/U{steps}",
                Timing.of(rates),
                "tok/s",
                "higher",
                of_roofline=floor / step,
                details={"step_ms": 1e3 * step, "floor_ms": 1e3 * floor},
            )


def random_state(engine: BlockEngine, batch: int, blocks: int, steps: int) -> BlockState:
    """A batch at the start of a block, caches drawn at random; it goes on for ever."""
    config = engine.model.config
    assert config.diffusion is not None
    width = config.diffusion.block_size
    shape = (batch, config.num_kv_heads, blocks, 2, engine.config.kv_block, config.head_dim)
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
    draw = jax.jit(partial(jax.random.normal, shape=shape, dtype=engine.model.dtype))
    layers = tuple(draw(jax.random.key(layer)) for layer in range(config.num_layers))
    return BlockState(layers=layers, sampling=sampling, rule=rules, **engine.put(fields))


def step_floor(
    config: ModelConfig, batch: int, width: int, context: int, bandwidth: float
) -> float:
    """Seconds a forward takes at least: of each part the larger of its bytes and its FLOPs.

    Of a mixture of experts, as many experts count as rows that choose at random touch.
    """
    rows, size = batch * width, config.hidden_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = size * (2 * heads + 2 * kv_heads)
    dense = 3 * size * config.intermediate_size
    seconds = 0.0

    def add(weights: float, used: float | None = None) -> float:
        """Of matrices read once and used by all rows (or `used` weights a row)."""
        flops = 2 * rows * (weights if used is None else used)
        return max(2 * weights / bandwidth, flops / MATMUL)

    for layer in range(config.num_layers):
        seconds += add(projections)
        cached = 2 * batch * context * kv_heads
        seconds += max(2 * cached / bandwidth, 4 * rows * context * heads / MATMUL)
        moe = config.moe
        if moe is None or layer < moe.dense_layers:
            seconds += add(dense)
            continue
        each = 3 * size * moe.intermediate_size
        untouched = (1 - moe.experts_per_token / moe.num_experts) ** rows
        touched = moe.num_experts * (1 - untouched)
        seconds += add(each * touched, each * moe.experts_per_token)
        seconds += add(3 * size * moe.shared_intermediate_size)
    return seconds + add(size * config.vocab_size)
