"""Distillation of the Forecast projections: KL to what the model's own queries attend.

For layer l and KV head k, query token t (SparDA, sec. 3; spec/sparda.md, sec. 5; float32 here):

    T[i]  teacher: attention mass of the layer's G query heads on fine keys, the largest of each
          window i (`pallas_kernels.teacher_scores`), divided by its sum
    P[i]  softmax_i(F_{l-1}[t, k] . c[k, i] / sqrt(H)) over the windows that start at or before t
    loss  KL(T || P) over the windows of the blocks that T selects, forced blocks aside, and one
          rest bucket for everything else; mean over heads and tokens, summed over layers

The forward pass attends the blocks that T selects. Gradients reach the Forecast kernels only: the
backbone runs once, forward.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.block_selection.reference import (
    choose_blocks,
    forecast_scores,
    multi_head_scores,
    pool_scores,
)
from pallas_kernels.block_sparse_attention import block_sparse_attention
from pallas_kernels.compressed_keys import compress_keys
from pallas_kernels.teacher_scores import teacher_scores
from sparda_jax.config import SparseConfig
from sparda_jax.forecast.projection import Forecast, project
from sparda_jax.models.decoder import Decoder
from sparda_jax.models.rope import rope_at
from sparda_jax.sparse.infllm_v2 import to_blocks
from sparda_jax.typing import Array, Bool, Float, Int

# Added to sums and put under logarithms, as in the public code.
EPSILON = 1e-8


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
        chunk_bytes: bound on one float32 array of scores, `[B, K, tokens, C]`. About ten are alive.
    """

    sparse: SparseConfig = dataclasses.field(default_factory=SparseConfig)
    teacher_kernel: int = 2
    teacher_stride: int = 1
    mask_future: bool = True
    chunk_bytes: int = 64 << 20

    def __post_init__(self) -> None:
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
    """Loss and what to watch beside it.

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
    x, source, parts = model.embed(tokens), None, []
    for index, layer in enumerate(model.layers):
        normed = layer.attention_norm(x)
        q, k, v = layer.qkv(x, cos, sin)
        kernel = forecast.for_layer(index).kernel[...]
        # Layer l's projection saw the hidden state of layer l-1; layer 0's own sees layer 0's.
        operands = (normed if source is None else source, q, k.transpose(0, 2, 1, 3), cos, sin)
        kl, ids, free, recalled = layer_loss(config, kernel, operands)
        parts.append((kl / (batch * count * k.shape[2]), free, recalled))
        kv = to_blocks(k, v, geometry.block_size)
        attention = cast(jax.Array, block_sparse_attention(q, kv, ids, positions))
        source = normed
        x = layer.finish(x, attention)
    per_layer, free, recalled = (jnp.stack(part) for part in zip(*parts, strict=True))
    return per_layer.sum(), LossOutput(lax.stop_gradient(per_layer), free, recalled)


# normed [B, T, D] of the projection's layer; q [B, T, N, H], keys [B, K, T, H] of the layer it
# selects for; cos, sin [B, T, H].
Operands = tuple[Array, Array, Array, Array, Array]
Losses = tuple[Array, Array, Array, Array]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def layer_loss(config: LossConfig, kernel: Float[Array, "D KH"], operands: Operands) -> Losses:
    """One layer's KL, summed over heads and tokens, and the blocks that its teacher selects.

    The gradient of the kernel is formed chunk by chunk in the forward pass, so that no score
    outlives its chunk, the teacher is computed once, and `[D, K*H]` is all that waits for the
    backward pass.

    Args:
        config: see there.
        kernel: the projection's.
        operands: see `Operands`; they get no gradient.

    Returns:
        KL `[]`; ids `[B, K, T, R]`; free and recalled blocks, `[]` each, see `LossOutput`.
    """
    losses, _ = _over_chunks(config, kernel, operands, with_gradient=False)
    return losses


def _forward(config: LossConfig, kernel: Array, operands: Operands) -> tuple[Losses, Array]:
    return _over_chunks(config, kernel, operands, with_gradient=True)


def _backward(config: LossConfig, gradient: Array, cotangents: Losses) -> tuple[Array, None]:
    return gradient * cotangents[0], None


layer_loss.defvjp(_forward, _backward)


def _over_chunks(
    config: LossConfig, kernel: Array, operands: Operands, *, with_gradient: bool
) -> tuple[Losses, Array]:
    """Loss and, if asked for, its gradient, over chunks of query tokens."""
    normed, q, keys, cos, sin = operands
    batch, heads, count, _ = keys.shape
    compressed = compress_keys(keys, config.sparse.geometry)
    per_token = 4 * batch * heads * compressed.shape[2]
    chunk = min(count, max(1, config.chunk_bytes // per_token))
    chunks = -(-count // chunk)

    def split(rows: Array) -> Array:
        widths = [(0, 0), (0, chunks * chunk - count)] + [(0, 0)] * (rows.ndim - 2)
        rows = jnp.pad(rows, widths).reshape(batch, chunks, chunk, *rows.shape[2:])
        return jnp.moveaxis(rows, 1, 0)

    def body(carry: Any, rows: Any) -> tuple[Any, Array]:
        normed, q, cos, sin, positions = rows
        seen = positions < count
        positions = jnp.minimum(positions, count - 1)
        target = teacher(config, q, keys, compressed, positions)
        ids = routing(config, target, positions, count)
        run = partial(_chunk_loss, config, target=target, ids=ids, compressed=compressed)
        run = partial(run, length=count, rows=(normed, cos, sin, positions, seen))
        if with_gradient:
            (kl, counts), gradient = jax.value_and_grad(run, has_aux=True)(kernel)
        else:
            (kl, counts), gradient = run(kernel), jnp.zeros_like(kernel)
        return jax.tree.map(jnp.add, carry, (kl, *counts, gradient)), ids

    positions = jnp.broadcast_to(
        jnp.arange(chunks * chunk, dtype=jnp.int32), (batch, chunks * chunk)
    )
    positions = jnp.moveaxis(positions.reshape(batch, chunks, chunk), 1, 0)
    zero = jnp.zeros((), jnp.float32)
    carry, ids = lax.scan(
        body,
        (zero, zero, zero, jnp.zeros_like(kernel)),
        (split(normed), split(q), split(cos), split(sin), positions),
    )
    kl, free, recalled, gradient = carry
    ids = jnp.moveaxis(ids, 0, 2).reshape(batch, heads, chunks * chunk, -1)[:, :, :count]
    return (kl, ids, free, recalled), gradient


def teacher(
    config: LossConfig,
    q: Float[Array, "B T N H"],
    keys: Float[Array, "B K S H"],
    compressed: Float[Array, "B K C H"],
    positions: Int[Array, "B T"],
) -> Float[Array, "B K T C"]:
    """What the query heads of each group attend, by window; not normalised."""
    geometry = config.sparse.geometry
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
    scores: Float[Array, "B K T C"],
    positions: Int[Array, "B T"],
    length: int,
) -> Int[Array, "B K T R"]:
    """Blocks of a sequence of `length` tokens by scores of windows, under the policy's rules."""
    sparse = config.sparse
    blocks = int(sparse.geometry.num_blocks(length))
    return choose_blocks(
        pool_scores(scores, num_blocks=blocks, geometry=sparse.geometry),
        positions // sparse.geometry.block_size,
        init_blocks=sparse.init_blocks,
        local_blocks=sparse.local_blocks,
        budget=sparse.budget_blocks,
        mask_future=config.mask_future,
    ).ids


