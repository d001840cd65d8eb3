"""Who names a layer's blocks one layer early, so that their copy can run behind that layer.

In decode, layer l may choose its own blocks from its own queries (`sparse`), or have them chosen
while layer l-1 runs, from the hidden state there. Everything the second needs of layer l is one
small pytree, `Ahead`; an engine holds one for each layer, None where a layer chooses for itself.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax
from jaxtyping import Array, Float

from pallas_kernels.block_selection import Selection
from sparda_jax.config import SparseConfig
from sparda_jax.engine.state import SparseCache, Step
from sparda_jax.forecast.projection import Forecast, project
from sparda_jax.models.decoder import DecoderLayer
from sparda_jax.sparse.forecast import select_decode_forecast


class Ahead(Protocol):
    """Chooses the blocks of one layer from the hidden state of the layer before it."""

    def choose(
        self,
        layer: DecoderLayer,
        normed: Float[Array, "B 1 D"],
        cache: SparseCache,
        step: Step,
        sparse: SparseConfig,
        num_blocks: int,
    ) -> Selection:
        """Blocks for the token of this step.

        Args:
          layer: the layer they are for.
          normed: what the layer before it (layer 0: itself) projects its queries from.
          cache: the layer's cache; of all layers but the first without the token of this step.
          step: position and RoPE rows of that token.
          sparse: selection rules.
          num_blocks: M, blocks a sequence can hold.
        """
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForecastAhead:
    """SparDA: the trained projection that runs one layer earlier.

    Attributes:
      kernel: `[D, K*H]`, of `Forecast.for_layer(l)` for layer l's blocks.
    """

    kernel: Float[Array, "D KH"]

    def choose(
        self,
        layer: DecoderLayer,
        normed: Float[Array, "B 1 D"],
        cache: SparseCache,
        step: Step,
        sparse: SparseConfig,
        num_blocks: int,
    ) -> Selection:
        """See `Ahead.choose`."""
        forecast = project(self.kernel, normed, step.cos, step.sin)
        lengths = step.position + 1
        return select_decode_forecast(forecast, cache.compressed, lengths, sparse, num_blocks)


def forecast_ahead(forecast: Forecast) -> tuple[ForecastAhead, ...]:
    """One for each layer of the model."""
    layers = range(len(forecast.layers))
    return tuple(ForecastAhead(forecast.for_layer(index).kernel[...]) for index in layers)
