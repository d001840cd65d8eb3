"""Block-sparse prefill attention on Hopper: operands and launch; see ``mosaic_kernel``."""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels import interpret
from pallas_kernels.block_sparse_attention import plan as planning
from pallas_kernels.block_sparse_attention import tuning as tunings
from pallas_kernels.block_sparse_attention.mosaic_kernel import KEYS, ROWS, Shape, kernel


def block_sparse_attention(
    q: Float[Array, "B T N H"],
    kv: Float[Array, "B K M 2 P H"],
    ids: Int32[Array, "B K T R"],
    positions: Int32[Array, "B T"],
    *,
    key_bias: Float[Array, "B K M P"] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    tuning: tunings.Tuning | None = None,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """The kernel behind ``pallas_kernels.block_sparse_attention``; see there.

    Args:
        q: see there, also for all up to ``return_lse``.
        kv: see there.
        ids: see there.
        positions: see there.
        key_bias: see there.
        scale: see there; must be positive.
        return_lse: see there.
        tuning: heuristic by default.

    Raises:
        NotImplementedError: a shape, dtype or scale outside the kernel's limits.
    """
    h, p = q.shape[3], kv.shape[4]
    scale = h**-0.5 if scale is None else scale
    _check(q.shape[2] // kv.shape[1], h, p, q.dtype, kv.dtype, scale)
    tuning = tunings.heuristic(h) if tuning is None else tuning
    simulated = interpret.is_active()
    return _attend(q, kv, ids, positions, key_bias, scale, return_lse, tuning, simulated)


# One jit, so that a program with many layers lowers the kernel once (1.3 s each on a CPU core).
@functools.partial(jax.jit, static_argnames=("scale", "return_lse", "tuning", "simulated"))
def _attend(
    q: Array, kv: Array, ids: Array, positions: Array, key_bias: Array | None, scale: float,
    return_lse: bool, tuning: tunings.Tuning, simulated: bool,
) -> Array | tuple[Array, Array]:  # fmt: skip
    """Lays the operands out and launches; ``simulated`` only tells two traces apart."""
    del simulated
    b, t, n, h = q.shape
    _, k, m, _, p, _ = kv.shape
    g = n // k
    padded = 1 << (g - 1).bit_length()
    group = ROWS // padded
    # Tokens of whole tiles and whole mask words.
    t_pad = -(-t // max(2 * group, 32)) * max(2 * group, 32)
    in_place = padded == g and g % 8 == 0
    shape = Shape(
        batch=b,
        kv_heads=k,
        blocks=m,
        block_size=p,
        head_dim=h,
        padded=padded,
        unit_rows=g if in_place else ROWS,
        tiles=t_pad // (2 * group),
        words=-(-m // 32),
    )

    q = jnp.pad(q, ((0, 0), (0, t_pad - t), (0, 0), (0, 0)))
    ids = jnp.pad(ids, ((0, 0), (0, 0), (0, t_pad - t), (0, 0)), constant_values=-1)
    last = jnp.iinfo(jnp.int32).max - 1
    positions = jnp.pad(positions, ((0, 0), (0, t_pad - t)), constant_values=last)
    plan = planning.make_plan(
        ids, positions, num_blocks=m, block_size=p, group=group, split=tuning.split
    )
    row_positions = jnp.repeat(positions, padded, axis=1).reshape(b, shape.tiles, 2 * ROWS)
    out, lse = _call(
        shape,
        tuning,
        scale,
        return_lse,
        _rows(q, shape),
        kv.reshape(b * k * m * 2, p, h),
        *plan,
        row_positions,
        None if key_bias is None else key_bias.astype(jnp.float32).reshape(b * k * m, p),
    )
    out = _tokens(out.reshape(b, -1, k, shape.unit_rows, h), shape, g)[:, :t]
    if lse is None:
        return out
    lse = lse.reshape(b, k, t_pad, padded)[..., :g]
    return out, lse.transpose(0, 2, 1, 3).reshape(b, t_pad, n)[:, :t]


def _check(g: int, h: int, p: int, q_dtype: Any, kv_dtype: Any, scale: float) -> None:
    """Refuses what the kernel was not written for."""
    if not 1 <= g <= 16:
        raise NotImplementedError(f"G = {g} query heads per KV head; the kernel takes 1 to 16")
    if h not in (64, 128):
        raise NotImplementedError(f"H = {h}; the kernel takes 64 and 128")
    if p not in (16, 32, 64, 128):
        raise NotImplementedError(f"P = {p}; the kernel takes 16, 32, 64 and 128")
    if q_dtype != kv_dtype or q_dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(
            f"q {q_dtype} with kv {kv_dtype}; the kernel takes bfloat16 or float16 for both"
        )
    if not scale > 0:
        raise NotImplementedError(f"scale {scale}; the kernel takes positive ones")


def _rows(q: Array, shape: Shape) -> Array:
    """q as [units, rows of a unit, H]: a view where the heads of a token fill whole tiles."""
    b, t, n, h = q.shape
    k = shape.kv_heads
    if shape.unit_rows == n // k:
        return q.reshape(b * t * k, n // k, h)
    q = q.reshape(b, t, k, n // k, h)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, shape.padded - n // k), (0, 0)))
    q = q.reshape(b, t // shape.group, shape.group, k, shape.padded, h)
    return q.transpose(0, 1, 3, 2, 4, 5).reshape(-1, ROWS, h)


def _tokens(out: Array, shape: Shape, g: int) -> Array:
    """Inverse of ``_rows``: [B, T, N, H]."""
    b, _, k, _, h = out.shape
    if shape.unit_rows == g:
        return out.reshape(b, -1, k * g, h)
    out = out.reshape(b, -1, k, shape.group, shape.padded, h)[..., :g, :]
    return out.transpose(0, 1, 3, 2, 4, 5).reshape(b, -1, k * g, h)


def _call(
    shape: Shape, tuning: tunings.Tuning, scale: float, with_lse: bool, q: Array, kv: Array,
    classes: Array, counts: Array, members: Array, positions: Array, bias: Array | None,
) -> tuple[Array, Array | None]:  # fmt: skip
    """Launches the kernel: one thread block per (request, KV head, tile)."""
    h, stages = shape.head_dim, tuning.stages
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    scratch: dict[str, Any] = {
        "q_smem": plgpu.SMEM((2, ROWS, h), q.dtype, transforms=tiled),
        "k_smem": plgpu.SMEM((stages, KEYS, h), q.dtype, transforms=tiled),
        "v_smem": plgpu.SMEM((stages, KEYS, h), q.dtype, transforms=tiled),
        "info": plgpu.SMEM((stages, shape.per_stage, 1 + 2 * shape.mask_words), jnp.int32),
        "q_full": plgpu.Barrier(num_arrivals=shape.units, num_barriers=2),
        "k_full": plgpu.Barrier(num_arrivals=shape.per_stage, num_barriers=stages),
        "v_full": plgpu.Barrier(num_arrivals=shape.per_stage, num_barriers=stages),
        "k_free": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "v_free": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "turn": plgpu.Barrier(num_arrivals=2),
    }
    inputs = [q, kv, classes, counts, members, positions]
    names = ["q", "kv", "classes", "counts", "members", "positions"]
    out_type = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if bias is not None:
        inputs.append(bias)
        names.append("bias")
    names.append("out")
    if with_lse:
        rows = (shape.batch, shape.kv_heads, shape.tiles * 2 * ROWS)
        out_type.append(jax.ShapeDtypeStruct(rows, jnp.float32))
        names.append("lse")

    def body(*refs: Any, **scratch_refs: Any) -> None:
        kernel(shape, tuning, scale, dict(zip(names, refs, strict=True)) | scratch_refs)

    outs = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=(shape.batch, shape.kv_heads, shape.tiles),
        grid_names=("b", "k", "x"),
        num_threads=3,
        thread_name="wg",
        kernel_name="block_sparse_attention",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=128),
    )(*inputs)
    return outs[0], outs[1] if with_lse else None
