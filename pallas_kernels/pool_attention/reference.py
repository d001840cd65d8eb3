"""Pool attention in plain jax.numpy."""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, Num

from pallas_kernels import online_softmax
from pallas_kernels.grouping import MASKED, group_queries, ungroup

# Dtypes of slots that come with scales.
QUANTISED = (jnp.dtype(jnp.int8), jnp.dtype(jnp.float8_e4m3fn))

# Slots copied next to each other and scored by one matmul on the CPU.
GROUP = 4


def pool_attention(
    q: Float[Array, "B T N H"],
    slots: Num[Array, "B K Z 2 P H"],
    slot_ids: Int32[Array, "B K R"],
    tail: Float[Array, "B K 2 E H"],
    tail_mask: Bool[Array, "B T E"],
    *,
    slot_bias: Float[Array, "B K Z P"] | None,
    tail_bias: Float[Array, "B K E"] | None,
    slot_scales: Float32[Array, "B K Z 2"] | None,
    scale: float,
    return_lse: bool,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """See ``pallas_kernels.pool_attention.pool_attention``.

    XLA:CPU gathers blocks at 3 GB/s, element by element, but slices them at copy speed: there
    it pays to loop (0.5 ms instead of 1.1 for 24 slots of 64, K=3, H=64).  Elsewhere one gather.
    """
    out, lse = lax.platform_dependent(
        *(q, slots, slot_ids, tail, tail_mask, slot_bias, tail_bias, slot_scales),
        cpu=functools.partial(attend_looped, scale=scale),
        default=functools.partial(attend_gathered, scale=scale),
    )
    return (out, lse) if return_lse else out


def attend_gathered(
    q: Float[Array, "B T N H"],
    slots: Num[Array, "B K Z 2 P H"],
    slot_ids: Int32[Array, "B K R"],
    tail: Float[Array, "B K 2 E H"],
    tail_mask: Bool[Array, "B T E"],
    slot_bias: Float[Array, "B K Z P"] | None,
    tail_bias: Float[Array, "B K E"] | None,
    slot_scales: Float32[Array, "B K Z 2"] | None,
    *,
    scale: float,
) -> tuple[Array, Array]:
    """Output and log-sum-exp: gathers all named slots, then one softmax."""
    b, t, _, h = q.shape
    k, _, _, p = slots.shape[1:5]
    r, e = slot_ids.shape[2], tail.shape[3]
    queries = group_queries(q, k) * scale
    rows = queries.shape[2]
    index = jnp.maximum(slot_ids, 0)
    taken = jnp.take_along_axis(slots, index[..., None, None, None], axis=2).astype(jnp.float32)
    if slot_scales is not None:
        scales = jnp.take_along_axis(slot_scales, index[..., None], axis=2)
        taken = taken * scales[..., None, None]
    keys = jnp.moveaxis(taken, 3, 2).reshape(b, k, 2, r * p, h)
    bias = None
    if slot_bias is not None:
        bias = jnp.take_along_axis(slot_bias, index[..., None], axis=2).reshape(b, k, r * p)
    named = jnp.repeat(slot_ids >= 0, p, axis=2)[:, :, None]
    scores = _scores(queries, keys[:, :, 0], named, bias)
    carry = online_softmax.add(online_softmax.start((b, k, rows), h), scores, keys[:, :, 1])
    if e:
        tail = tail.astype(jnp.float32)
        seen = jnp.tile(tail_mask[:, None], (1, 1, rows // t, 1))
        scores = _scores(queries, tail[:, :, 0], seen, tail_bias)
        carry = online_softmax.add(carry, scores, tail[:, :, 1])
    out, lse = online_softmax.finish(carry)
    return ungroup(out, t).astype(q.dtype), ungroup(lse, t)


def _scores(queries: Array, keys: Array, seen: Array, bias: Array | None) -> Array:
    """Masked float32 scores [..., rows, S] of keys [..., S, H]; bias is [..., S]."""
    s = jnp.matmul(queries, jnp.swapaxes(keys, -1, -2))
    if bias is not None:
        s = s + bias.astype(jnp.float32)[..., None, :]
    return jnp.where(seen, s, MASKED)


def attend_looped(
    q: Float[Array, "B T N H"],
    slots: Num[Array, "B K Z 2 P H"],
    slot_ids: Int32[Array, "B K R"],
    tail: Float[Array, "B K 2 E H"],
    tail_mask: Bool[Array, "B T E"],
    slot_bias: Float[Array, "B K Z P"] | None,
    tail_bias: Float[Array, "B K E"] | None,
    slot_scales: Float32[Array, "B K Z 2"] | None,
    *,
    scale: float,
) -> tuple[Array, Array]:
    """Output and log-sum-exp: one (sequence, KV head) after the other, GROUP slots at a time."""
    b, t, _, h = q.shape
    k, z, _, p = slots.shape[1:5]
    r, e = slot_ids.shape[2], tail.shape[3]
    queries = group_queries(q, k) * scale
    rows = queries.shape[2]
    runs = slots.reshape(b * k * z, 2, p, h)
    run_bias = None if slot_bias is None else slot_bias.reshape(b * k * z, p)
    run_scales = None if slot_scales is None else slot_scales.reshape(b * k * z, 2)
    groups = -(-r // GROUP)
    ids = jnp.pad(slot_ids, ((0, 0), (0, 0), (0, groups * GROUP - r)), constant_values=-1)

    def attend(xs: tuple) -> tuple[Array, Array]:
        pair, queries, ids, tail, tail_mask, tail_bias = xs
        carry = online_softmax.start((rows,), h)

        def step(carry: online_softmax.Carry, ids: Array) -> tuple[online_softmax.Carry, None]:
            index = [pair * z + jnp.maximum(ids[i], 0) for i in range(GROUP)]
            keys, values = (_runs(runs, run_scales, index, of) for of in range(2))
            bias = None
            if run_bias is not None:
                rows_of_bias = [lax.dynamic_slice(run_bias, (i, 0), (1, p)) for i in index]
                bias = jnp.concatenate(rows_of_bias).reshape(GROUP * p)
            named = jnp.repeat(ids >= 0, p)[None]
            return online_softmax.add(carry, _scores(queries, keys, named, bias), values), None

        carry, _ = lax.scan(step, carry, ids)
        if e:
            seen = jnp.tile(tail_mask, (rows // t, 1))
            scores = _scores(queries, tail[0].astype(jnp.float32), seen, tail_bias)
            carry = online_softmax.add(carry, scores, tail[1].astype(jnp.float32))
        return online_softmax.finish(carry)

    pairs = b * k
    out, lse = lax.map(
        attend,
        (
            jnp.arange(pairs, dtype=jnp.int32),
            queries.reshape(pairs, rows, h),
            ids.reshape(pairs, groups, GROUP),
            tail.reshape(pairs, 2, e, h),
            jnp.repeat(tail_mask, k, axis=0),
            None if tail_bias is None else tail_bias.reshape(pairs, e),
        ),
    )
    out, lse = out.reshape(b, k, rows, h), lse.reshape(b, k, rows)
    return ungroup(out, t).astype(q.dtype), ungroup(lse, t)


def _runs(runs: Array, scales: Array | None, index: list[Array], of: int) -> Array:
    """Keys (``of`` 0) or values (1) of some runs [2, P, H], one after the other, as [.., H]."""
    p, h = runs.shape[2:]
    parts = [lax.dynamic_slice(runs, (i, of, 0, 0), (1, 1, p, h)) for i in index]
    stacked = jnp.concatenate(parts).astype(jnp.float32)
    if scales is not None:
        factors = [lax.dynamic_slice(scales, (i, of), (1, 1)) for i in index]
        stacked = stacked * jnp.concatenate(factors)[..., None, None]
    return stacked.reshape(-1, h)
