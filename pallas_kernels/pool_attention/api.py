"""Pool attention (decode): the public function."""

from jaxtyping import Array, Bool, Float, Float32, Int32, Num

from pallas_kernels import dispatch, layout
from pallas_kernels.dispatch import Implementation
from pallas_kernels.pool_attention import reference


def pool_attention(
    q: Float[Array, "B T N H"],
    slots: Num[Array, "B K Z 2 P H"],
    slot_ids: Int32[Array, "B K R"],
    tail: Float[Array, "B K 2 E H"],
    tail_mask: Bool[Array, "B T E"],
    *,
    slot_bias: Float[Array, "B K Z P"] | None = None,
    tail_bias: Float[Array, "B K E"] | None = None,
    slot_scales: Float32[Array, "B K Z 2"] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: Implementation = "auto",
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Exact softmax attention over all tokens of the named slots and the unmasked tail.

    ``out[t, n] = sum_s softmax_s(scale * q[t, n] . key[s] + bias[s]) * value[s]``, s running over
    the P tokens of every slot in ``slot_ids[k]`` and the tail tokens with ``tail_mask[t]``,
    k = n // G (SparDA, sec. 3).  Softmax in float32.  Keys carry RoPE, so where a
    block lies does not matter; the order of ``slot_ids`` is the order of summation, so that
    the same blocks in other slots give the same bits.

    Args:
        q: queries after RoPE; T is 1, or W for a block of a diffusion model.
        slots: device slots; index 0 of axis 3 is the key, 1 the value.  int8 and float8_e4m3fn
            stand for themselves times ``slot_scales``.
        slot_ids: slots to attend; -1 names none.  A slot named twice counts twice.
        tail: tokens that lie in no slot yet; E may be 0.  Masked values must be finite.
        tail_mask: tail tokens that each query sees.
        slot_bias: added to the scaled score of a key (NOSA), one per token and KV head.
        tail_bias: the same for the tail.
        slot_scales: of the keys and the values of each slot, for quantised slots only.
        scale: factor on the dot products; 1/sqrt(H) by default.
        return_lse: also return the log-sum-exp of the scores.
        implementation: "auto", "mosaic" or "xla".

    Returns:
        Output of the dtype of ``q``, zero where a row sees nothing; with ``return_lse`` also the
        float32 log-sum-exp, -inf there.

    Raises:
        ValueError: shapes that do not fit; quantised slots without scales, or scales without.
        NotImplementedError: "mosaic" cannot be served.
    """
    sizes = layout.match(
        ("q", q, "B T N H"),
        ("slots", slots, "B K Z 2 P H"),
        ("slot_ids", slot_ids, "B K R"),
        ("tail", tail, "B K 2 E H"),
        ("tail_mask", tail_mask, "B T E"),
        ("slot_bias", slot_bias, "B K Z P"),
        ("tail_bias", tail_bias, "B K E"),
        ("slot_scales", slot_scales, "B K Z 2"),
    )
    if (slot_scales is not None) != (slots.dtype in reference.QUANTISED):
        given = "with" if slot_scales is not None else "without"
        raise ValueError(f"slots of {slots.dtype} {given} slot_scales")
    layout.group_size(sizes["N"], sizes["K"])
    return dispatch.run(
        "pool_attention",
        implementation,
        reference.pool_attention,
        q,
        slots,
        slot_ids,
        tail,
        tail_mask,
        slot_bias=slot_bias,
        tail_bias=tail_bias,
        slot_scales=slot_scales,
        scale=sizes["H"] ** -0.5 if scale is None else scale,
        return_lse=return_lse,
    )
