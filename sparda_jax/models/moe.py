"""Mixture of experts of LLaDA2 (spec/herald.md, sec. 2.5): router, grouped matmul, shared expert.

    s    = sigmoid(router(x))                             float32
    C    = the best experts by s + bias, within the best groups
    w_e  = scale * s_e / (sum of s over C + 1e-20)        the bias chooses, it does not weigh
    y    = sum over e in C of w_e expert_e(x) + shared(x)

Every (token, expert) pair is computed: nothing is dropped and there is no capacity.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from pallas_kernels import dispatch
from sparda_jax.config import MoeConfig
from sparda_jax.models.layers import MLP
from sparda_jax.sharding import EXPERT, MODEL, P, parameter_spec, part_number, sum_over
from sparda_jax.typing import Array, Float, Int

# Tiles of the grouped matmul; few rows an expert, 80 of 20480 with 8 of 256 experts a token. Of the
# columns the first that divide: 1,024 rows on an H200 take 232 us with 256 and 278 with 128 (2048 x
# 512), 285 and 436 (512 x 2048).
_ROWS, _COLUMNS, _DEPTH = 64, (256, 128), 64


class Router(nnx.Module):
    """Chooses each token's experts and their weights; float32 whatever the model's dtype.

    Attributes:
        kernel: `[D, E]`, E experts.
        bias: `[E]`, added to the scores for the choice only.
    """

    def __init__(self, size: int, config: MoeConfig, *, rngs: nnx.Rngs):
        shape = (size, config.num_experts)
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), shape) * size**-0.5)
        self.bias = nnx.Param(jnp.zeros((config.num_experts,)))
        self.config = config

    def logits(self, x: Float[Array, "rows D"]) -> Float[Array, "rows E"]:
        """Router logits; full float32 products, since a choice hangs on them."""
        return jnp.matmul(x.astype(jnp.float32), self.kernel[...], precision=lax.Precision.HIGHEST)

    def __call__(
        self, x: Float[Array, "rows D"]
    ) -> tuple[Int[Array, "rows X"], Float[Array, "rows X"]]:
        """Experts of each row, best first, and their weights."""
        config = self.config
        scores = lax.logistic(self.logits(x))
        biased = scores + self.bias[...]
        rows, size = x.shape[0], config.num_experts // config.num_groups
        if config.groups_per_token < config.num_groups:
            grouped = biased.reshape(rows, config.num_groups, size)
            group_scores = lax.top_k(grouped, 2)[0].sum(-1)
            _, groups = lax.top_k(group_scores, config.groups_per_token)
            numbers = lax.broadcasted_iota(jnp.int32, (1, 1, config.num_groups), 2)
            kept = (groups[..., None] == numbers).any(1)
            biased = lax.select(
                jnp.broadcast_to(kept[..., None], grouped.shape),
                grouped,
                jnp.full_like(grouped, -jnp.inf),
            ).reshape(biased.shape)
        _, chosen = lax.top_k(biased, config.experts_per_token)
        weights = jnp.take_along_axis(scores, chosen, axis=1)
        total = weights.sum(-1, keepdims=True) + 1e-20
        return chosen, weights / total * config.routed_scale


class ExpertLinear(nnx.Module):
    """One matrix an expert, `[E, in, out]`."""

    def __init__(self, experts: int, size: int, out: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        scale = jnp.asarray(size**-0.5, dtype)
        shape = (experts, size, out)
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * scale)


class Experts(nnx.Module):
    """SwiGLU of every expert: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, size: int, config: MoeConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        count, inner = config.num_experts, config.intermediate_size
        self.gate = ExpertLinear(count, size, inner, dtype=dtype, rngs=rngs)
        self.up = ExpertLinear(count, size, inner, dtype=dtype, rngs=rngs)
        self.down = ExpertLinear(count, inner, size, dtype=dtype, rngs=rngs)


