"""Training loss of block diffusion: cross entropy of masked tokens, seen from noisy copies.

    rows of a noisy copy attend their own block of that copy and all earlier clean blocks;
    clean rows attend clean blocks up to their own (`masks.training_mask`)

Several noisy copies share one clean copy: clean rows never see noisy ones. With a logit shift row
i-1 is scored against token i. `distil` adds KL(teacher || model), the teacher being the causal
model that the weights come from, on clean tokens: what it says of token i from all tokens before.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from sparda_jax.config import ModelConfig
from sparda_jax.diffusion.config import diffusion_of
from sparda_jax.diffusion.masks import training_mask
from sparda_jax.diffusion.noise import NoiseConfig, noisy_copies
from sparda_jax.models.attention import masked_attention
from sparda_jax.models.decoder import Decoder
from sparda_jax.models.rope import rope_at
from sparda_jax.typing import Array, Bool, Float, Int

Weighting = Literal["mean", "inverse_rate"]


@dataclasses.dataclass(frozen=True)
class BlockLossConfig:
    """What is learnt.

    Attributes:
        noise: which tokens are masked.
        weighting: "mean": over masked tokens (Fast-dLLM v2, LLaDA2); "inverse_rate": each
            divided by its mask rate, the sum by the number of all answer tokens (SDAR).
        distil: share of the teacher's KL in the loss, the rest being cross entropy; 0: no teacher.
        nearness: a token counts nearness ** (masked tokens before it in its block), with weighting
            "mean": below 1 what is decided next counts most.
        remat: compute each layer again in the backward pass instead of keeping its insides.
        chunk_rows: rows whose logits exist at a time.
    """

    noise: NoiseConfig = dataclasses.field(default_factory=NoiseConfig)
    weighting: Weighting = "mean"
    distil: float = 0.0
    nearness: float = 1.0
    remat: bool = True
    chunk_rows: int = 4096

    def __post_init__(self) -> None:
        if self.weighting not in get_args(Weighting):
            raise ValueError(f"unknown loss weighting {self.weighting!r}")
        if self.weighting == "inverse_rate" and self.noise.complementary:
            raise ValueError("complementary masks have no single rate: use weighting 'mean'")
        if not 0 < self.nearness <= 1:
            raise ValueError(f"nearness must be in (0, 1], got {self.nearness}")
        if self.nearness < 1 and self.weighting != "mean":
            raise ValueError(f"nearness {self.nearness} goes with weighting 'mean' alone")
        if not 0 <= self.distil <= 1:
            raise ValueError(f"distil must be in [0, 1], got {self.distil}")
        if self.chunk_rows < 1:
            raise ValueError(f"chunk_rows must be at least 1, got {self.chunk_rows}")

    @classmethod
    def of_family(cls, config: ModelConfig) -> BlockLossConfig:
        """What a family's authors publish."""
        if config.family == "sdar":
            return cls(NoiseConfig("sequence", complementary=False), "inverse_rate")
        if config.family == "llada2":
            return cls(NoiseConfig("sequence", 0.3, 0.8, 0.0, complementary=False))
        return cls()


def noisy_hidden(
    model: Decoder,
    noisy: Float[Array, "C B T D"],
    clean: Float[Array, "B T D"],
    *,
    remat: bool = False,
) -> Float[Array, "C B T D"]:
    """Hidden states of noisy copies of a window, next to their clean tokens.

    The same as `Decoder.hidden` under `training_mask` for each copy, but clean rows run once and no
    score between two noisy copies is computed.

    Args:
        model: parameters.
        noisy: embeddings of C noisy copies.
        clean: embeddings of the clean tokens.
        remat: see `BlockLossConfig`.
    """
    copies, batch, length, _ = noisy.shape
    facts, _ = diffusion_of(model.config)
    whole = training_mask(length, facts.block_size, causal_clean=facts.causal_clean)
    noisy_mask = jnp.asarray(whole[:length])
    clean_mask = jnp.asarray(whole[length:, length:])
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    cos, sin = rope_at(model.config.rope, positions, model.config.max_position_embeddings)
    cos, sin = (jnp.tile(rows, (copies + 1, 1, 1)) for rows in (cos, sin))
    x = jnp.concatenate([noisy.reshape(copies * batch, *noisy.shape[2:]), clean])
    at = copies * batch

    def run(layer: object, x: Array) -> Array:
        q, k, v = layer.qkv(x, cos, sin)  # type: ignore[attr-defined]
        seen_k, seen_v = (
            jnp.concatenate([rows[:at], jnp.tile(rows[at:], (copies, 1, 1, 1))], axis=1)
            for rows in (k, v)
        )
        attention = jnp.concatenate(
            [
                masked_attention(q[:at], seen_k, seen_v, noisy_mask),
                masked_attention(q[at:], k[at:], v[at:], clean_mask),
            ]
        )
        out: Array = layer.finish(x, attention)  # type: ignore[attr-defined]
        return out

    for layer in model.layers:
        step = lambda x, layer=layer: run(layer, x)
        x = jax.checkpoint(step)(x) if remat else step(x)
    return x[:at].reshape(noisy.shape)