def predict(
    forecast: Float[Array, "B T K H"],
    compressed: Float[Array, "B K C H"],
    visible: Int[Array, "B T"],
) -> Float[Array, "B K T C"]:
    """Raw scores of the visible windows, -inf elsewhere; float32."""
    return forecast_scores(forecast, compressed, jnp.minimum(visible, compressed.shape[2]))


def candidates(
    sparse: SparseConfig, ids: Int[Array, "B K T R"], positions: Int[Array, "B T"]
) -> Bool[Array, "B K T R"]:
    """Which selected blocks no rule forced."""
    own = (positions // sparse.geometry.block_size)[:, None, :, None]
    return (ids >= sparse.init_blocks) & (ids < own - sparse.local_blocks)


def partition(
    share: Float[Array, "B K T C"],
    ids: Int[Array, "B K T R"],
    free: Bool[Array, "B K T R"],
    per_block: int,
) -> Float[Array, "B K T X"]:
    """The windows of the free blocks and a rest bucket, X = R * per_block + 1; sums to 1.

    Args:
        share: weights of all windows; divided by their sum here.
        ids: selected blocks.
        free: which of them count; the places of the others hold next to nothing.
        per_block: windows that begin in one block.
    """
    share = share / (share.sum(-1, keepdims=True) + EPSILON)
    window = ids[..., None] * per_block + jnp.arange(per_block, dtype=jnp.int32)
    window = jnp.clip(window, 0, share.shape[-1] - 1).reshape(*ids.shape[:3], -1)
    parts = jnp.take_along_axis(share, window, axis=-1)
    parts = jnp.where(jnp.repeat(free, per_block, axis=-1), parts, 0.0)
    rest = jnp.maximum(share.sum(-1, keepdims=True) - parts.sum(-1, keepdims=True), 0.0)
    parts = jnp.maximum(jnp.concatenate([parts, rest], axis=-1), EPSILON)
    return parts / parts.sum(-1, keepdims=True)


def _chunk_loss(
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
    share = jax.nn.softmax(scores * queries.shape[-1] ** -0.5, axis=-1)
    free = candidates(sparse, ids, positions)
    per_block = sparse.geometry.strides_per_block
    wanted = partition(target, ids, free, per_block)
    got = partition(share, ids, free, per_block)
    kl = (wanted * (jnp.log(wanted) - jnp.log(got))).sum(-1)
    kl = jnp.where(seen[:, None], kl, 0.0).sum()
    free &= seen[:, None, :, None]
    chosen = routing(config, lax.stop_gradient(scores), positions, length)
    found = (ids[..., :, None] == chosen[..., None, :]).any(-1) & free
    return kl, (free.sum(dtype=jnp.float32), found.sum(dtype=jnp.float32))
