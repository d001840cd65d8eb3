"""Linear map, RMSNorm and the gated MLP: parameters and the plain formulas."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from sparda_jax.sharding import MODEL, gather_over_model, sum_over
from sparda_jax.typing import Array, Float


class Linear(nnx.Module):
    """`x @ kernel + bias`, kernel `[in, out]`.

    `[in, out]` because XLA:CPU's matrix-vector product is 4x slower with `[out, in]` on jax 0.11.2
    (measured: 14.8 ms against 3.4 for 49152 x 576, float32).

    Attributes:
        kernel: `[in, out]`.
        bias: `[out]` or None.
        split: on several devices the inputs are what is split, and the products are summed.
    """

    def __init__(
        self,
        size: int,
        out: int,
        *,
        bias: bool,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        split: bool = False,
    ):
        scale = jnp.asarray(size**-0.5, dtype)
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (size, out), dtype) * scale)
        self.bias = nnx.Param(jnp.zeros((out,), dtype)) if bias else None
        self.split = split

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows F"]:
        """Applies the map over the last axis."""
        out = x @ self.kernel[...]
        out = sum_over(out, MODEL) if self.split else out
        return out if self.bias is None else out + self.bias[...]


class RMSNorm(nnx.Module):
    """`x / sqrt(mean(x^2) + eps) * scale`; the variance in float32, the product in x's dtype.

    The normed value is cast back before it meets the weight, as the published models do
    (spec/sparda.md, sec. 1.3).
    """

    def __init__(self, size: int, eps: float, *, dtype: jnp.dtype):
        self.scale = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Normalises the last axis."""
        wide = x.astype(jnp.float32)
        variance = jnp.mean(wide * wide, axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(variance + self.eps)).astype(x.dtype) * self.scale[...]


class Importance(nnx.Module):
    """NOSA's query-agnostic importance: `scale * softplus(delta v)`, v all KV heads' values.

    In float32 whatever the model's dtype: it is added to attention scores (spec/sparda.md, sec. 2).

    Attributes:
        scale: `[K]`, the published A.
        delta: K*H -> K.
    """

    def __init__(self, heads: int, width: int, *, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.ones((heads,)))
        self.delta = Linear(
            heads * width, heads, bias=False, dtype=jnp.dtype(jnp.float32), rngs=rngs
        )

    def __call__(self, v: Float[Array, "B T K H"]) -> Float[Array, "B T K"]:
        """Bias of every token as a key, for each KV head."""
        v = gather_over_model(v, 2)
        values = v.reshape(*v.shape[:2], -1).astype(jnp.float32)
        x = jnp.matmul(values, self.delta.kernel[...], precision=jax.lax.Precision.HIGHEST)
        # log(1 + e^x) without overflow.
        softplus = jnp.maximum(x, 0) + jax.lax.log1p(jax.lax.exp(-jax.lax.abs(x)))
        return self.scale[...] * softplus


class MLP(nnx.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, size: int, inner: int, *, bias: bool, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.gate = Linear(size, inner, bias=bias, dtype=dtype, rngs=rngs)
        self.up = Linear(size, inner, bias=bias, dtype=dtype, rngs=rngs)
        self.down = Linear(inner, size, bias=bias, dtype=dtype, rngs=rngs, split=True)

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Applies the MLP to every row."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))
