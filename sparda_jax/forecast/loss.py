"""Distillation of the Forecast projections: KL to what the model's own queries attend.

For layer l and KV head k, query token t (SparDA, sec. 3; spec/sparda.md, sec. 5; float32 here):

    T[i]  teacher: attention mass of the layer's G query heads on fine keys, the largest of each
          window i (`pallas_kernels.teacher_scores`), divided by its sum
    P[i]  softmax_i(F_{l-1}[t, k] . c[k, i] / sqrt(H)) over the windows that start at or before t
    loss  KL(T || P) over the windows of the blocks that T selects, forced blocks aside, and one
          rest bucket for everything else; mean over heads and tokens, summed over layers

The forward pass attends the blocks that T selects. Gradients reach the Forecast kernels only: the
backbone runs once, forward.

That is the published loss. With `target="blocks"` it is the KL from the true attention mass of the
free blocks to softmax over the scores that choose among them, weighted with that mass: a mean of
two keys hides what one of them gets, a mean over windows what a block gets, and the forced blocks
need no prediction (docs/forecast.md has the figures). Tokens take turns in how many local blocks
count as forced, 1 to the policy's number: ranks among near blocks are learnt too, which smaller
budgets need.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.block_selection import choose_blocks
from pallas_kernels.block_selection.reference import (
    forecast_scores,
    multi_head_scores,
    pool_scores,
)
from pallas_kernels.block_sparse_attention import block_sparse_attention
from pallas_kernels.compressed_keys import compress_keys
from pallas_kernels.teacher_scores import teacher_scores
from sparda_jax.config import SparseConfig
from sparda_jax.forecast.divergence import block_divergence, candidates, divergence, members
from sparda_jax.forecast.projection import Forecast, project
from sparda_jax.models.attention import causal_attention
from sparda_jax.models.decoder import Decoder, DecoderLayer
from sparda_jax.models.rope import rope_at
from sparda_jax.sparse.infllm_v2 import to_blocks
from sparda_jax.sparse.mass import block_mass
from sparda_jax.typing import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """What is distilled, and in what portions.

    Attributes:
        sparse: the policy that will be deployed. Its `dense_len` plays no part: training always
            selects.
        teacher_kernel: keys averaged into one fine key of the teacher.
        teacher_stride: keys between fine keys. Equal to the policy's grid: the multi-head
            probabilities of that grid are the teacher.
        mask_future: False: the teacher's selection can lose a place to a block after the query's
            own, as in the public code; for tests against it.
        target: "windows": the published loss. "blocks": see above; the teacher's grid is not used.
        query_every: one query token in so many is trained on. Above 1 the backbone attends
            everything, since no teacher says what the other tokens select. Tokens side by side tell
            much the same; an odd number meets all places within a block.
        lookahead: layers between the hidden state that a projection reads and the layer it selects
            for. The engine runs 1; others are for comparison, and their weights are of no use to
            it. A layer with fewer layers before it reads the hidden state of layer 0.
        chunk_bytes: bound on one float32 array of scores, `[B, K, tokens, C]`. About ten are alive.
    """

    sparse: SparseConfig = dataclasses.field(default_factory=SparseConfig)
    teacher_kernel: int = 2
    teacher_stride: int = 1
    mask_future: bool = True
    target: Literal["windows", "blocks"] = "windows"
    query_every: int = 1
    lookahead: int = 1
    chunk_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        for name in ("lookahead", "query_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.target not in ("windows", "blocks"):
            raise ValueError(f"target must be 'windows' or 'blocks', got {self.target!r}")
        geometry = self.sparse.geometry
        fine, grid = (self.teacher_kernel, self.teacher_stride), geometry.kernel_stride
        if fine == (geometry.kernel_size, grid):
            return
        if min(fine) < 1 or self.teacher_stride >= grid or grid % self.teacher_stride:
            raise ValueError(
                f"teacher grid {fine} is neither the policy's ({geometry.kernel_size}, {grid}) nor "
                f"finer by a whole factor"
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossOutput:
    """Loss and what to watch beside it, by layer.

    Attributes:
        per_layer: KL per head and token of the projection that selects for layer l, nats.
        free: blocks that the teacher selects beyond the forced ones, per layer.
        recalled: how many of those Forecast selects too; recall is `recalled / free`.
    """

    per_layer: Float[Array, " L"]
    free: Float[Array, " L"]
    recalled: Float[Array, " L"]

    @property
    def recall(self) -> Array:
        """Share of the teacher's free blocks that Forecast selects, all layers together."""
        return self.recalled.sum() / jnp.maximum(self.free.sum(), 1.0)


