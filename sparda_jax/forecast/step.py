"""One optimizer step of Forecast training, as a program of its own.

Micro-batches are scanned, gradients averaged in float32 over micro-batches and devices, clipped,
and given to AdamW with float32 master weights. The published settings (spec/sparda.md, sec. 5) are
the defaults.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sparda_jax.forecast.loss import LossConfig, LossOutput, forecast_loss
from sparda_jax.forecast.projection import Forecast
from sparda_jax.models.decoder import Decoder
from sparda_jax.typing import Array, Int

# Mesh axis over which the windows of a micro-batch are spread.
AXIS = "data"


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How to train.

    Attributes:
        loss: what is distilled.
        steps: optimizer steps of the whole run.
        batch: windows per optimizer step.
        micro_batch: windows per forward pass and device.
        learning_rate: constant between warm-up and decay.
        warmup_steps: steps of a linear rise from 0.
        decay_steps: steps of a linear fall to 0, the last ones.
        b1: of AdamW.
        b2: of AdamW.
        eps: of AdamW.
        weight_decay: of AdamW.
        clip: limit of the gradient's norm over all projections.
        seed: of the initial weights and of the order of the windows.
        save_every: steps between checkpoints; the last step is saved in any case.
        keep: checkpoints kept.
        eval_every: steps between evaluations on held-out windows; 0: only after the last step.
        eval_windows: held-out windows used at most.
        max_length: the length that fixes LongRoPE's factors; None: what the model declares.
        explosion: the run stops when a loss exceeds the smallest so far by this factor.
    """

    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    steps: int = 2000
    batch: int = 32
    micro_batch: int = 1
    learning_rate: float = 5e-4
    warmup_steps: int = 0
    decay_steps: int = 0
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-6
    weight_decay: float = 0.01
    clip: float = 0.5
    seed: int = 42
    save_every: int = 50
    keep: int = 5
    eval_every: int = 0
    eval_windows: int = 16
    max_length: int | None = None
    explosion: float = 10.0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "micro_batch", "save_every", "keep", "eval_windows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("warmup_steps", "decay_steps", "eval_every", "weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("learning_rate", "clip", "eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        if self.warmup_steps + self.decay_steps > self.steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} and decay_steps {self.decay_steps} exceed "
                f"{self.steps} steps"
            )
        if not self.explosion > 1:
            raise ValueError(f"explosion must be above 1, got {self.explosion}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a checkpoint holds.

    Attributes:
        step: optimizer steps done.
        params: the projections, float32.
        optimizer: AdamW's moments and count.
    """

    step: Array
    params: nnx.State
    optimizer: optax.OptState


def learning_rate_of(config: TrainConfig) -> float | optax.Schedule:
    """Linear rise, constant, linear fall; a number where it is constant throughout."""
    peak, rise, fall = config.learning_rate, config.warmup_steps, config.decay_steps
    if not rise and not fall:
        return peak
    linear = optax.schedules.linear_schedule
    # A linear schedule ends in its last value, but one of no steps is its first.
    start = linear(0.0, peak, rise) if rise else optax.schedules.constant_schedule(peak)
    return optax.schedules.join_schedules([start, linear(peak, 0.0, fall)], [config.steps - fall])


def optimizer_of(config: TrainConfig) -> optax.GradientTransformation:
    """Clipping by the global norm, then AdamW."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            learning_rate_of(config),
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
        ),
    )


def initial_state(model: Decoder, config: TrainConfig) -> TrainState:
    """Untrained projections and an empty optimizer."""
    params = nnx.state(Forecast.random(model.config, seed=config.seed))
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer_of(config).init(params))


def forecast_of(model: Decoder, state: TrainState) -> Forecast:
    """The projections of a state, float32."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: Forecast.random(model.config)))
    return nnx.merge(graph, state.params)


def _loss(
    model: Decoder, params: nnx.State, tokens: Array, config: TrainConfig, graph: nnx.GraphDef
) -> tuple[Array, LossOutput]:
    """Loss of one micro-batch `[B, T]`."""
    forecast = nnx.merge(graph, params)
    return forecast_loss(model, forecast, tokens, config.loss, max_length=config.max_length)


@partial(jax.jit, static_argnames=("config", "graph", "mesh"), donate_argnames="state")
def train_step(
    model: Decoder,
    state: TrainState,
    tokens: Int[Array, "A B T"],
    *,
    config: TrainConfig,
    graph: nnx.GraphDef,
    mesh: Mesh,
) -> tuple[TrainState, dict[str, Array]]:
    """One optimizer step over A micro-batches, whose windows are spread over the mesh."""

    def sums(model: Decoder, params: nnx.State, tokens: Array) -> Any:
        """Of this device's windows, added up over the devices."""

        def accumulate(carry: Any, micro: Array) -> tuple[Any, None]:
            loss = lambda params: _loss(model, params, micro, config, graph)
            (value, output), gradient = jax.value_and_grad(loss, has_aux=True)(params)
            counts = (output.free.sum(), output.recalled.sum())
            return jax.tree.map(jnp.add, carry, (value, counts, gradient)), None

        zero = jnp.zeros((), jnp.float32)
        start = (zero, (zero, zero), jax.tree.map(jnp.zeros_like, params))
        carry, _ = jax.lax.scan(accumulate, start, tokens)
        return jax.lax.psum(carry, AXIS)

    # Inside shard_map, because Mosaic kernels are not partitioned automatically. Unchecked, since
    # the gradient of replicated parameters is summed here, once, and not by every micro-batch.
    spread = jax.shard_map(
        sums, mesh=mesh, in_specs=(P(), P(), P(None, AXIS)), out_specs=P(), check_vma=False
    )
    value, (free, recalled), gradient = spread(model, state.params, tokens)
    count = len(tokens) * mesh.size
    gradient = jax.tree.map(lambda g: g / count, gradient)
    updates, optimizer = optimizer_of(config).update(gradient, state.optimizer, state.params)
    params: nnx.State = optax.apply_updates(state.params, updates)  # type: ignore[assignment]
    metrics = {
        "loss": value / count,
        "recall": recalled / jnp.maximum(free, 1),
        "gradient_norm": optax.tree.norm(gradient),
    }
    return TrainState(state.step + 1, params, optimizer), metrics


@partial(jax.jit, static_argnames=("config", "graph", "mesh"))
def evaluate_window(
    model: Decoder,
    params: nnx.State,
    tokens: Int[Array, "B T"],
    *,
    config: TrainConfig,
    graph: nnx.GraphDef,
    mesh: Mesh,
) -> LossOutput:
    """What `forecast_loss` tells of one window; every device of the mesh computes the same."""
    run = lambda model, params, tokens: _loss(model, params, tokens, config, graph)[1]
    spread = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return spread(model, params, tokens)