class MoE(nnx.Module):
    """Routed experts and, where the model has one, the expert that every token passes."""

    def __init__(self, size: int, config: MoeConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.router = Router(size, config, rngs=rngs)
        self.experts = Experts(size, config, dtype=dtype, rngs=rngs)
        inner = config.shared_intermediate_size
        self.shared = MLP(size, inner, bias=False, dtype=dtype, rngs=rngs) if inner else None

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Applies the layer to every row."""
        rows = x.reshape(-1, x.shape[-1])
        chosen, weights = self.router(rows)
        kernels = tuple(getattr(self.experts, n).kernel[...] for n in ("gate", "up", "down"))
        mesh = jax.sharding.get_abstract_mesh()
        run = routed
        if mesh.shape.get(EXPERT, 1) > 1 and EXPERT not in mesh.manual_axes:
            # Left to XLA, every device would gather all experts.
            wide, narrow = (parameter_spec(("experts", name, "kernel")) for name in ("up", "down"))
            specs = (P(), P(), P(), (wide, wide, narrow))
            names = {EXPERT, MODEL} & set(mesh.axis_names)
            run = jax.shard_map(
                routed, in_specs=specs, out_specs=P(), axis_names=names, check_vma=False
            )
        out = run(rows, chosen, weights, kernels).astype(x.dtype).reshape(x.shape)
        return out if self.shared is None else out + self.shared(x)


def routed(
    rows: Float[Array, "rows D"],
    chosen: Int[Array, "rows X"],
    weights: Float[Array, "rows X"],
    kernels: tuple[Float[Array, "E D F"], Float[Array, "E D F"], Float[Array, "E F D"]],
) -> Float[Array, "rows D"]:
    """Sum over each row's experts, float32: pairs sorted by expert, then sorted back.

    Where the experts are split over devices, each computes the pairs of its own, and the sums are
    added.

    Args:
        rows: inputs.
        chosen: experts of each row.
        weights: theirs.
        kernels: gate, up and down of every expert here.
    """
    count, each = chosen.shape
    experts = kernels[0].shape[0]
    expert = chosen.reshape(-1) - part_number(EXPERT) * experts
    # Pairs of experts that are elsewhere come last, behind all counts: nothing multiplies them.
    expert = jnp.where((expert >= 0) & (expert < experts), expert, experts)
    pairs = lax.iota(jnp.int32, count * each)
    _, order = lax.sort_key_val(expert, pairs)
    counts = (expert[:, None] == lax.iota(jnp.int32, experts)).sum(0, dtype=jnp.int32)
    out = _swiglu(jnp.take(rows, order // each, axis=0, mode="clip"), kernels, counts)
    back = jnp.zeros_like(pairs).at[order].set(pairs)
    here = (expert < experts)[:, None]
    out = jnp.where(here, jnp.take(out, back, axis=0, mode="clip"), 0)
    out = out.reshape(count, each, -1).astype(jnp.float32) * weights[..., None]
    return sum_over(out.sum(1), EXPERT, MODEL)


def _swiglu(x: Array, kernels: tuple[Array, Array, Array], counts: Array) -> Array:
    """Expert e, `down(silu(gate(x)) * up(x))`, of its `counts[e]` rows, which lie together."""
    gate, up, down = kernels
    inner = grouped_matmul(x, gate, counts)
    inner = inner * lax.logistic(inner) * grouped_matmul(x, up, counts)
    return grouped_matmul(inner, down, counts)


def grouped_matmul(
    x: Float[Array, "rows D"], kernel: Float[Array, "E D F"], counts: Int[Array, " E"]
) -> Float[Array, "rows F"]:
    """The first `counts[0]` rows by matrix 0, the next `counts[1]` by matrix 1, and so on.

    On Hopper by jax's own Mosaic kernel: XLA turns `ragged_dot` into dense products with a zero for
    every pair that is not there, E times the work (20480 rows, 256 x 2048 x 512: 21 GB of temporary
    memory, compiled for an H200). It reads every matrix, those without rows too. Rows past the last
    group mean nothing.
    """
    if not _kernel_serves(x, kernel):
        return lax.ragged_dot(x, kernel, counts)
    return _by_kernel(x, kernel, counts)


# One jit, so that a program with many layers lowers the kernel once for each shape.
@jax.jit
def _by_kernel(x: Array, kernel: Array, counts: Array) -> Array:
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    out: Array = ragged_dot(
        x,
        kernel,
        group_sizes=counts,
        block_m=_ROWS,
        block_n=next(columns for columns in _COLUMNS if kernel.shape[2] % columns == 0),
        block_k=_DEPTH,
        max_concurrent_steps=4,
        grid_block_n=1,
    )
    return out


def _kernel_serves(x: Array, kernel: Array) -> bool:
    _, size, out = kernel.shape
    return (
        dispatch.unavailable() is None
        and x.dtype == kernel.dtype
        and x.dtype in (jnp.bfloat16, jnp.float16)
        and size % _DEPTH == 0
        and out % min(_COLUMNS) == 0
    )
