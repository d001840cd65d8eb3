"""Whole-sequence forward passes under a selection policy.

Every meter runs for every policy by the same code: a policy says which blocks each layer attends,
for all tokens of whole, teacher-forced sequences. A layer is three programs (enter, select, attend)
of which only the middle one differs between policies, and all layers share them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp

from pallas_kernels.block_sparse_attention import block_sparse_attention
from pallas_kernels.compressed_keys import compress_keys
from sparda_jax.config import SparseConfig
from sparda_jax.evaluation.selectors import (
    FineTeacher,
    ForecastOnKeys,
    ForecastQueries,
    LayerState,
    MultiHead,
    Oracle,
    PartialKeys,
    Recent,
    Selector,
    Uniform,
    mask_ids,
    select,
)
from sparda_jax.forecast.projection import Forecast
from sparda_jax.models.attention import causal_attention
from sparda_jax.models.decoder import Decoder, DecoderLayer
from sparda_jax.models.rope import rope_at
from sparda_jax.sparse.infinigen import InfiniGen
from sparda_jax.sparse.infllm_v2 import to_blocks
from sparda_jax.typing import Array, Bool, Float, Int

# Inputs of so many layers back are kept.
MAX_LOOKAHEAD = 2


@dataclasses.dataclass(frozen=True)
class Policy:
    """A selector and its parameter for every layer.

    Attributes:
        name: in results.
        layers: L pairs; empty: dense attention.
        lookahead: layers between the input that a lookahead starts from and the layer that it
            selects for, 1 or 2; the first layers take layer 0's input.

    Raises:
        ValueError: another lookahead.
    """

    name: str
    layers: tuple[tuple[Selector, Any], ...]
    lookahead: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.lookahead <= MAX_LOOKAHEAD:
            raise ValueError(f"lookahead must be in 1 .. {MAX_LOOKAHEAD}, got {self.lookahead}")


DENSE = Policy("dense", ())


def sparse_policy(num_layers: int) -> Policy:
    """InfLLM-V2 in every layer."""
    return Policy("sparse", ((MultiHead(), None),) * num_layers)


def oracle_policy(num_layers: int) -> Policy:
    """The best blocks by true attention mass in every layer."""
    return Policy("oracle", ((Oracle(), None),) * num_layers)


def bound_policies(forecast: Forecast, name: str) -> list[Policy]:
    """What limits these projections: their teacher's blocks, and their own on single keys."""
    count = len(forecast.layers)
    keys = tuple((ForecastOnKeys(), forecast.for_layer(i)) for i in range(count))
    return [Policy("teacher", ((FineTeacher(), None),) * count), Policy(f"{name}_keys", keys)]


def local_policy(num_layers: int) -> Policy:
    """The first blocks and the latest, up to the budget."""
    return Policy("local", ((Recent(), None),) * num_layers)


def random_policy(num_layers: int, seed: int = 0) -> Policy:
    """Random blocks besides the forced ones."""
    keys = jax.random.split(jax.random.key(seed), num_layers)
    return Policy("random", tuple((Uniform(), key) for key in keys))


def sparda_policy(forecast: Forecast, name: str = "sparda", lookahead: int = 1) -> Policy:
    """SparDA with these projections."""
    count = len(forecast.layers)
    layers = tuple((ForecastQueries(), forecast.for_layer(i)) for i in range(count))
    return Policy(name, layers, lookahead)


def infinigen_policy(infinigen: InfiniGen) -> Policy:
    """InfiniGen with these skews; layer 0 selects as `sparse` does."""
    later = tuple((PartialKeys(), skew) for skew in infinigen.layers[1:])
    return Policy("infinigen", ((MultiHead(), None), *later))


@dataclasses.dataclass(frozen=True)
class LayerStep:
    """A layer of a forward pass, before its attention.

    Attributes:
        index: of the layer.
        layer: its parameters.
        state: what selectors see, `source` left at the layer's own normed input.
        sources: normed inputs of the latest layers, this one's last.
    """

    index: int
    layer: DecoderLayer
    state: LayerState
    sources: tuple[Float[Array, "B T D"], ...]

    def mask(
        self, policy: Policy, budgets: Int[Array, " B"], sparse: SparseConfig
    ) -> Bool[Array, "B K T M"]:
        """Blocks that a policy takes in this layer."""
        selector, parameter = policy.layers[self.index]
        source = self.sources[-1 - min(policy.lookahead, len(self.sources) - 1)]
        state = dataclasses.replace(self.state, source=source)
        return cast(Array, select(selector, self.layer, parameter, state, budgets, sparse=sparse))

    def at(self, tokens: Int[Array, " X"]) -> LayerStep:
        """The same layer for some of the query tokens only; its keys stay whole."""
        pick = lambda rows: jnp.take(rows, tokens, axis=1)
        fields = ("source", "q", "positions", "cos", "sin")
        picked = {name: pick(getattr(self.state, name)) for name in fields}
        state = dataclasses.replace(self.state, **picked)
        return dataclasses.replace(self, state=state, sources=tuple(map(pick, self.sources)))


