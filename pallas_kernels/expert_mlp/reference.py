"""Expert MLP in plain jax: the contract."""

from jax import lax
from jaxtyping import Array, Float, Int32


def expert_mlp(
    x: Float[Array, "rows D"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
    counts: Int32[Array, " E"],
) -> Float[Array, "rows D"]:
    """See ``expert_mlp.api.expert_mlp``."""
    inner = lax.ragged_dot(x, gate, counts)
    inner = inner * lax.logistic(inner) * lax.ragged_dot(x, up, counts)
    return lax.ragged_dot(inner, down, counts)