def forecast_loss(
    model: Decoder,
    forecast: Forecast,
    tokens: Int[Array, "B T"],
    config: LossConfig,
    *,
    max_length: int | None = None,
) -> tuple[Float[Array, ""], LossOutput]:
    """Loss of whole windows of text, for `jax.value_and_grad(..., has_aux=True)`.

    Args:
        model: the frozen backbone.
        forecast: projections; float32 master weights.
        tokens: full windows, positions from 0, no padding.
        config: see there.
        max_length: as in `Decoder.__call__`.

    Returns:
        The sum over layers, whose gradient reaches `forecast` alone, and its parts.

    Raises:
        ValueError: fewer tokens than one compressed key averages, or more than `max_length`.
    """
    geometry = config.sparse.geometry
    batch, count = tokens.shape
    limit = model.config.max_position_embeddings if max_length is None else max_length
    if not geometry.kernel_size <= count <= limit:
        raise ValueError(
            f"windows of {count} tokens: at least {geometry.kernel_size} (one compressed key) and "
            f"at most {limit}"
        )
    positions = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (batch, count))
    cos, sin = rope_at(model.config.rope, positions, limit)
    model = lax.stop_gradient(model)
    # One program for all layers: compiling them apart takes L times as long, and the copy that
    # stacking makes is next to nothing beside the work on a window.
    layers = jax.tree.map(lambda *rows: jnp.stack(rows), *model.layers)
    kernels = jnp.stack([forecast.for_layer(i).kernel[...] for i in range(len(model.layers))])
    kl, free, recalled = layer_losses(
        config, kernels, (layers, model.embed(tokens), positions, cos, sin)
    )
    queries = count // config.query_every
    per_layer = kl / (batch * queries * model.config.num_kv_heads)
    return per_layer.sum(), LossOutput(lax.stop_gradient(per_layer), free, recalled)


# All layers, their weights stacked; x [B, T, D]; positions [B, T]; cos, sin [B, T, H].
Operands = tuple[DecoderLayer, Array, Array, Array, Array]
Losses = tuple[Array, Array, Array]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def layer_losses(config: LossConfig, kernels: Float[Array, "L D KH"], operands: Operands) -> Losses:
    """Each layer's KL, summed over heads and tokens, while the backbone runs through its layers.

    The gradient of the kernels is formed chunk by chunk in the forward pass, so that no score
    outlives its chunk, the teacher is computed once, and `[L, D, K*H]` is all that waits for the
    backward pass.

    Args:
        config: see there.
        kernels: row l is the projection that selects for layer l.
        operands: see `Operands`; they get no gradient.

    Returns:
        KL; free and recalled blocks, see `LossOutput`; `[L]` each.
    """
    losses, _ = _over_layers(config, kernels, operands, with_gradient=False)
    return losses


def _forward(config: LossConfig, kernels: Array, operands: Operands) -> tuple[Losses, Array]:
    return _over_layers(config, kernels, operands, with_gradient=True)


def _backward(config: LossConfig, gradient: Array, cotangents: Losses) -> tuple[Array, None]:
    return gradient * cotangents[0][:, None, None], None


layer_losses.defvjp(_forward, _backward)


