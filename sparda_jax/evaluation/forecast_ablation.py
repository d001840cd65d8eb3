"""What the Forecast's training gains from its teacher and from looking one layer ahead only.

Small enough for a CPU: the backbone runs once, dense, over some windows; of a few layers and of
every few query tokens all inputs of the loss are kept. Each variant then trains the projections of
these layers on the same tokens, and is measured on windows that no variant trains on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from pallas_kernels.compressed_keys import compress_keys
from pallas_kernels.grouping import group_queries
from sparda_jax.config import SparseConfig
from sparda_jax.forecast.divergence import candidates, members
from sparda_jax.forecast.loss import LossConfig, chunk_loss, predict, routing, teacher
from sparda_jax.forecast.projection import project
from sparda_jax.models import Decoder
from sparda_jax.models.attention import dense_attention
from sparda_jax.models.rope import rope_at
from sparda_jax.typing import Array, Bool, Float, Int

LAYERS = (3, 7, 11, 15, 19)
# Every so many tokens are query tokens.
EVERY = 8
SPARSE = SparseConfig()
# Grids of the two teachers: the published one, and that of the policy.
TEACHERS = {"fine": LossConfig(SPARSE), "coarse": LossConfig(SPARSE, 32, 16)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """Of one layer and window; Q query tokens.

    Attributes:
        states: by lookahead, the normed hidden states a projection reads.
        targets: by teacher, `[1, K, Q, C]`.
        compressed: keys.
        mass: attention mass of the layer's own heads by block.
    """

    states: dict[int, Float[Array, "1 Q D"]]
    targets: dict[str, Float[Array, "1 K Q C"]]
    compressed: Float[Array, "1 K C H"]
    mass: Float[Array, "1 K Q M"]


@dataclasses.dataclass(frozen=True)
class Variant:
    """How projections are trained.

    Attributes:
        teacher: a key of `TEACHERS`.
        lookahead: layers between the state that is read and the layer that is selected for.
        steps: optimizer steps; 0: untrained.
        seed: of initial weights and order.
    """

    teacher: str = "fine"
    lookahead: int = 1
    steps: int = 150
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Measured:
    """Of free (not forced) blocks, in the mean over layers.

    Attributes:
        coverage: attention mass on the chosen ones, divided by that on as many best ones.
        recall: share of the fine teacher's that are chosen.
    """

    coverage: float
    recall: float


@jax.jit
def collect(model: Decoder, tokens: Int[Array, "1 T"]) -> list[Inputs]:
    """Inputs of the layers `LAYERS` for one window."""
    count = tokens.shape[1]
    positions = jnp.arange(count, dtype=jnp.int32)[None]
    cos, sin = rope_at(model.config.rope, positions, model.config.max_position_embeddings)
    some = slice(EVERY - 1, None, EVERY)
    x, kept = model.embed(tokens), []
    before: list[Array] = []
    for index, layer in enumerate(model.layers[: LAYERS[-1] + 1]):
        q, k, v = layer.qkv(x, cos, sin)
        if index in LAYERS:
            keys, own = k.transpose(0, 2, 1, 3), positions[:, some]
            compressed = compress_keys(keys, SPARSE.geometry)
            targets = {
                name: teacher(config, q[:, some], keys, compressed, own)
                for name, config in TEACHERS.items()
            }
            states = {ahead: before[-ahead][:, some] for ahead in (1, 2)}
            kept.append(Inputs(states, targets, compressed, _mass(q[:, some], keys, own)))
        before.append(layer.attention_norm(x))
        x = layer.finish(x, dense_attention(q, k, v, None))
    return kept


def _mass(q: Array, keys: Array, positions: Array) -> Float[Array, "1 K Q M"]:
    batch, count, heads, dim = q.shape
    groups = keys.shape[1]
    scores = jnp.einsum("bkth,bksh->bkts", group_queries(q, groups), keys) * dim**-0.5
    seen = jnp.arange(keys.shape[2]) <= positions[:, None, :, None]
    scores = scores.reshape(batch, groups, heads // groups, count, -1)
    share = jax.nn.softmax(jnp.where(seen[:, :, None], scores, -jnp.inf), axis=-1).sum(2)
    return share.reshape(*share.shape[:3], -1, SPARSE.geometry.block_size).sum(-1)


def train(windows: Sequence[Inputs], variant: Variant, length: int, rope: Any) -> Array:
    """Projections `[A, D, K*H]` of the layers; `windows` hold the layers on a leading axis A."""
    config = TEACHERS[variant.teacher]
    first = windows[0].states[1]
    heads, dim = windows[0].compressed.shape[2], windows[0].compressed.shape[-1]
    shape, bound = (len(LAYERS), first.shape[-1], heads * dim), first.shape[-1] ** -0.5
    kernels = jax.random.uniform(jax.random.key(variant.seed), shape, minval=-bound, maxval=bound)
    if not variant.steps:
        return kernels
    rate = optax.schedules.linear_schedule(1e-2, 0.0, variant.steps)
    optimizer = optax.adamw(rate, b1=0.9, b2=0.95, eps=1e-6, weight_decay=0.01)

    def loss(kernel: Array, inputs: Inputs) -> Array:
        positions, cos, sin = rope
        target = inputs.targets[variant.teacher]
        rows = (inputs.states[variant.lookahead], cos, sin, positions, positions >= 0)
        kl, _ = chunk_loss(
            config,
            kernel,
            target=target,
            ids=routing(config, target, positions, length),
            compressed=inputs.compressed,
            rows=rows,
            length=length,
        )
        return kl / target[..., 0].size

    @jax.jit
    def step(kernels: Array, state: Any, inputs: Inputs) -> tuple[Array, Any]:
        gradient = jax.grad(lambda k: jax.vmap(loss)(k, inputs).sum())(kernels)
        updates, state = optimizer.update(gradient, state, kernels)
        return kernels + updates, state

    state, rng = optimizer.init(kernels), np.random.default_rng(variant.seed)
    order = np.concatenate([rng.permutation(len(windows)) for _ in range(variant.steps)])
    for index in order[: variant.steps]:
        kernels, state = step(kernels, state, windows[index])
    return kernels


@partial(jax.jit, static_argnames=("lookahead", "length"))
def measure(
    kernels: Array, inputs: Inputs, rope: Any, lookahead: int, length: int
) -> Float[Array, "2 A"]:
    """Coverage and recall of each layer in one window."""

    def one(kernel: Array, inputs: Inputs) -> Array:
        positions, cos, sin = rope
        queries = project(kernel, inputs.states[lookahead], cos, sin)
        visible = SPARSE.geometry.started_windows(positions)
        scores = predict(queries, inputs.compressed, visible)
        return _quality(routing(TEACHERS["fine"], scores, positions, length), inputs, positions)

    return jax.vmap(one)(kernels, inputs).T


def _quality(ids: Array, inputs: Inputs, positions: Array) -> Float[Array, "2"]:
    """Coverage and recall of a selection."""
    blocks = inputs.mass.shape[-1]
    free = lambda ids: candidates(SPARSE, members(ids, blocks), positions)
    chosen = free(ids)
    best = _best(inputs.mass, chosen, positions)
    truth = free(routing(TEACHERS["fine"], inputs.targets["fine"], positions, blocks * 64))
    mass = lambda chosen: jnp.where(chosen, inputs.mass, 0.0).sum()
    return jnp.stack([mass(chosen) / mass(best), (chosen & truth).sum() / truth.sum()])


def _best(mass: Array, chosen: Bool[Array, "1 K Q M"], positions: Array) -> Array:
    """As many free blocks as were chosen, by attention mass."""
    every = candidates(SPARSE, jnp.ones_like(chosen), positions)
    order = jnp.argsort(-jnp.where(every, mass, -1.0), axis=-1)
    rank = jnp.argsort(order, axis=-1)
    return every & (rank < chosen.sum(-1, keepdims=True))


def run(
    model: Decoder, windows: np.ndarray, held_out: int, variants: Sequence[Variant]
) -> Iterator[tuple[str, list[Measured]]]:
    """Each variant, and the model's own selector, on every held-out window.

    Args:
        model: the backbone.
        windows: `int32[X, T]`; T a multiple of the block size.
        held_out: the last so many windows are measured on.
        variants: what to train.
    """
    length = windows.shape[1]
    stack = lambda kept: jax.tree.map(lambda *rows: np.stack(rows), *kept)
    inputs = [stack(jax.device_get(collect(model, jnp.asarray(row[None])))) for row in windows]
    positions = jnp.arange(EVERY - 1, length, EVERY, dtype=jnp.int32)[None]
    limit = model.config.max_position_embeddings
    rope = (positions, *rope_at(model.config.rope, positions, limit))
    held = inputs[-held_out:]
    tell = lambda parts: [Measured(*map(float, part.mean(-1))) for part in parts]

    @jax.jit
    def selector(inputs: Inputs) -> Array:
        own = lambda i: _quality(
            routing(TEACHERS["coarse"], i.targets["coarse"], positions, length), i, positions
        )
        return lax.map(own, inputs).T

    yield "sparse selector", tell([selector(each) for each in held])
    for variant in variants:
        kernels = train(inputs[:-held_out], variant, length, rope)
        parts = [measure(kernels, each, rope, variant.lookahead, length) for each in held]
        name = f"{variant.teacher}/ahead{variant.lookahead}/seed{variant.seed}"
        yield name if variant.steps else f"untrained/seed{variant.seed}", tell(parts)
