"""Block-sparse attention (prefill): the public function."""

from jaxtyping import Array, Float, Int32

from pallas_kernels import dispatch, layout
from pallas_kernels.block_sparse_attention import reference
from pallas_kernels.dispatch import Implementation


def block_sparse_attention(
    q: Float[Array, "B T N H"],
    kv: Float[Array, "B K M 2 P H"],
    ids: Int32[Array, "B K T R"],
    positions: Int32[Array, "B T"],
    *,
    key_bias: Float[Array, "B K M P"] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: Implementation = "auto",
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Exact softmax attention over the union of the selected blocks, token-causal.

    ``out[t, n] = sum_s softmax_s(scale * q[t, n] . key[s] + bias[s]) * value[s]`` over the tokens
    s with ``s // P in ids[k, t]`` and ``s <= positions[t]``, k = n // G (SparDA, sec. 3).  Softmax
    in float32.

    Args:
        q: queries after RoPE.
        kv: cache; index 0 of axis 3 is the key, 1 the value.  Token s lies in block s // P at
            offset s % P.  What a row does not see never influences it, but values must be finite
            everywhere: they are multiplied by zero.
        ids: selected blocks of every query token and KV head; -1 selects nothing, and
            so does an id of M or more.  No order is asked for; a block named twice counts once.
        positions: absolute position of each query token; a negative one sees nothing.
        key_bias: added to the scaled score of a key (NOSA), one per token and KV head.
        scale: factor on the dot products; 1/sqrt(H) by default.
        return_lse: also return the log-sum-exp of the scores.
        implementation: "auto", "mosaic" or "xla".

    Returns:
        Output of the dtype of ``q``, zero where a row sees nothing; with ``return_lse`` also the
        float32 log-sum-exp, -inf there.

    Raises:
        ValueError: shapes that do not fit.
        NotImplementedError: "mosaic" cannot be served.
    """
    sizes = layout.match(
        ("q", q, "B T N H"),
        ("kv", kv, "B K M 2 P H"),
        ("ids", ids, "B K T R"),
        ("positions", positions, "B T"),
        ("key_bias", key_bias, "B K M P"),
    )
    layout.group_size(sizes["N"], sizes["K"])
    return dispatch.run(
        "block_sparse_attention",
        implementation,
        reference.block_sparse_attention,
        q,
        kv,
        ids,
        positions,
        key_bias=key_bias,
        scale=sizes["H"] ** -0.5 if scale is None else scale,
        return_lse=return_lse,
    )
