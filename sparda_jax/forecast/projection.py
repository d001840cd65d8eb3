"""The Forecast projections: from layer l's hidden state to the blocks of layer l+1.

    F_l = RoPE(u_l W_l),    u_l = norm(x_l), the input of layer l's q, k and v

One head per KV head, no bias, no norm, RoPE at the current position; F_l is scored against the
compressed keys of layer l+1. Layer 0 has a second projection for its own blocks (SparDA, sec. 3;
spec/sparda.md, sec. 4).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from sparda_jax.config import ModelConfig
from sparda_jax.models.rope import apply_rope
from sparda_jax.typing import Array, Float


def project(
    kernel: Float[Array, "D KH"],
    normed: Float[Array, "B T D"],
    cos: Float[Array, "B T H"],
    sin: Float[Array, "B T H"],
) -> Float[Array, "B T K H"]:
    """`RoPE(normed @ kernel)`, in the wider dtype of the two: float32 with master weights."""
    out = normed @ kernel
    return apply_rope(out.reshape(*out.shape[:2], -1, cos.shape[-1]), cos, sin)


class ForecastLayer(nnx.Module):
    """One projection D -> K*H.

    Attributes:
        kernel: `[D, K*H]`, drawn from U(-1/sqrt(D), 1/sqrt(D)) as in the public code.
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        shape = (config.hidden_size, config.num_kv_heads * config.head_dim)
        bound = config.hidden_size**-0.5
        self.kernel = nnx.Param(
            jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound).astype(dtype)
        )

    def __call__(
        self, normed: Float[Array, "B T D"], cos: Float[Array, "B T H"], sin: Float[Array, "B T H"]
    ) -> Float[Array, "B T K H"]:
        """Forecast queries after RoPE.

        Args:
            normed: `layer.attention_norm(x)`.
            cos: RoPE rows of the tokens' own positions.
            sin: likewise.
        """
        return project(self.kernel[...], normed, cos, sin)


class Forecast(nnx.Module):
    """The projections of a whole model; parameters only, next to a frozen `Decoder`.

    Attributes:
        first: layer 0's own, selects the blocks of layer 0.
        layers: L of them; `layers[l]` runs in layer l and selects the blocks of layer l+1. The
            last one is never used: published weights have it.
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.first = ForecastLayer(config, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [ForecastLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)]
        )

    @classmethod
    def random(
        cls, config: ModelConfig, *, seed: int = 0, dtype: DTypeLike = jnp.float32
    ) -> Forecast:
        """Untrained projections for a model of this shape."""
        return cls(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(seed))

    def for_layer(self, index: int) -> ForecastLayer:
        """The projection that selects the blocks of layer `index`; it runs one layer earlier."""
        return self.first if index == 0 else self.layers[index - 1]


def parameter_count(module: nnx.Module) -> int:
    """Parameters of a module, abstract ones too (`nnx.eval_shape`)."""
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(module, nnx.Param)))
