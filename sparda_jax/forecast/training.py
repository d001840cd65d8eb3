"""Trains the Forecast projections of a frozen model."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from flax import nnx

from sparda_jax.forecast.projection import Forecast
from sparda_jax.forecast.step import TrainConfig, evaluate_window, initial_state, train_step
from sparda_jax.training.loop import Progress, Run, TrainingDiverged
from sparda_jax.training.step import TrainState

__all__ = ["Progress", "Trainer", "TrainingDiverged"]


class Trainer(Run):
    """A `Run` that trains a Forecast."""

    config: TrainConfig

    def initial(self) -> TrainState:
        """Untrained projections."""
        return initial_state(self.model, self.config)

    @property
    def program(self) -> Any:
        """`train_step`."""
        return train_step

    @functools.cached_property
    def static(self) -> dict[str, Any]:
        """Static arguments of the compiled programs."""
        graph, _ = nnx.split(nnx.eval_shape(lambda: Forecast.random(self.model.config)))
        return super().static | {"graph": graph}

    def evaluate(self, state: TrainState) -> dict[str, Any]:
        """Mean loss and recall over held-out windows, of all layers together and of each."""
        rows = self.held_out.tokens[: self.config.eval_windows]
        total = np.zeros((3, self.model.config.num_layers))
        for row in rows:
            output = evaluate_window(self.model, state.params, row[None], **self.static)
            total += np.stack([output.per_layer, output.free, output.recalled])
        loss, free, recalled = total
        return {
            "held_out_loss": loss.sum() / len(rows),
            "held_out_recall": recalled.sum() / max(free.sum(), 1.0),
            "held_out_loss_by_layer": (loss / len(rows)).tolist(),
            "held_out_recall_by_layer": (recalled / np.maximum(free, 1.0)).tolist(),
        }
