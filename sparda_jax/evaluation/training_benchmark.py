"""Speed and memory of Forecast training at given shapes, and where the time goes.

Random weights and tokens, made on the device. Their attention is close to even, so that the
teacher selects scattered blocks: the worst case for block-sparse attention.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels.block_sparse_attention import block_sparse_attention
from sparda_jax.config import ModelConfig, RopeConfig, SparseConfig
from sparda_jax.evaluation.kernel_benchmarks.harness import Row, Timing
from sparda_jax.forecast import loss as losses
from sparda_jax.forecast.data import Windows
from sparda_jax.forecast.loss import LossConfig
from sparda_jax.forecast.step import TrainConfig, train_step
from sparda_jax.forecast.training import Trainer
from sparda_jax.models import Decoder
from sparda_jax.models.rope import rope_at
from sparda_jax.sparse.infllm_v2 import to_blocks

# Published: 48 h on 32 H100 for 2000 steps of 32 windows of 65536 tokens; the target is ten times
# that.
PUBLISHED = 2000 * 32 * 65536 / (48 * 3600 * 32)


@dataclasses.dataclass(frozen=True)
class Workload:
    """A shape to train at.

    Attributes:
        model: of the backbone.
        sparse: the policy.
        window: tokens per window.
        batch: windows per step.
        micro_batch: windows per forward pass.
        target: tokens per second asked for, if any.
    """

    model: ModelConfig
    sparse: SparseConfig
    window: int
    batch: int
    micro_batch: int
    target: float | None = None


def workloads() -> dict[str, Workload]:
    """MiniCPM4.1-8B with its published policy; SmolLM2-135M with the default one."""
    small = ModelConfig(
        family="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rope=RopeConfig(head_dim=64, theta=100_000.0),
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    policy = SparseConfig(init_blocks=1, local_blocks=32, budget_blocks=96)
    large = ModelConfig.preset("minicpm4.1-8b")
    return {
        "smollm2-135m/8K": Workload(small, SparseConfig(), 8192, 16, 4),
        "minicpm4.1-8b/64K": Workload(large, policy, 65536, 1, 1, 10 * PUBLISHED),
    }


def rows(name: str, workload: Workload, *, steps: int, folder: str) -> Iterator[Row]:
    """Whole optimizer steps, then the parts of one layer.

    Args:
        name: of the workload.
        workload: see there.
        steps: timed steps, after two that are not.
        folder: for the trainer; nothing is written there.
    """
    model = Decoder.random(workload.model, dtype=jnp.bfloat16)
    config = TrainConfig(
        batch=workload.batch, micro_batch=workload.micro_batch, loss=LossConfig(workload.sparse)
    )
    shape = (workload.batch, workload.window)
    tokens = np.random.default_rng(0).integers(0, workload.model.vocab_size, shape, np.int32)
    windows = Windows(tokens, np.zeros_like(tokens))
    trainer = Trainer(model, config, windows, windows, folder)
    program, seconds, memory = _steps(trainer, steps)
    prefix = f"forecast_training/{name}"
    timing = Timing.of([tokens.size / each for each in seconds])
    yield Row(prefix, timing, "tok/s", "higher", target=workload.target)
    yield Row(f"{prefix}/peak_memory", Timing.exact(memory / 2**30), "GiB", "lower")
    yield Row(f"{prefix}/compile", Timing.exact(program), "s", "lower")
    windows_a_step = workload.batch * workload.model.num_layers
    for part, timing in _parts(model, workload, config.loss):
        # Of one window and layer; here of a whole step.
        times = windows_a_step * 1e-3
        low, high = timing.spread
        scaled = Timing(timing.median * times, (low * times, high * times), timing.n)
        yield Row(f"{prefix}/part/{part}", scaled, "ms", "lower")


def _steps(trainer: Trainer, count: int) -> tuple[float, list[float], int]:
    """Seconds to compile, seconds of each step, peak bytes on the device."""
    state, tokens = trainer.start(), trainer.batch(0)
    static: dict[str, Any] = trainer.static
    begun = time.perf_counter()
    program = train_step.lower(trainer.model, state, tokens, **static).compile()
    compiling, seconds = time.perf_counter() - begun, []
    for _ in range(count + 2):
        begun = time.perf_counter()
        state, metrics = program(trainer.model, state, tokens)
        assert np.isfinite(float(metrics["loss"]))
        seconds.append(time.perf_counter() - begun)
    statistics_ = jax.local_devices()[0].memory_stats() or {}
    return compiling, seconds[2:], statistics_.get("peak_bytes_in_use", 0)


def _parts(model: Decoder, workload: Workload, config: LossConfig) -> Iterator[tuple[str, Timing]]:
    """Microseconds of one layer and window, each part in a program of its own."""
    count, geometry = workload.window, workload.sparse.geometry
    positions = jnp.arange(count, dtype=jnp.int32)[None]
    cos, sin = rope_at(workload.model.rope, positions, count)
    layer = model.layers[0]
    tokens = jax.random.randint(jax.random.key(0), (1, count), 0, workload.model.vocab_size)
    x = jax.jit(lambda m, t: m.embed(t))(model, tokens)
    graph, state = nnx.split(layer)
    on = lambda f: jax.jit(lambda state, *a: f(nnx.merge(graph, state), *a))
    projections = on(lambda layer, x: (layer.attention_norm(x), *layer.qkv(x, cos, sin)))
    normed, q, k, v = projections(state, x)
    keys = k.transpose(0, 2, 1, 3)
    kernel = jax.random.normal(jax.random.key(1), (normed.shape[-1], keys.shape[1] * q.shape[-1]))
    kernel = kernel / normed.shape[-1] ** 0.5
    whole = jax.jit(partial(losses.chunked_losses, config, with_gradient=True))
    without = jax.jit(partial(losses.chunked_losses, config, with_gradient=False))
    _, ids, _ = without(kernel, (normed, q, cos, sin), keys)
    attend = jax.jit(
        lambda q, k, v, ids: block_sparse_attention(
            q, to_blocks(k, v, geometry.block_size), ids, positions
        )
    )
    attended = attend(q, k, v, ids)
    yield "projections", _timed(lambda: projections(state, x))
    finish = on(lambda layer, x, a: layer.finish(x, a))
    yield "output_and_mlp", _timed(lambda: finish(state, x, attended))
    yield "block_sparse_attention", _timed(lambda: attend(q, k, v, ids))
    teacher = jax.jit(_reduced(partial(_teacher_chunks, config)))
    yield "teacher", _timed(lambda: teacher(q, keys, positions))
    choice = jax.jit(_reduced(partial(_choice_chunks, config, count)))
    yield "one_choice", _timed(lambda: choice(q, keys, positions))
    yield "loss_without_gradient", _timed(lambda: without(kernel, (normed, q, cos, sin), keys))
    yield "loss_with_gradient", _timed(lambda: whole(kernel, (normed, q, cos, sin), keys))


def _reduced(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: jax.tree.map(jnp.sum, function(*arguments))


def _teacher_chunks(config: LossConfig, q: Any, keys: Any, positions: Any) -> Any:
    chunk = losses.chunk_tokens(config, q, keys)
    compressed = jnp.zeros((*keys.shape[:2], 0, keys.shape[3]), keys.dtype)
    parts = (_chunks(q, chunk), _chunks(positions, chunk))
    return jax.lax.map(
        lambda rows: losses.teacher(config, rows[0], keys, compressed, rows[1]).sum(), parts
    )


def _choice_chunks(config: LossConfig, count: int, q: Any, keys: Any, positions: Any) -> Any:
    chunk = losses.chunk_tokens(config, q, keys)
    windows = config.sparse.geometry.num_compressed(count)
    scores = jax.random.normal(jax.random.key(0), (*keys.shape[:2], chunk, windows))
    run = lambda rows: losses.routing(config, losses.by_block(config, scores, count), rows).sum()
    return jax.lax.map(run, _chunks(positions, chunk))


def _chunks(rows: Any, chunk: int) -> Any:
    whole = rows.shape[1] // chunk * chunk
    return jnp.moveaxis(rows[:, :whole].reshape(1, -1, chunk, *rows.shape[2:]), 1, 0)


def _timed(call: Callable[[], Any], repetitions: int = 3) -> Timing:
    jax.block_until_ready(call())
    times = []
    for _ in range(repetitions):
        begun = time.perf_counter()
        jax.block_until_ready(call())
        times.append((time.perf_counter() - begun) * 1e6)
    return Timing.of(times)
