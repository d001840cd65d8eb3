"""One optimizer step of Forecast training, as a program of its own (spec/sparda.md, sec. 5)."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sparda_jax.forecast.loss import LossConfig, LossOutput, forecast_loss
from sparda_jax.forecast.projection import Forecast
from sparda_jax.models.decoder import Decoder
from sparda_jax.training.config import RunConfig
from sparda_jax.training.step import TrainState, begin, optimizer_step
from sparda_jax.typing import Array, Int


@dataclasses.dataclass(frozen=True)
class TrainConfig(RunConfig):
    """How to train the Forecast.

    Attributes:
        loss: what is distilled.
    """

    loss: LossConfig = dataclasses.field(default_factory=LossConfig)


def initial_state(model: Decoder, config: TrainConfig) -> TrainState:
    """Untrained projections and an empty optimizer."""
    return begin(nnx.state(Forecast.random(model.config, seed=config.seed)), config)


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

    def loss(model: Decoder, params: nnx.State, micro: Array) -> tuple[Array, tuple[Array, Array]]:
        value, output = _loss(model, params, micro, config, graph)
        return value, (output.free.sum(), output.recalled.sum())

    state, metrics, (free, recalled) = optimizer_step(
        loss, model, state, tokens, config=config, mesh=mesh
    )
    return state, metrics | {"recall": recalled / jnp.maximum(free, 1)}


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
