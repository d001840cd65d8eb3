"""One decoder for every family of `ModelConfig`: parameters and the formulas, no cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from sparda_jax.config import ModelConfig, SparseConfig
from sparda_jax.models.attention import dense_attention, masked_attention
from sparda_jax.models.layers import MLP, Importance, Linear, RMSNorm
from sparda_jax.models.moe import MoE
from sparda_jax.models.rope import apply_rope, rope_at
from sparda_jax.sharding import MODEL, gather_over_model, part_number, sum_over
from sparda_jax.sparse.infllm_v2 import sparse_attention
from sparda_jax.typing import Array, Bool, Float, Int


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP; whoever calls it computes the attention in between.

        q, k, v = layer.qkv(x, cos, sin)
        x = layer.finish(x, attention(q, k, v))

    Attributes:
        config: the model's.
        attention_norm: before q, k, v.
        q: D -> N*H.
        k: D -> K*H.
        v: D -> K*H.
        o: N*H -> D.
        q_norm: over H, or None.
        k_norm: over H, or None.
        importance: of keys, from their values (NOSA), or None.
        mlp_norm: before the MLP.
        mlp: SwiGLU, or a mixture of experts.
    """

    def __init__(self, config: ModelConfig, index: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        size, eps = config.hidden_size, config.rms_norm_eps
        wide, narrow = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        make: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.config = config
        self.attention_norm = RMSNorm(size, eps, dtype=dtype)
        self.q = Linear(size, wide, bias=config.qkv_bias, **make)
        self.k = Linear(size, narrow, bias=config.qkv_bias, **make)
        self.v = Linear(size, narrow, bias=config.qkv_bias, **make)
        self.o = Linear(wide, size, bias=config.output_bias, **make, split=True)
        self.q_norm = RMSNorm(config.head_dim, eps, dtype=dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, eps, dtype=dtype) if config.qk_norm else None
        heads = (config.num_kv_heads, config.head_dim)
        self.importance = Importance(*heads, rngs=rngs) if config.kv_importance else None
        self.mlp_norm = RMSNorm(size, eps, dtype=dtype)
        dense = config.moe is None or index < config.moe.dense_layers
        self.mlp: MLP | MoE = (
            MLP(size, config.intermediate_size, bias=config.mlp_bias, **make)
            if dense or config.moe is None
            else MoE(size, config.moe, **make)
        )

    def qkv(
        self, x: Float[Array, "B T D"], cos: Float[Array, "B T H"], sin: Float[Array, "B T H"]
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Norm, projections, per-head norm (Qwen3) and RoPE."""
        normed = self.attention_norm(x)
        k, v = self._heads(self.k(normed)), self._heads(self.v(normed))
        if self.k_norm is not None:
            k = self.k_norm(k)
        return self.query(normed, cos, sin), apply_rope(k, cos, sin), v

    def query(
        self, normed: Float[Array, "B T D"], cos: Float[Array, "B T H"], sin: Float[Array, "B T H"]
    ) -> Float[Array, "B T N H"]:
        """The queries alone, of a hidden state that is normed already."""
        q = self._heads(self.q(normed))
        if self.q_norm is not None:
            q = self.q_norm(q)
        return apply_rope(q, cos, sin)

    def key_bias(self, v: Float[Array, "B T K H"]) -> Float[Array, "B T K"] | None:
        """What attention adds to the scores of each key, from its value (NOSA), or None."""
        return None if self.importance is None else self.importance(v)

    def finish(
        self, x: Float[Array, "B T D"], attention: Float[Array, "B T N H"]
    ) -> Float[Array, "B T D"]:
        """Output projection and MLP, each added to the residual with the family's scale."""
        x = self._add(x, self.o(attention.reshape(*attention.shape[:2], -1)))
        return self._add(x, self.mlp(self.mlp_norm(x)))

    def _heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:2], -1, self.config.head_dim)

    def _add(self, x: Array, branch: Array) -> Array:
        scale = self.config.residual_scale
        return x + (branch if scale == 1.0 else branch * scale)


