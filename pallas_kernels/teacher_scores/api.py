"""Teacher scores for Forecast training: the public function."""

from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import dispatch, layout
from pallas_kernels.dispatch import Implementation
from pallas_kernels.geometry import BlockGeometry
from pallas_kernels.teacher_scores import reference


def teacher_scores(
    q: Float[Array, "B T N H"],
    keys: Float[Array, "B K S H"],
    positions: Int32[Array, "B T"],
    *,
    geometry: BlockGeometry,
    fine_kernel: int = 2,
    fine_stride: int = 1,
    scale: float | None = None,
    implementation: Implementation = "auto",
) -> Float32[Array, "B K T C"]:
    """What all query heads of a group look at, on the grid of compressed keys.

    Fine key j is the mean of keys ``[j * fine_stride, j * fine_stride + fine_kernel)``.  With
    ``P[k, t, j] = sum over the G heads n of group k of softmax_j(scale * q[t, n] . fine[k, j])``
    over the fine keys with ``j * fine_stride <= positions[t]``, window i gets the maximum of
    P over ``r i - 1 <= j < r i + r``, r = stride / fine_stride: 0 where none is visible.  So
    the last fine keys of a token reach past it, and a window's range is not its support:
    both on purpose (SparDA, sec. 3; spec/sparda.md 5.2).  Float32 throughout; forward only.

    Args:
        q: queries after RoPE.
        keys: keys after RoPE, token s at index s.
        positions: absolute position of each query token.
        geometry: standard grid; its stride is a multiple of ``fine_stride``.
        fine_kernel: keys in one fine key.
        fine_stride: keys between the starts of neighbouring fine keys.
        scale: factor on the dot products; 1/sqrt(H) by default.
        implementation: "auto", "mosaic" or "xla".

    Returns:
        One row a token over the ``geometry.num_compressed(S)`` windows.

    Raises:
        ValueError: shapes or strides that do not fit; a fine stride that is not finer (there the
            multi-head probabilities themselves are the teacher, unpooled).
        NotImplementedError: "mosaic" cannot be served.
    """
    sizes = layout.match(
        ("q", q, "B T N H"), ("keys", keys, "B K S H"), ("positions", positions, "B T")
    )
    layout.group_size(sizes["N"], sizes["K"])
    if fine_stride >= geometry.kernel_stride:
        raise ValueError(
            f"fine_stride {fine_stride} is not below kernel_stride {geometry.kernel_stride}"
        )
    # In the fine grid, a standard window takes the place of a block.
    fine = BlockGeometry(geometry.kernel_stride, fine_kernel, fine_stride)
    return dispatch.run(
        "teacher_scores",
        implementation,
        reference.teacher_scores,
        q,
        keys,
        positions,
        fine=fine,
        windows=geometry.num_compressed(sizes["S"]),
        scale=sizes["H"] ** -0.5 if scale is None else scale,
    )
