"""Who chooses the blocks that a layer attends in decode.

A layer's own queries may choose (`sparse`), inside that layer. Or the hidden state of the layer
before does, by Forecast or InfiniGen, so that the copy of missing blocks can run behind that layer.
An engine holds one chooser for each layer; it is a small pytree with what it needs besides the
layer's parameters and cache.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Protocol

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
from sparda_jax.sparse.infllm_v2 import select_decode
from sparda_jax.sparse.nosa import block_importance


class Chooser(Protocol):
    """Chooses the blocks of one layer for the token of a decode step."""

    @property
    def ahead(self) -> bool:
        """Whether it looks at the hidden state of the layer before, not at the layer's queries."""
        ...

    def append(
        self, cache: SparseCache, k: Float[Array, "B K H"], position: Int[Array, " B"]
    ) -> SparseCache:
        """The layer's cache with what `choose` needs of a new key besides the compressed keys."""
        ...

    def choose(
        self,
        layer: DecoderLayer,
        source: Array,
        cache: SparseCache,
        step: Step,
        sparse: SparseConfig,
        num_blocks: int,
    ) -> Selection:
        """Blocks for the token of this step.

        Args:
          layer: the layer they are for.
          source: `[B, 1, N, H]`, the layer's queries; ahead `[B, 1, D]`, what the layer before it
            (layer 0: itself) projects its queries from.
          cache: the layer's cache; with the token of this step, except ahead, where that holds for
            layer 0 only.
          step: position and RoPE rows of that token.
          sparse: selection rules.
          num_blocks: M, blocks a sequence can hold.
        """
        ...


def _importance(
    cache: SparseCache, lengths: Int[Array, " B"], sparse: SparseConfig
) -> Float[Array, "B K M"] | None:
    """NOSA's second criterion, for a policy that asks for it."""
    if cache.bias is None or sparse.query_blocks is None:
        return None
    return block_importance(cache.bias, lengths, sparse.geometry)


class _CompressedKeysOnly:
    """Choosers that score the compressed keys, which every cache has."""

    def append(
        self, cache: SparseCache, k: Float[Array, "B K H"], position: Int[Array, " B"]
    ) -> SparseCache:
        """Nothing more to keep."""
        return cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OwnQueries(_CompressedKeysOnly):
    """InfLLM-V2: the layer's own queries."""

    ahead: ClassVar[bool] = False

    def choose(
        self,
        layer: DecoderLayer,
        source: Array,
        cache: SparseCache,
        step: Step,
        sparse: SparseConfig,
        num_blocks: int,
    ) -> Selection:
        """See `Chooser.choose`."""
        lengths = step.position + 1
        importance = _importance(cache, lengths, sparse)
        return select_decode(source, cache.compressed, lengths, sparse, num_blocks, importance)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForecastAhead(_CompressedKeysOnly):
    """SparDA: the trained projection that runs one layer earlier.

    Attributes:
      kernel: `[D, K*H]`, of `Forecast.for_layer(l)` for layer l's blocks.
    """

    kernel: Float[Array, "D KH"]
    ahead: ClassVar[bool] = True

    def choose(
        self,
        layer: DecoderLayer,
        source: Array,
        cache: SparseCache,
        step: Step,
        sparse: SparseConfig,
        num_blocks: int,
    ) -> Selection:
        """See `Chooser.choose`."""
        forecast = project(self.kernel, source, step.cos, step.sin)
        # Of the tokens before this one: a window that it completes is in blocks that are forced.
        importance = _importance(cache, step.position, sparse)
        return select_decode_forecast(
            forecast, cache.compressed, step.position + 1, sparse, num_blocks, importance
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InfiniGenAhead:
    """InfiniGen: the layer's own query projection, applied to the layer before's input.

    Attributes:
      skew: of the layer.
    """

    skew: Skew
    ahead: ClassVar[bool] = True

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
        source: Array,
        cache: SparseCache,
        step: Step,
        sparse: SparseConfig,
        num_blocks: int,
    ) -> Selection:
        """See `Chooser.choose`."""
        assert cache.partial is not None
        query = speculate(layer, self.skew, source, step.cos, step.sin)
        position = step.position[:, None]
        dense = None if sparse.dense_len == 0 else step.position + 1 < sparse.dense_len
        # Tokens before this one: it is in the tail block, which is forced.
        return select_infinigen(
            query, cache.partial, position, position, sparse, num_blocks, dense=dense
        )


def own_choosers(num_layers: int) -> tuple[Chooser, ...]:
    """Mode "sparse"."""
    return (OwnQueries(),) * num_layers


def forecast_choosers(forecast: Forecast) -> tuple[Chooser, ...]:
    """Mode "sparda"."""
    layers = range(len(forecast.layers))
    return tuple(ForecastAhead(forecast.for_layer(index).kernel[...]) for index in layers)


def infinigen_choosers(infinigen: InfiniGen) -> tuple[Chooser, ...]:
    """Mode "infinigen", in which the first layer chooses by its own queries."""
    return (OwnQueries(), *(InfiniGenAhead(skew) for skew in infinigen.layers[1:]))