def _over_layers(
    config: LossConfig, kernels: Array, operands: Operands, *, with_gradient: bool
) -> tuple[Losses, Array]:
    """The losses of all layers and, if asked for, their gradients.

    The carry holds the residual stream and the normed hidden states of the last `lookahead` layers.
    """
    layers, x, positions, cos, sin = operands

    def body(carry: Any, rows: Any) -> tuple[Any, tuple[Losses, Array]]:
        x, before = carry
        index, layer, kernel = rows
        normed = layer.attention_norm(x)
        q, k, v = layer.qkv(x, cos, sin)
        # Before layer 0 there is none: it reads its own state, and so do those that look past it.
        before = tuple(jnp.where(index == 0, normed, state) for state in before)
        tokens = (before[0], q, cos, sin)
        keys = k.transpose(0, 2, 1, 3)
        losses, ids, gradient = chunked_losses(
            config, kernel, tokens, keys, with_gradient=with_gradient
        )
        if config.query_every == 1:
            kv = to_blocks(k, v, config.sparse.geometry.block_size)
            attention = cast(jax.Array, block_sparse_attention(q, kv, ids, positions))
        else:
            attention = causal_attention(q, k, v, positions)
        return (layer.finish(x, attention), (*before[1:], normed)), (losses, gradient)

    start = (x, (jnp.zeros_like(x),) * config.lookahead)
    _, out = lax.scan(body, start, (jnp.arange(len(kernels)), layers, kernels))
    return out