class Decoder(nnx.Module):
    """A decoder-only language model. Computes in the dtype of its weights.

    `nnx.eval_shape(lambda: Decoder.random(config))` shapes a model without memory.

    Attributes:
        config: shape and arithmetic; static.
        embedding: `[V, D]`; also the head where that is tied.
        layers: L of them.
        final_norm: before the head.
        head: D -> V, or None where tied.
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        if config.tie_word_embeddings is None:
            raise ValueError("tie_word_embeddings is not stated: the loader or the caller decides")
        size, vocab = config.hidden_size, config.vocab_size
        self.config = config
        # Scaled so that x0 has unit variance whatever the family multiplies it by.
        scale = jnp.asarray(1 / config.embedding_scale, dtype)
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), (vocab, size), dtype) * scale)
        self.layers = nnx.List(
            [DecoderLayer(config, i, dtype=dtype, rngs=rngs) for i in range(config.num_layers)]
        )
        self.final_norm = RMSNorm(size, config.rms_norm_eps, dtype=dtype)
        self.head = (
            None
            if config.tie_word_embeddings
            else Linear(size, vocab, bias=False, dtype=dtype, rngs=rngs)
        )

    @classmethod
    def random(
        cls, config: ModelConfig, *, seed: int = 0, dtype: DTypeLike = jnp.float32
    ) -> Decoder:
        """A model with random weights of unit gain, for tests and benchmarks."""
        return cls(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(seed))

    @property
    def dtype(self) -> jnp.dtype:
        """Of weights, activations and cache."""
        return self.embedding.dtype

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Embeddings times the family's scale."""
        # On several devices each has some rows, and zeros stand for the others'.
        rows = self.embedding.shape[0]
        local = tokens - part_number(MODEL) * rows
        x = jnp.take(self.embedding[...], local, axis=0, mode="clip")
        if rows < self.config.vocab_size:
            here = (local >= 0) & (local < rows)
            x = sum_over(jnp.where(here[..., None], x, 0), MODEL)
        scale = self.config.embedding_scale
        return x if scale == 1.0 else x * scale

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Final norm, the family's divisor and the head; float32."""
        x = self.final_norm(x)
        if self.config.logit_divisor != 1.0:
            x = x / self.config.logit_divisor
        if self.head is not None:
            out = jnp.matmul(x, self.head.kernel[...], preferred_element_type=jnp.float32)
            return gather_over_model(out, 2)
        # V-major first: the other order is the slow matrix-vector product of `Linear`'s note.
        out = jnp.einsum("vd,btd->vbt", self.embedding[...], x, preferred_element_type=jnp.float32)
        return gather_over_model(out.transpose(1, 2, 0), 2)

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        lengths: Int[Array, " B"] | None = None,
        sparse: SparseConfig | None = None,
        mask: Bool[Array, "*B T T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        max_length: int | None = None,
    ) -> Float[Array, "B T D"]:
        """Hidden states after the last layer, before the final norm; see `__call__`."""
        batch, count = tokens.shape
        limit = self.config.max_position_embeddings if max_length is None else max_length
        if positions is None:
            if count > limit:
                raise ValueError(f"{count} tokens exceed the maximum length of {limit}")
            positions = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (batch, count))
        elif sparse is not None:
            raise ValueError("block selection needs positions 0 to T-1: leave `positions` out")
        if mask is not None and (lengths is not None or sparse is not None):
            raise ValueError("`mask` says what is attended: leave `lengths` and `sparse` out")
        if mask is not None and self.config.kv_importance:
            raise NotImplementedError("a mask with NOSA's importance bias is not supported")
        cos, sin = rope_at(self.config.rope, positions, limit)
        x = self.embed(tokens)
        for layer in self.layers:
            q, k, v = layer.qkv(x, cos, sin)
            bias = layer.key_bias(v)
            if mask is not None:
                attention = masked_attention(q, k, v, mask)
            elif sparse is None:
                attention = dense_attention(q, k, v, lengths, bias)
            else:
                attention = sparse_attention(q, k, v, positions, lengths, sparse, bias)
            x = layer.finish(x, attention)
        return x

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        lengths: Int[Array, " B"] | None = None,
        sparse: SparseConfig | None = None,
        mask: Bool[Array, "*B T T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        max_length: int | None = None,
    ) -> Float[Array, "B T V"]:
        """Whole-sequence forward without a cache, for use inside the caller's own jit.

        Args:
            tokens: token ids, padded at the end where sequences differ in length.
            lengths: valid tokens per row; None: all. Logits past them mean nothing.
            sparse: select blocks as InfLLM-V2 does; None: dense attention.
            mask: which tokens (last axis) each token attends, for one sequence or each; None:
                causal. Every token must attend one.
            positions: for RoPE; None: 0 to T-1. The attention stays causal by row, not position.
            max_length: the requested maximum length, which fixes LongRoPE's factors; None: what
                the model declares. Static.

        Raises:
            ValueError: more tokens than `max_length`; arguments that exclude each other.
        """
        return self.logits(
            self.hidden(
                tokens,
                lengths=lengths,
                sparse=sparse,
                mask=mask,
                positions=positions,
                max_length=max_length,
            )
        )