def scored_rows(
    model: Decoder,
    hidden: Float[Array, "C B T D"],
    masked: Bool[Array, "C B T"],
) -> tuple[Float[Array, "B T D"], Bool[Array, "B T"], Int[Array, "B T"]]:
    """The row that predicts each token, which tokens are scored, and the masks before each.

    A token is scored once, in the copy that masks it and has the fewest masked tokens before it in
    its block. With two copies, the second being the complement, that is the one that masks it.
    """
    facts, _ = diffusion_of(model.config)
    if facts.logit_shift:  # token 0 has no row before it and is not scored
        hidden = jnp.concatenate([hidden[:, :, :1], hidden[:, :, :-1]], axis=2)
    place = jnp.arange(masked.shape[2])
    before = jnp.cumsum(masked, axis=2) - masked
    before -= before[:, :, place // facts.block_size * facts.block_size]
    before = jnp.where(masked, before, facts.block_size)
    copy = jnp.argmin(before, axis=0)
    rows = jnp.take_along_axis(hidden, copy[None, :, :, None], axis=0)[0]
    scored = jnp.any(masked, axis=0) & ((place > 0) | (not facts.logit_shift))
    return rows, scored, jnp.min(before, axis=0)


def cross_entropy(
    model: Decoder,
    rows: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    teacher: tuple[Decoder, Float[Array, "B T D"]] | None,
    chunk_rows: int,
) -> tuple[Array, Array, Array]:
    """Weighted sums of cross entropy and of KL(teacher || model), and of right argmaxes.

    Rows are worked through in chunks whose logits are not kept for the backward pass.

    Args:
        model: its norm and head.
        rows: hidden states before the final norm.
        targets: token of each row.
        weights: of each row; rows of weight 0 count for nothing.
        teacher: another model and its hidden states for the same rows; None: no KL.
        chunk_rows: rows at a time.
    """
    size = rows.shape[0] * rows.shape[1]
    chunk = min(chunk_rows, size)
    pad = -size % chunk

    def cut(array: Array) -> Array:
        flat = array.reshape(size, *array.shape[2:])
        padded = jnp.pad(flat, ((0, pad), *((0, 0),) * (flat.ndim - 1)))
        return padded.reshape(-1, chunk, *flat.shape[1:])

    @jax.checkpoint
    def add(sums: tuple, xs: tuple) -> tuple[tuple, None]:
        rows, target, weight, taught = xs
        logits = model.logits(rows[None])[0]
        total = jax.nn.logsumexp(logits, axis=-1)
        own = jnp.take_along_axis(logits, target[:, None], axis=1)[:, 0]
        entropy = jnp.sum(weight * (total - own))
        right = jnp.sum((weight > 0) * (own >= jnp.max(logits, axis=-1)))
        divergence = jnp.zeros((), jnp.float32)
        if taught is not None:
            assert teacher is not None
            wanted = jax.nn.log_softmax(lax.stop_gradient(teacher[0].logits(taught[None])[0]))
            gap = wanted - (logits - total[:, None])
            divergence = jnp.sum(weight * jnp.sum(jnp.exp(wanted) * gap, axis=-1))
        return tuple(a + b for a, b in zip(sums, (entropy, divergence, right), strict=True)), None

    taught = None if teacher is None else cut(teacher[1])
    zero = jnp.zeros((), jnp.float32)
    xs = (cut(rows), cut(targets), cut(weights), taught)
    (entropy, divergence, right), _ = lax.scan(add, (zero, zero, zero), xs)
    return entropy, divergence, right


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockLoss:
    """Figures of a batch.

    Attributes:
        entropy: cross entropy, weighted as configured, nats.
        divergence: KL(teacher || model), likewise; 0 without a teacher.
        scored: tokens scored.
        right: how many of them the model's first choice meets.
    """

    entropy: Array
    divergence: Array
    scored: Array
    right: Array


def block_diffusion_loss(
    model: Decoder,
    tokens: Int[Array, "B T"],
    masked: Bool[Array, "B T"],
    rate: Float[Array, "B T"],
    config: BlockLossConfig,
    *,
    editable: Bool[Array, "B T"] | None = None,
    mask_embedding: Float[Array, " D"] | None = None,
    teacher: Decoder | None = None,
) -> tuple[Array, BlockLoss]:
    """The loss of windows whose noise is given.

    Args:
        model: parameters to learn.
        tokens: clean.
        masked: of the (first) noisy copy.
        rate: mask rate of each token.
        config: what is learnt.
        editable: answer tokens; None: all. Others are never masked.
        mask_embedding: in place of the mask token's; None: the model's own.
        teacher: a causal model of the same tokens, for `config.distil`.
    """
    answer = jnp.ones(tokens.shape, bool) if editable is None else editable
    facts, mask_token_id = diffusion_of(model.config)
    copies = noisy_copies(masked, answer, facts.block_size, config.noise)
    clean = model.embed(tokens)
    vector = (
        model.embed(jnp.full((1, 1), mask_token_id))
        if mask_embedding is None
        else mask_embedding.astype(clean.dtype)
    )
    noisy = jnp.stack([jnp.where(hidden[..., None], vector, clean) for hidden in copies])
    hidden = noisy_hidden(model, noisy, clean, remat=config.remat)
    rows, scored, before = scored_rows(model, hidden, copies)
    scored &= answer
    count = jnp.maximum(jnp.sum(scored), 1)
    weights = scored / count
    if config.nearness < 1:
        weights = jnp.where(scored, config.nearness**before, 0.0)
        weights /= jnp.maximum(jnp.sum(weights), 1.0)
    if config.weighting == "inverse_rate":
        weights = scored / rate / jnp.maximum(jnp.sum(answer), 1)
    taught = None
    if config.distil:
        if teacher is None:
            raise ValueError(f"distil {config.distil} needs a teacher")
        # The teacher's row before a token predicts it, whatever the model's own convention.
        seen = lax.stop_gradient(teacher.hidden(tokens))
        taught = (teacher, jnp.concatenate([seen[:, :1], seen[:, :-1]], axis=1))
    entropy, divergence, right = cross_entropy(
        model, rows, tokens, weights, taught, config.chunk_rows
    )
    value = (1 - config.distil) * entropy + config.distil * divergence
    return value, BlockLoss(entropy, divergence, count.astype(jnp.float32), right)
