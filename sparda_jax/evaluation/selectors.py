"""How each policy scores blocks, and the blocks it takes from the scores, for all tokens at once.

The rules are those of `pallas_kernels.block_selection` (a test holds the two together), with one
difference in form: the budget is a value a row and the answer a mask, so that one program serves
several budgets side by side, which is what an evaluation needs.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.block_selection.reference import (
    forecast_scores,
    multi_head_scores,
    pool_scores,
)
from pallas_kernels.chunking import map_chunks
from sparda_jax.config import SparseConfig
from sparda_jax.forecast.loss import LossConfig, teacher
from sparda_jax.forecast.projection import ForecastLayer
from sparda_jax.models.decoder import DecoderLayer
from sparda_jax.sparse.forecast import visible_windows
from sparda_jax.sparse.infinigen import Skew, partial_keys, speculate, token_block_scores
from sparda_jax.sparse.mass import block_mass
from sparda_jax.typing import Array, Bool, Float, Int

# Bound on the float32 scores of one chunk of query tokens.
CHUNK_BYTES = 512 << 20


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerState:
    """What a selector may look at when it chooses the blocks of one layer.

    Attributes:
        source: normed input of an earlier layer (layer 0: its own), which a lookahead starts from.
        q: the layer's own queries after RoPE.
        keys: its keys after RoPE, S = M*P.
        compressed: its compressed keys.
        positions: absolute positions, 0 .. T-1 in every row.
        lengths: tokens of each row; what follows them is padding.
        cos: RoPE rows.
        sin: likewise.
    """

    source: Float[Array, "B T D"]
    q: Float[Array, "B T N H"]
    keys: Float[Array, "B K S H"]
    compressed: Float[Array, "B K C H"]
    positions: Int[Array, "B T"]
    lengths: Int[Array, " B"]
    cos: Float[Array, "B T H"]
    sin: Float[Array, "B T H"]


class Selector(Protocol):
    """Scores blocks. Frozen and hashable: a selector is a static argument of compiled programs."""

    def queries(
        self, layer: DecoderLayer, parameter: Any, state: LayerState, sparse: SparseConfig
    ) -> Array:
        """What is scored, one row a token: `[B, T, ...]`."""

    def scores(
        self,
        queries: Array,
        positions: Int[Array, "B T"],
        parameter: Any,
        state: LayerState,
        sparse: SparseConfig,
    ) -> Float[Array, "B K T M"]:
        """Scores of all blocks for a chunk of `queries` rows, which stand at `positions`."""

    def size(self, state: LayerState) -> int:
        """Scores, of whatever is scored, that are formed for every token of one row."""


class _ByToken:
    """Selectors that form no more than one score a KV head and token."""

    def size(self, state: LayerState) -> int:
        """See `Selector`."""
        return state.keys.shape[1] * state.keys.shape[2]


def _blocks(state: LayerState, sparse: SparseConfig) -> int:
    return state.keys.shape[2] // sparse.geometry.block_size


class _OwnQueries:
    """Selectors that look at what the layer itself asks, key by key and head by head."""

    def queries(
        self, layer: DecoderLayer, parameter: None, state: LayerState, sparse: SparseConfig
    ) -> Array:
        """See `Selector`."""
        return state.q

    def size(self, state: LayerState) -> int:
        """See `Selector`."""
        return state.q.shape[2] * state.keys.shape[2]


@dataclasses.dataclass(frozen=True)
class MultiHead(_OwnQueries):
    """InfLLM-V2: attention mass of the layer's own queries on compressed keys."""

    def scores(
        self, queries: Array, positions: Array, parameter: None, state: LayerState,
        sparse: SparseConfig,
    ) -> Array:  # fmt: skip
        """See `Selector`."""
        visible = sparse.geometry.complete_windows(positions)
        scale = queries.shape[-1] ** -0.5
        scores = multi_head_scores(queries, state.compressed, visible, scale=scale)
        return pool_scores(scores, num_blocks=_blocks(state, sparse), geometry=sparse.geometry)

    def size(self, state: LayerState) -> int:
        """See `Selector`."""
        return state.q.shape[2] * state.compressed.shape[2]


