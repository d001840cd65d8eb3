"""InfiniGen's selection: the next layer's queries guessed from this layer's input, on few channels.

Layer l applies layer l+1's query projection to its own normed input and scores the guess against a
partial key cache, E of H channels, that stays on the device (InfiniGen, as SparDA compares with it;
spec/sparda.md, sec. 7). Layer 0 selects by its own queries.

    score[k, t, s] = sum over the G heads n of group k of q~[t, n] . k~[s] / sqrt(E)
    q~ = q A[k],   k~ = k A[k],   A^T A = 1

A token's score depends on the sum of its group's queries only, and a term that all tokens share
orders none of them. So A is calibrated on summed queries and centred keys of real text: the right
singular vectors of both stacked, each scaled to the same total variance, E largest first. Without
that scale the keys, which are longer, decide alone. This construction was picked among several
(queries or keys alone, balanced truncation) by the attention mass that its blocks hold;
`scripts/benchmark.py quality` measures it beside the other policies.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.block_selection import Selection, choose_blocks
from pallas_kernels.chunking import map_chunks
from sparda_jax.config import SparseConfig
from sparda_jax.models.attention import causal_attention
from sparda_jax.models.decoder import Decoder, DecoderLayer
from sparda_jax.models.rope import rope_at
from sparda_jax.sparse.nosa import selection_width
from sparda_jax.typing import Array, Bool, Float, Int

# Bound on one chunk of float32 token scores, [B, K, T, S].
CHUNK_BYTES = 64 << 20
# Fewer calibration tokens than this per channel leave the second moments to chance.
TOKENS_PER_CHANNEL = 8

# A of one layer: float32[K, H, E], orthonormal columns, the channels that matter most first.
Skew = Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InfiniGen:
    """Calibrated skews of a whole model.

    Attributes:
        layers: L of them. Layer 0's is never used: it selects by its own queries.
    """

    layers: tuple[Skew, ...]

    @property
    def channels(self) -> int:
        """E."""
        return int(self.layers[0].shape[2])


def calibrate(
    model: Decoder,
    tokens: Int[Array, "B T"],
    *,
    channels: int | None = None,
    max_length: int | None = None,
) -> InfiniGen:
    """Skews from the queries and keys of a dense forward over real text, all positions alike.

    One layer at a time; what is held are the hidden states of all tokens.

    Args:
        model: the decoder.
        tokens: whole rows of text, no padding; some thousand tokens in all.
        channels: E; None: a quarter of H, as published (32 of 128).
        max_length: as in `Decoder.__call__`.

    Raises:
        ValueError: `channels` outside 1 .. H; rows longer than `max_length`; too little text.
    """
    config = model.config
    width = config.head_dim
    channels = max(1, width // 4) if channels is None else channels
    if not 1 <= channels <= width:
        raise ValueError(f"channels must be in 1 .. {width} (the head dim), got {channels}")
    batch, count = tokens.shape
    limit = config.max_position_embeddings if max_length is None else max_length
    if count > limit:
        raise ValueError(f"{count} tokens exceed the maximum length of {limit}")
    least = TOKENS_PER_CHANNEL * width
    if batch * count < least:
        raise ValueError(
            f"{batch * count} tokens of calibration text: at least {least} are needed "
            f"({TOKENS_PER_CHANNEL} per channel)"
        )
    positions = jnp.arange(count, dtype=jnp.int32)[None]
    cos, sin = jax.jit(partial(rope_at, config.rope, length=limit))(positions)
    run = jax.jit(layer_moments)
    x, layers = model.embed(tokens), []
    for layer in model.layers:
        x, (query, key) = run(layer, x, cos, sin)
        layers.append(orthogonal_skew(np.asarray(query), np.asarray(key), channels))
    return InfiniGen(tuple(layers))


def layer_moments(
    layer: DecoderLayer,
    x: Float[Array, "B T D"],
    cos: Float[Array, "1 T H"],
    sin: Float[Array, "1 T H"],
) -> tuple[Float[Array, "B T D"], tuple[Float[Array, "K H H"], Float[Array, "K H H"]]]:
    """One dense layer; E[q q^T] of summed queries and Cov(k), after RoPE, over all tokens.

    Args:
        layer: its parameters.
        x: hidden states; rows are worked through one after the other.
        cos: RoPE rows of positions 0 .. T-1.
        sin: likewise.
    """
    batch, count, _ = x.shape
    positions = jnp.arange(count, dtype=jnp.int32)[None]

    def row(x: Array) -> tuple[Array, tuple[Array, Array, Array]]:
        q, k, v = layer.qkv(x[None], cos, sin)
        attention = causal_attention(q, k, v, positions)
        summed, wide = group_sum(q, k.shape[2])[0], k[0].astype(jnp.float32)
        product = partial(jnp.einsum, "tkh,tki->khi", precision="highest")
        moments = product(summed, summed), product(wide, wide), wide.sum(0)
        return layer.finish(x[None], attention)[0], moments

    x, moments = jax.lax.map(row, x)
    query, key, total = (part.sum(0) / (batch * count) for part in moments)
    return x, (query, key - total[:, :, None] * total[:, None, :])


def orthogonal_skew(
    query: Float[np.ndarray, "K H H"], key: Float[np.ndarray, "K H H"], channels: int
) -> Skew:
    """The E directions of every head along which queries and keys vary most; see the module.

    Args:
        query: E[q q^T] of summed queries.
        key: Cov(k).
        channels: E.
    """
    # The right singular vectors of stacked rows are the eigenvectors of the sum of their moments.
    total = sum(
        moment.astype(np.float64) / np.trace(moment, axis1=1, axis2=2)[:, None, None]
        for moment in (query, key)
    )
    _, vectors = np.linalg.eigh(total)  # ascending
    return jnp.asarray(vectors[:, :, ::-1][:, :, :channels], jnp.float32)


def group_sum(q: Float[Array, "B T N E"], num_kv_heads: int) -> Float[Array, "B T K E"]:
    """Queries summed over the heads of each group, in float32."""
    return q.astype(jnp.float32).reshape(*q.shape[:2], num_kv_heads, -1, q.shape[3]).sum(3)


def partial_keys(k: Float[Array, "B K S H"], skew: Skew) -> Float[Array, "B K S E"]:
    """`k A`, in the dtype of the keys: what is cached on the device.

    Args:
        k: keys after RoPE.
        skew: of the keys' own layer.
    """
    return jnp.einsum("bksh,khe->bkse", k.astype(jnp.float32), skew).astype(k.dtype)


def speculate(
    next_layer: DecoderLayer,
    skew: Skew,
    normed: Float[Array, "B T D"],
    cos: Float[Array, "B T H"],
    sin: Float[Array, "B T H"],
) -> Float[Array, "B T N E"]:
    """The next layer's queries on the kept channels, guessed one layer early.

    Args:
        next_layer: the layer whose blocks are to be selected.
        skew: that layer's.
        normed: this layer's `attention_norm(x)`.
        cos: RoPE rows of the tokens' own positions.
        sin: likewise.
    """
    q = next_layer.query(normed, cos, sin)
    batch, count, heads, width = q.shape
    groups = q.astype(jnp.float32).reshape(batch, count, skew.shape[0], -1, width)
    out = jnp.einsum("btkgh,khe->btkge", groups, skew)
    return out.reshape(batch, count, heads, -1).astype(q.dtype)


def token_block_scores(
    query: Float[Array, "B T N E"],
    partial_cache: Float[Array, "B K S E"],
    visible: Int[Array, "B T"],
    num_blocks: int,
    block_size: int,
) -> Float[Array, "B K T M"]:
    """The largest token score of every block; -inf where no token of it is visible.

    Of size T x S: callers take chunks of T.

    Args:
        query: speculative queries.
        partial_cache: partial keys; S may be less than M*P.
        visible: number of tokens that each query scores, from the first on.
        num_blocks: M.
        block_size: P.
    """
    batch, heads, count, channels = partial_cache.shape
    summed = group_sum(query, heads) * channels**-0.5
    scores = jnp.einsum("btke,bkse->bkts", summed, partial_cache.astype(jnp.float32))
    token = jnp.arange(count, dtype=jnp.int32)
    scores = jnp.where(token < visible[:, None, :, None], scores, -jnp.inf)
    room = num_blocks * block_size
    scores = jnp.pad(
        scores[..., :room],
        ((0, 0), (0, 0), (0, 0), (0, max(room - count, 0))),
        constant_values=-jnp.inf,
    )
    return scores.reshape(batch, heads, -1, num_blocks, block_size).max(-1)


def select_infinigen(
    query: Float[Array, "B T N E"],
    partial_cache: Float[Array, "B K S E"],
    positions: Int[Array, "B T"],
    visible: Int[Array, "B T"],
    sparse: SparseConfig,
    num_blocks: int,
    *,
    dense: Bool[Array, " B"] | None = None,
) -> Selection:
    """Blocks of every token from its speculative query, token by token of the partial cache.

    Args:
        query: see `speculate`.
        partial_cache: of the layer that is selected for; see `partial_keys`.
        positions: absolute positions of the tokens.
        visible: cached tokens that each query scores, from the first on. In decode those before
            this step, in a prompt those up to the query: the same selection, since its own block
            is forced.
        sparse: the policy; its grid of compressed keys plays no part.
        num_blocks: M, blocks that the cache can hold.
        dense: rows that select all their blocks; None: none.

    Returns:
        ids `[B, K, T, R]` with R = `selection_width`, and counts.
    """
    size = sparse.geometry.block_size

    def select(query: Array, positions: Array, visible: Array) -> tuple[Array, Array]:
        chosen = choose_blocks(
            token_block_scores(query, partial_cache, visible, num_blocks, size),
            positions // size,
            init_blocks=sparse.init_blocks,
            local_blocks=sparse.local_blocks,
            budget=sparse.budget_blocks,
            width=selection_width(sparse, num_blocks),
            dense=dense,
        )
        return chosen.ids, chosen.count

    per_token = 4 * int(np.prod(partial_cache.shape[:3]))
    chunk = max(1, CHUNK_BYTES // per_token)
    ids, count = map_chunks(
        select, chunk, (query, positions, visible), axes=(1, 1, 1), out_axes=(2, 2)
    )
    return Selection(ids=ids, count=count)
