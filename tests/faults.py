"""What goes wrong, made to go wrong."""

import dataclasses

import jax
import numpy as np


def poison_row(engine, generation, row: int) -> None:
    """Makes everything cached in float32 for one request of a batch NaN."""

    def poison(leaf):
        if leaf.dtype != np.float32:
            return leaf
        values = jax.device_get(leaf).copy()
        values[row] = np.nan
        return engine.put(values)

    state = generation.batch.state
    layers = jax.tree.map(poison, state.layers)
    generation.batch.state = dataclasses.replace(state, layers=layers)
