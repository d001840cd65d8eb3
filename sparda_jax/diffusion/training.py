"""Turns a causal model into a block-diffusion model: a run in a folder."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sparda_jax.config import DiffusionConfig
from sparda_jax.diffusion.adapter import (
    MASK_EMBEDDING,
    LoraConfig,
    Weights,
    adapted,
    full_weights,
    lora_weights,
)
from sparda_jax.diffusion.loss import BlockLoss, BlockLossConfig, block_diffusion_loss
from sparda_jax.diffusion.noise import draw_noise
from sparda_jax.models.decoder import Decoder
from sparda_jax.training.config import RunConfig
from sparda_jax.training.loop import Run
from sparda_jax.training.step import AXIS, TrainState, begin, optimizer_step
from sparda_jax.typing import Array, Int


@dataclasses.dataclass(frozen=True)
class BlockTrainConfig(RunConfig):
    """How to train.

    Attributes:
        diffusion: block size, mask token and logit shift of the model that comes out.
        loss: what is learnt.
        lora: shape of the adapter; None: all weights are trained.
    """

    diffusion: DiffusionConfig = dataclasses.field(
        default_factory=lambda: DiffusionConfig(32, None, logit_shift=True)
    )
    loss: BlockLossConfig = dataclasses.field(default_factory=BlockLossConfig)
    lora: LoraConfig | None = dataclasses.field(default_factory=LoraConfig)


def batch_loss(
    model: Decoder,
    weights: Weights,
    rows: Int[Array, "B T"],
    config: BlockTrainConfig,
) -> tuple[Array, BlockLoss]:
    """Loss of windows whose last column is the seed of their noise."""
    tokens, seeds = rows[:, :-1], rows[:, -1]
    width = config.diffusion.block_size
    masked, rate = draw_noise(seeds, tokens.shape[1], width, config.loss.noise)
    return block_diffusion_loss(
        adapted(model, weights, config.lora, config.diffusion),
        tokens,
        masked,
        rate,
        config.loss,
        mask_embedding=weights.get(MASK_EMBEDDING),
        teacher=model if config.loss.distil else None,
    )


@partial(jax.jit, static_argnames=("config", "mesh"), donate_argnames="state")
def train_step(
    model: Decoder,
    state: TrainState,
    rows: Int[Array, "A B T"],
    *,
    config: BlockTrainConfig,
    mesh: Mesh,
) -> tuple[TrainState, dict[str, Array]]:
    """One optimizer step over A micro-batches, whose windows are spread over the mesh."""
    loss = lambda model, weights, micro: batch_loss(model, weights, micro, config)
    state, metrics, sums = optimizer_step(loss, model, state, rows, config=config, mesh=mesh)
    count = rows.shape[0] * mesh.size
    return state, metrics | {
        "cross_entropy": sums.entropy / count,
        "divergence": sums.divergence / count,
        "accuracy": sums.right / sums.scored,
    }


@partial(jax.jit, static_argnames=("config", "mesh"))
def evaluate_window(
    model: Decoder,
    weights: Weights,
    rows: Int[Array, "B T"],
    *,
    config: BlockTrainConfig,
    mesh: Mesh,
) -> BlockLoss:
    """Figures of one window; every device of the mesh computes the same."""
    run = lambda model, weights, rows: batch_loss(model, weights, rows, config)[1]
    spread = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return spread(model, weights, rows)


class BlockTrainer(Run):
    """A `Run` that trains an adapter, or all weights, for block diffusion.

    Raises:
        ValueError: windows that are no whole number of blocks; a mask token that the vocabulary
            does not have.
    """

    config: BlockTrainConfig

    def __init__(self, *args: Any, start: Weights | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._start = start
        length, width = self.train.tokens.shape[1], self.config.diffusion.block_size
        if length % width:
            raise ValueError(f"windows of {length} tokens are no whole number of blocks of {width}")
        mask, vocabulary = self.config.diffusion.mask_token_id, self.model.config.vocab_size
        if mask is None or not 0 <= mask < vocabulary:
            raise ValueError(f"mask token {mask} is not in the vocabulary of {vocabulary}")

    def initial(self) -> TrainState:
        """The weights to start from; else an adapter that changes nothing, or the model's own."""
        config = self.config
        if self._start is not None:
            return begin(self._start, config)
        weights = (
            full_weights(self.model)
            if config.lora is None
            else lora_weights(self.model, config.lora, config.seed)
        )
        return begin(weights, config)

    @property
    def program(self) -> Any:
        """`train_step`."""
        return train_step

    def batch(self, step: int) -> Array:
        """The windows of a step, each with the seed of its noise behind it."""
        windows = super().batch(step)
        rng = np.random.default_rng((self.config.seed, step))
        seeds = rng.integers(0, 2**31 - 1, (*windows.shape[:2], 1), np.int32)
        sharding = NamedSharding(self.mesh, P(None, AXIS))
        return jnp.concatenate([windows, jax.device_put(seeds, sharding)], axis=2)

    def evaluate(self, state: TrainState) -> dict[str, Any]:
        """Over held-out windows, the same noise whenever it is called."""
        rows = self.held_out.tokens[: self.config.eval_windows]
        total = np.zeros(4)
        for number, row in enumerate(rows):
            seeded = np.append(row, np.int32(number))[None]
            found = evaluate_window(self.model, state.params, seeded, **self.static)
            total += [found.entropy, found.divergence, found.right, found.scored]
        entropy, divergence, right, scored = (float(figure) for figure in total)
        share = self.config.loss.distil
        return {
            "held_out_loss": ((1 - share) * entropy + share * divergence) / len(rows),
            "held_out_cross_entropy": entropy / len(rows),
            "held_out_divergence": divergence / len(rows),
            "held_out_accuracy": right / max(scored, 1.0),
        }