@dataclasses.dataclass(frozen=True)
class ForecastQueries:
    """SparDA: the Forecast of an earlier layer on compressed keys; its projection is a parameter.

    The text counts as prompt. Generated tokens would choose the same blocks (docs/forecast.md).
    """

    def queries(
        self, layer: DecoderLayer, parameter: ForecastLayer, state: LayerState, sparse: SparseConfig
    ) -> Array:
        """See `Selector`."""
        return parameter(state.source, state.cos, state.sin)

    def scores(
        self, queries: Array, positions: Array, parameter: ForecastLayer, state: LayerState,
        sparse: SparseConfig,
    ) -> Array:  # fmt: skip
        """See `Selector`."""
        visible = visible_windows(positions, state.lengths, sparse.geometry)
        visible = jnp.minimum(visible, state.compressed.shape[2])
        scores = forecast_scores(queries, state.compressed, visible)
        return pool_scores(scores, num_blocks=_blocks(state, sparse), geometry=sparse.geometry)

    def size(self, state: LayerState) -> int:
        """See `Selector`."""
        return state.compressed.shape[1] * state.compressed.shape[2]


@dataclasses.dataclass(frozen=True)
class ForecastOnKeys(_ByToken, ForecastQueries):
    """Bound: the Forecast scored against every single key, a block by its best: no means at all."""

    def scores(
        self, queries: Array, positions: Array, parameter: ForecastLayer, state: LayerState,
        sparse: SparseConfig,
    ) -> Array:  # fmt: skip
        """See `Selector`."""
        dots = forecast_scores(queries, state.keys, positions + 1)
        return dots.reshape(*dots.shape[:3], _blocks(state, sparse), -1).max(-1)


@dataclasses.dataclass(frozen=True)
class FineTeacher(_OwnQueries):
    """Bound: the blocks that the published training aims at, by means of two neighbouring keys."""

    def scores(
        self, queries: Array, positions: Array, parameter: None, state: LayerState,
        sparse: SparseConfig,
    ) -> Array:  # fmt: skip
        """See `Selector`."""
        config = LossConfig(sparse)
        scores = teacher(config, queries, state.keys, state.compressed, positions)
        return pool_scores(scores, num_blocks=_blocks(state, sparse), geometry=sparse.geometry)


@dataclasses.dataclass(frozen=True)
class PartialKeys(_ByToken):
    """InfiniGen: this layer's query projection on an earlier input, on few channels of all keys."""

    def queries(
        self, layer: DecoderLayer, parameter: Skew, state: LayerState, sparse: SparseConfig
    ) -> Array:
        """See `Selector`."""
        return speculate(layer, parameter, state.source, state.cos, state.sin)

    def scores(
        self, queries: Array, positions: Array, parameter: Skew, state: LayerState,
        sparse: SparseConfig,
    ) -> Array:  # fmt: skip
        """See `Selector`."""
        cache = partial_keys(state.keys, parameter)
        size = sparse.geometry.block_size
        return token_block_scores(queries, cache, positions + 1, _blocks(state, sparse), size)


@dataclasses.dataclass(frozen=True)
class Recent(_ByToken):
    """Control: the first blocks and a window of the latest, nothing in between."""

    def queries(
        self, layer: DecoderLayer, parameter: None, state: LayerState, sparse: SparseConfig
    ) -> Array:
        """See `Selector`."""
        return state.positions

    def scores(
        self, queries: Array, positions: Array, parameter: None, state: LayerState,
        sparse: SparseConfig,
    ) -> Array:  # fmt: skip
        """See `Selector`."""
        shape = (positions.shape[0], state.keys.shape[1], positions.shape[1])
        return lax.broadcasted_iota(jnp.float32, (*shape, _blocks(state, sparse)), 3)


@dataclasses.dataclass(frozen=True)
class Uniform(_ByToken):
    """Control: every block equally likely, drawn anew for every token; the parameter is a key."""

    def queries(
        self, layer: DecoderLayer, parameter: Array, state: LayerState, sparse: SparseConfig
    ) -> Array:
        """See `Selector`."""
        shape = (*state.positions.shape, state.keys.shape[1], _blocks(state, sparse))
        return jax.random.uniform(parameter, shape)

    def scores(
        self, queries: Array, positions: Array, parameter: Array, state: LayerState,
        sparse: SparseConfig,
    ) -> Array:  # fmt: skip
        """See `Selector`."""
        return queries.swapaxes(1, 2)