def chunked_losses(
    config: LossConfig,
    kernel: Float[Array, "D KH"],
    tokens: tuple[Array, ...],
    keys: Float[Array, "B K T H"],
    *,
    with_gradient: bool,
) -> tuple[Losses, Int[Array, "B K Q R"], Array]:
    """One layer's losses, the blocks that its teacher selects, and the gradient if asked for.

    Of all T tokens, the Q = T // query_every that are trained on.

    Args:
        config: see there.
        kernel: the projection's.
        tokens: per query token, `[B, T, ...]`: the normed state that the projection reads, queries
            of the layer it selects for, cos and sin.
        keys: of the layer it selects for.
        with_gradient: False: zeros.
    """
    batch, heads, count, _ = keys.shape
    every = config.query_every
    compressed, total = compress_keys(keys, config.sparse.geometry), count // every
    chunk = chunk_tokens(config, tokens[1], keys)
    chunks = -(-total // chunk)

    def split(rows: Array) -> Array:
        rows = rows[:, every - 1 :: every]
        widths = [(0, 0), (0, chunks * chunk - total)] + [(0, 0)] * (rows.ndim - 2)
        rows = jnp.pad(rows, widths).reshape(batch, chunks, chunk, *rows.shape[2:])
        return jnp.moveaxis(rows, 1, 0)

    def body(carry: Any, rows: Any) -> tuple[Any, Array]:
        normed, q, cos, sin, positions = rows
        seen = positions < count
        positions = jnp.minimum(positions, count - 1)
        target = teacher(config, q, keys, compressed, positions)
        blocks = target if config.target == "blocks" else by_block(config, target, count)
        ids = routing(config, blocks, positions)
        run = partial(chunk_loss, config, target=target, ids=ids, compressed=compressed)
        run = partial(run, length=count, rows=(normed, cos, sin, positions, seen))
        if with_gradient:
            (kl, counts), gradient = jax.value_and_grad(run, has_aux=True)(kernel)
        else:
            (kl, counts), gradient = run(kernel), jnp.zeros_like(kernel)
        return jax.tree.map(jnp.add, carry, (kl, *counts, gradient)), ids

    positions = every * jnp.arange(chunks * chunk, dtype=jnp.int32).reshape(chunks, 1, chunk)
    positions = jnp.broadcast_to(positions + every - 1, (chunks, batch, chunk))
    zero = jnp.zeros((), jnp.float32)
    start = (zero, zero, zero, jnp.zeros_like(kernel))
    carry, ids = lax.scan(body, start, (*map(split, tokens), positions))
    *losses, gradient = carry
    ids = jnp.moveaxis(ids, 0, 2).reshape(batch, heads, chunks * chunk, -1)[:, :, :total]
    return cast(Losses, tuple(losses)), ids, gradient


def chunk_tokens(
    config: LossConfig, q: Float[Array, "B T N H"], keys: Float[Array, "B K T H"]
) -> int:
    """Query tokens whose scores fit `chunk_bytes`, in chunks of about equal length."""
    batch, heads, count, _ = keys.shape
    scores = heads * config.sparse.geometry.num_compressed(count)
    if config.target == "blocks":
        scores = q.shape[2] * count
    total = count // config.query_every
    chunks = -(-total // max(1, config.chunk_bytes // (4 * batch * scores)))
    return -(-total // chunks)


def teacher(
    config: LossConfig,
    q: Float[Array, "B T N H"],
    keys: Float[Array, "B K S H"],
    compressed: Float[Array, "B K C H"],
    positions: Int[Array, "B T"],
) -> Float[Array, "B K T X"]:
    """What the query heads of each group attend, by window (not normalised) or by block (of 1)."""
    geometry = config.sparse.geometry
    if config.target == "blocks":
        size = geometry.block_size
        keys = jnp.pad(keys, ((0, 0), (0, 0), (0, -keys.shape[2] % size), (0, 0)))
        return block_mass(q, keys, positions, size) * (keys.shape[1] / q.shape[2])
    if config.teacher_stride == geometry.kernel_stride:
        visible = geometry.complete_windows(positions)
        return multi_head_scores(q, compressed, visible, scale=q.shape[-1] ** -0.5)
    return teacher_scores(
        q,
        keys,
        positions,
        geometry=geometry,
        fine_kernel=config.teacher_kernel,
        fine_stride=config.teacher_stride,
    )


def routing(
    config: LossConfig,
    scores: Float[Array, "B K T M"],
    positions: Int[Array, "B T"],
) -> Int[Array, "B K T R"]:
    """Blocks by their scores, under the policy's rules."""
    sparse = config.sparse
    return choose_blocks(
        scores,
        positions // sparse.geometry.block_size,
        init_blocks=sparse.init_blocks,
        local_blocks=sparse.local_blocks,
        budget=sparse.budget_blocks,
        mask_future=config.mask_future,
    ).ids


def by_block(
    config: LossConfig, scores: Float[Array, "B K T C"], length: int
) -> Float[Array, "B K T M"]:
    """Scores of the blocks of a sequence of `length` tokens from those of its windows."""
    geometry = config.sparse.geometry
    return pool_scores(scores, num_blocks=int(geometry.num_blocks(length)), geometry=geometry)


def predict(
    forecast: Float[Array, "B T K H"],
    compressed: Float[Array, "B K C H"],
    visible: Int[Array, "B T"],
) -> Float[Array, "B K T C"]:
    """Raw scores of the visible windows, -inf elsewhere; float32."""
    return forecast_scores(forecast, compressed, jnp.minimum(visible, compressed.shape[2]))


def chunk_loss(
    config: LossConfig,
    kernel: Array,
    *,
    target: Array,
    ids: Array,
    compressed: Array,
    rows: tuple[Array, ...],
    length: int,
) -> tuple[Array, tuple[Array, Array]]:
    """KL of a chunk, and how many of the teacher's free blocks there are and Forecast finds."""
    normed, cos, sin, positions, seen = rows
    sparse = config.sparse
    queries = project(kernel, normed, cos, sin)
    scores = predict(queries, compressed, sparse.geometry.started_windows(positions))
    pooled, scale = by_block(config, scores, length), queries.shape[-1] ** -0.5
    free = candidates(sparse, members(ids, pooled.shape[-1]), positions)
    if config.target == "blocks":
        turn = 1 + positions // config.query_every % max(1, sparse.local_blocks)
        wanted = candidates(sparse, jnp.ones_like(free), positions, turn)
        kl = block_divergence(target, pooled * scale, wanted)
    else:
        share = jax.nn.softmax(scores * scale, axis=-1)
        per_block = sparse.geometry.strides_per_block
        windows = jnp.repeat(free, per_block, axis=-1)[..., : share.shape[-1]]
        kl = divergence(target, share, windows, ids.shape[-1] * per_block)
    kl = jnp.where(seen[:, None], kl, 0.0).sum()
    free &= seen[:, None, :, None]
    chosen = routing(config, lax.stop_gradient(pooled), positions)
    found = free & members(chosen, pooled.shape[-1])
    return kl, (free.sum(dtype=jnp.float32), found.sum(dtype=jnp.float32))
