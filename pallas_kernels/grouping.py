"""Query heads by KV head: [B, T, N, H] as [B, K, G*T, H], so that a group is one matmul."""

import jax
import jax.numpy as jnp

# Stands for -inf where a difference of two of them must not be NaN; a real score never gets there.
MASKED = -1e30


def group_queries(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """[B, T, N, H] -> float32 [B, K, G*T, H]; query head n = k*G + g lands in row g*T + t."""
    b, t, n, h = q.shape
    g = n // num_kv_heads
    q = q.astype(jnp.float32).reshape(b, t, num_kv_heads, g, h)
    return jnp.transpose(q, (0, 2, 3, 1, 4)).reshape(b, num_kv_heads, g * t, h)


def ungroup(x: jax.Array, num_tokens: int) -> jax.Array:
    """[B, K, G*T, ...] -> [B, T, N, ...], the inverse of ``group_queries``."""
    b, k, gt = x.shape[:3]
    g = gt // num_tokens
    x = x.reshape(b, k, g, num_tokens, *x.shape[3:])
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(b, num_tokens, k * g, *x.shape[4:])
