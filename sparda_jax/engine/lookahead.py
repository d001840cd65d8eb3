"""Who names a layer's blocks one layer early, so that their copy can run behind that layer.

In decode, layer l may choose its own blocks from its own queries (`sparse`), or have them chosen
while layer l-1 runs, from the hidden state there. Everything the second needs of layer l is one
small pytree, `Ahead`; an engine holds one for each layer, None where a layer chooses for itself.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.block_selection import Selection
from sparda_jax.config import SparseConfig
from sparda_jax.engine.state import SparseCache, Step
from sparda_jax.forecast.projection import Forecast, project
from sparda_jax.models.decoder import DecoderLayer
from sparda_jax.sparse.forecast import select_decode_forecast
from sparda_jax.sparse.infinigen import (
    InfiniGen,
    Skew,
    partial_keys,
    select_infinigen,
    speculate,
)


class Ahead(Protocol):
    """Chooses the blocks of one layer from the hidden state of the layer before it."""

    def append(
        self, cache: SparseCache, k: Float[Array, "B K H"], position: Int[Array, " B"]
    ) -> SparseCache:
        """The layer's cache with what `choose` will need of a new key in later steps."""
        ...

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

    def append(
        self, cache: SparseCache, k: Float[Array, "B K H"], position: Int[Array, " B"]
    ) -> SparseCache:
        """Nothing: it scores the compressed keys."""
        return cache

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InfiniGenAhead:
    """InfiniGen: the layer's own query projection, applied to the layer before's input.

    Attributes:
      skew: of the layer.
    """

    skew: Skew

    def append(
        self, cache: SparseCache, k: Float[Array, "B K H"], position: Int[Array, " B"]
    ) -> SparseCache:
        """Adds the new key's few channels."""
        assert cache.partial is not None
        rows = jnp.arange(position.shape[0])
        keys = partial_keys(k[:, :, None], self.skew)[:, :, 0]
        return dataclasses.replace(cache, partial=cache.partial.at[rows, :, position].set(keys))

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
        assert cache.partial is not None
        query = speculate(layer, self.skew, normed, step.cos, step.sin)
        position = step.position[:, None]
        dense = None if sparse.dense_len == 0 else step.position + 1 < sparse.dense_len
        # Tokens before this one: it is in the tail block, which is forced.
        return select_infinigen(
            query, cache.partial, position, position, sparse, num_blocks, dense=dense
        )


def infinigen_ahead(infinigen: InfiniGen) -> tuple[InfiniGenAhead | None, ...]:
    """One for each layer of the model but the first, which chooses by its own queries."""
    return (None, *(InfiniGenAhead(skew) for skew in infinigen.layers[1:]))


def forecast_ahead(forecast: Forecast) -> tuple[ForecastAhead, ...]:
    """One for each layer of the model."""
    layers = range(len(forecast.layers))
    return tuple(ForecastAhead(forecast.for_layer(index).kernel[...]) for index in layers)
