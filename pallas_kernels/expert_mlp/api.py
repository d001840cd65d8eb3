"""Expert MLP: the public function."""

from jaxtyping import Array, Float, Int32

from pallas_kernels import dispatch, layout
from pallas_kernels.dispatch import Implementation
from pallas_kernels.expert_mlp import reference


def expert_mlp(
    x: Float[Array, "rows D"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
    counts: Int32[Array, " E"],
    *,
    implementation: Implementation = "auto",
) -> Float[Array, "rows D"]:
    """``down_e(silu(gate_e(x)) * up_e(x))`` of every row, e the expert that the row belongs to.

    The first ``counts[0]`` rows belong to expert 0, the next ``counts[1]`` to expert 1, and so on
    (LLaDA2's mixture, spec/herald.md, sec. 2.5).  Nothing is dropped, and there is no capacity.
    The kernel reads the weights of experts with rows, and of no other; XLA makes dense products of
    ``ragged_dot``, E times the work (20480 rows, 256 x 2048 x 512: 21 GB of temporary memory,
    compiled for an H200).

    Args:
        x: rows sorted by expert; those past the last expert's mean nothing.
        gate: of each expert.
        up: of each expert.
        down: of each expert.
        counts: rows of each expert.
        implementation: "auto", "mosaic" or "xla".

    Returns:
        One row each, of the dtype of ``x``; rows past the last expert's mean nothing.

    Raises:
        ValueError: shapes that do not fit.
        NotImplementedError: "mosaic" cannot be served.
    """
    layout.match(
        ("x", x, "S D"),
        ("gate", gate, "E D F"),
        ("up", up, "E D F"),
        ("down", down, "E F D"),
        ("counts", counts, "E"),
    )
    return dispatch.run(
        "expert_mlp", implementation, reference.expert_mlp, x, gate, up, down, counts
    )
