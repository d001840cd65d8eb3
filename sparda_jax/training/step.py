"""One optimizer step.

Micro-batches are scanned, gradients averaged in float32 over micro-batches and devices, clipped,
and given to AdamW with float32 master weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sparda_jax.models.decoder import Decoder
from sparda_jax.training.config import RunConfig, optimizer_of
from sparda_jax.typing import Array, Int

# Mesh axis over which the windows of a micro-batch are spread.
AXIS = "data"

# Of one micro-batch `[B, T]`: the loss, and figures that are added up over all of them.
Loss = Callable[[Decoder, Any, Array], tuple[Array, Any]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a checkpoint holds.

    Attributes:
        step: optimizer steps done.
        params: what is trained, float32.
        optimizer: AdamW's moments and count.
    """

    step: Array
    params: Any
    optimizer: optax.OptState


def begin(params: Any, config: RunConfig) -> TrainState:
    """The state before the first step."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer_of(config).init(params))


def optimizer_step(
    loss: Loss,
    model: Decoder,
    state: TrainState,
    tokens: Int[Array, "A B T"],
    *,
    config: RunConfig,
    mesh: Mesh,
) -> tuple[TrainState, dict[str, Array], Any]:
    """One step over A micro-batches, whose windows are spread over the mesh; for use in a jit.

    Args:
        loss: of one micro-batch; a mean over its windows.
        model: frozen.
        state: before the step.
        tokens: windows of all micro-batches.
        config: of the run.
        mesh: with the axis `AXIS`.

    Returns:
        The state after it; mean loss and norm of the gradient before clipping; the loss's figures,
        added up.
    """

    def sums(model: Decoder, params: Any, tokens: Array) -> Any:
        """Of this device's windows, added up over the devices."""

        def one(micro: Array) -> Any:
            of = lambda params: loss(model, params, micro)
            (value, figures), gradient = jax.value_and_grad(of, has_aux=True)(params)
            return value, figures, gradient

        def accumulate(carry: Any, micro: Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, carry, one(micro)), None

        shapes = jax.eval_shape(one, tokens[0])
        start = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        carry, _ = jax.lax.scan(accumulate, start, tokens)
        return jax.lax.psum(carry, AXIS)

    # Inside shard_map, because Mosaic kernels are not partitioned automatically. Unchecked, since
    # the gradient of replicated parameters is summed here, once, and not by every micro-batch.
    spread = jax.shard_map(
        sums, mesh=mesh, in_specs=(P(), P(), P(None, AXIS)), out_specs=P(), check_vma=False
    )
    value, figures, gradient = spread(model, state.params, tokens)
    count = len(tokens) * mesh.size
    gradient = jax.tree.map(lambda g: g / count, gradient)
    updates, optimizer = optimizer_of(config).update(gradient, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {"loss": value / count, "gradient_norm": optax.tree.norm(gradient)}
    return TrainState(state.step + 1, params, optimizer), metrics, figures