_rope = jax.jit(rope_at, static_argnums=(0, 2))


@jax.jit
def _embed(model: Decoder, tokens: Array) -> Array:
    return model.embed(tokens)


@partial(jax.jit, static_argnames="sparse")
def _enter(
    layer: DecoderLayer, x: Array, cos: Array, sin: Array, lengths: Array, sparse: SparseConfig
) -> tuple[LayerState, Array]:
    """The layer's state and its KV blocks."""
    batch, count, _ = x.shape
    positions = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (batch, count))
    q, k, v = layer.qkv(x, cos, sin)
    kv = to_blocks(k, v, sparse.geometry.block_size)
    keys = kv[:, :, :, 0].reshape(*kv.shape[:2], -1, k.shape[-1])
    compressed = compress_keys(keys, sparse.geometry)
    normed = layer.attention_norm(x)
    return LayerState(normed, q, keys, compressed, positions, lengths, cos, sin), kv


@jax.jit
def _attend_dense(layer: DecoderLayer, x: Array, state: LayerState, kv: Array) -> Array:
    count = x.shape[1]
    k, v = (
        kv[:, :, :, side].reshape(*kv.shape[:2], -1, kv.shape[-1]).swapaxes(1, 2)[:, :count]
        for side in range(2)
    )
    return layer.finish(x, causal_attention(state.q, k, v, state.positions))


@partial(jax.jit, static_argnames="width")
def _attend(
    layer: DecoderLayer, x: Array, state: LayerState, kv: Array, mask: Array, width: int
) -> Array:
    attention = block_sparse_attention(state.q, kv, mask_ids(mask, width), state.positions)
    return layer.finish(x, cast(Array, attention))


def forward(
    model: Decoder,
    policy: Policy,
    tokens: Int[Array, "B T"],
    sparse: SparseConfig,
    *,
    budgets: Int[Array, " B"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    max_length: int | None = None,
    visit: Callable[[LayerStep], None] | None = None,
) -> Float[Array, "B T D"]:
    """Hidden states after the last layer; of `model.logits` they are the input.

    Args:
        model: the decoder.
        policy: says what every layer attends.
        tokens: whole sequences, padded at the end where they differ in length.
        sparse: grid and forced blocks; its budget bounds those of all rows.
        budgets: blocks of each row, at most the policy's; None: the policy's.
        lengths: tokens of each row; None: all.
        max_length: as in `Decoder.__call__`.
        visit: called with every layer before its attention.

    Raises:
        ValueError: more tokens than `max_length`.
    """
    batch, count = tokens.shape
    limit = model.config.max_position_embeddings if max_length is None else max_length
    if count > limit:
        raise ValueError(f"{count} tokens exceed the maximum length of {limit}")
    whole = jnp.full((batch,), count, jnp.int32)
    lengths = whole if lengths is None else lengths
    budgets = jnp.full_like(whole, sparse.budget_blocks) if budgets is None else budgets
    width = min(sparse.budget_blocks, int(sparse.geometry.num_blocks(count)))
    positions = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (batch, count))
    cos, sin = _rope(model.config.rope, positions, limit)
    x = _embed(model, tokens)
    sources: tuple[Array, ...] = ()
    for index, layer in enumerate(model.layers):
        state, kv = _enter(layer, x, cos, sin, lengths, sparse=sparse)
        sources = (*sources, state.source)[-1 - MAX_LOOKAHEAD :]
        step = LayerStep(index, layer, state, sources)
        if visit is not None:
            visit(step)
        if policy.layers:
            x = _attend(layer, x, state, kv, step.mask(policy, budgets, sparse), width=width)
        else:
            x = _attend_dense(layer, x, state, kv)
    return x