@dataclasses.dataclass(frozen=True)
class Oracle(_OwnQueries):
    """Upper bound: the blocks that the layer's query heads truly attend most."""

    def scores(
        self, queries: Array, positions: Array, parameter: None, state: LayerState,
        sparse: SparseConfig,
    ) -> Array:  # fmt: skip
        """See `Selector`."""
        return block_mass(queries, state.keys, positions, sparse.geometry.block_size)


def forced_blocks(
    positions: Int[Array, "B T"], num_blocks: int, sparse: SparseConfig
) -> tuple[Bool[Array, "B 1 T M"], Bool[Array, "B 1 T M"]]:
    """Blocks that every query takes, and the candidates: earlier blocks that no rule forces."""
    own = (positions // sparse.geometry.block_size)[:, None, :, None]
    block = lax.broadcasted_iota(jnp.int32, (1, 1, 1, num_blocks), 3)
    forced = (block < sparse.init_blocks) | (block >= own - sparse.local_blocks)
    past = block <= own
    return forced & past, past & ~forced


def take_best(
    scores: Float[Array, "B K T M"],
    positions: Int[Array, "B T"],
    budgets: Int[Array, " B"],
    sparse: SparseConfig,
) -> Bool[Array, "B K T M"]:
    """The forced blocks and the best candidates, ties to the lowest id, `budgets[b]` in all.

    Ranks come from comparing all pairs, on a GPU far cheaper than a sort of short rows. One block
    at a time with all others: as one reduction XLA needs minutes to compile it for long texts.
    """
    blocks = scores.shape[3]
    forced, free = forced_blocks(positions, blocks, sparse)
    scores = jnp.where(forced, jnp.inf, jnp.where(free, scores, -jnp.inf))
    index = jnp.arange(blocks, dtype=jnp.int32)

    def count(other: Array, rank: Array) -> Array:
        its = lax.dynamic_slice_in_dim(scores, other, 1, axis=3)
        return rank + ((its > scores) | ((its == scores) & (other < index)))

    rank = lax.fori_loop(0, blocks, count, jnp.zeros(scores.shape, jnp.int32))
    return (rank < budgets[:, None, None, None]) & (forced | free)


def mask_ids(mask: Bool[Array, "B K T M"], width: int) -> Int[Array, "B K T R"]:
    """Ids of the set blocks, ascending, padded with -1 to `width`; more than that are dropped."""
    blocks = mask.shape[3]
    upto = jnp.cumsum(mask, axis=-1, dtype=jnp.int32)
    place = jnp.arange(width, dtype=jnp.int32)
    ids = (upto[..., None, :] <= place[:, None]).sum(-1, dtype=jnp.int32)
    return jnp.where(ids < blocks, ids, -1)


@partial(jax.jit, static_argnames=("selector", "sparse"))
def select(
    selector: Selector,
    layer: DecoderLayer,
    parameter: Any,
    state: LayerState,
    budgets: Int[Array, " B"],
    sparse: SparseConfig,
) -> Bool[Array, "B K T M"]:
    """Blocks that a selector takes for every token of a layer.

    Args:
        selector: scores the blocks.
        layer: the layer's parameters.
        parameter: the selector's own, for this layer.
        state: see there.
        budgets: blocks of each row, forced ones included.
        sparse: grid and forced blocks; its own budget plays no part.
    """

    def choose(queries: Array, positions: Array) -> tuple[Array]:
        scores = selector.scores(queries, positions, parameter, state, sparse)
        return (take_best(scores, positions, budgets, sparse),)

    chunk = max(1, CHUNK_BYTES // max(1, 4 * state.q.shape[0] * selector.size(state)))
    queries = selector.queries(layer, parameter, state, sparse)
    (mask,) = map_chunks(choose, chunk, (queries, state.positions), axes=(1, 1), out_axes=(2,))
    return mask
