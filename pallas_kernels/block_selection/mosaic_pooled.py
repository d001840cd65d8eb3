"""Scores of compressed keys pooled to blocks, for many query tokens (Mosaic GPU, Hopper).

Two kernels: the exact log-sum-exp of every query head over its visible keys, and the pooled
scores.  The keys of a block, at most r + 1 of them, are stored apart by their place in the
block, so that pooling is an element-wise maximum of r + 1 products, in registers.

Ran on an H200 (jax 0.11.2): equal to the reference on all shapes tried.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

TOKENS = 64
# Columns of scores, and of sums, that one warpgroup of multi-head holds in registers.
COLUMNS = 160
# Consumers of the log-sum-exp kernel, and the tokens that all kernels' tiles divide.
LSE_GROUPS = 4
TILE = LSE_GROUPS * TOKENS
LSE_KEYS = 128
LSE_STAGES = 4
_LOG2E = math.log2(math.e)
_ROW = plgpu.Layout.WGMMA.reduce(1)
# A type checker takes the two for abstract classes.
_TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static sizes.

    Attributes:
        batch: B.
        kv_heads: K.
        group: query heads of a KV head; 1 for a Forecast.
        head_dim: H.
        tokens: query tokens, a multiple of ``TILE``.
        blocks: M.
        columns: length of a row of the result, at least M.
        compressed: C, the keys that exist.
        strides: r, compressed keys that start in a block.
        multi_head: probabilities summed over the group, not raw scores.
        complete: score and write what lies after a tile's last own block too.
    """

    batch: int
    kv_heads: int
    group: int
    head_dim: int
    tokens: int
    blocks: int
    columns: int
    compressed: int
    strides: int
    multi_head: bool
    complete: bool

    @property
    def tile_blocks(self) -> int:
        """Blocks of one score tile.

        Multi-head keeps the scores and the sums of r + 1 keys a block in registers, at most
        ``COLUMNS`` of each; a Forecast tile is bound by its start, so larger.
        """
        if not self.multi_head:
            return 64 if self.strides <= 4 else 32
        return next(m for m in (64, 32, 16, 8) if (self.strides + 1) * m <= COLUMNS)


def keys_apart(compressed: Array, shape: Shape) -> Array:
    """[B K (r + 1), M', H]: row m of part i is compressed key r m - 1 + i, 0 where none is."""
    b, k, c, h = compressed.shape
    r = shape.strides
    rows = -(-shape.blocks // shape.tile_blocks) * shape.tile_blocks
    padded = jnp.pad(compressed, ((0, 0), (0, 0), (1, max(0, r * (rows + 1) - c - 1)), (0, 0)))
    padded = padded[:, :, : r * (rows + 1)].reshape(b, k, rows + 1, r, h)
    apart = [padded[:, :, :rows, i] for i in range(r)] + [padded[:, :, 1:, 0]]
    return jnp.stack(apart, axis=2).reshape(b * k * (r + 1), rows, h)


def keys_whole(compressed: Array) -> Array:
    """[B K, C', H]: whole steps of the log-sum-exp, at least one (no operand of size 0 lowers)."""
    b, k, c, h = compressed.shape
    rows = max(1, -(-c // LSE_KEYS)) * LSE_KEYS
    padded = jnp.pad(compressed, ((0, 0), (0, 0), (0, rows - c), (0, 0)))
    return padded.reshape(b * k, -1, h)


# ---- log-sum-exp ----------------------------------------------------------------------------


def log_sum_exp(shape: Shape, scale: float, q: Array, keys: Array, visible: Array) -> Array:
    """log2 of sum over visible keys of 2^(score log2 e): float32 [B, N, T], -inf when empty."""
    h, heads = shape.head_dim, shape.kv_heads * shape.group
    tiles = shape.tokens // TILE
    by_tile = visible.reshape(shape.batch, tiles, TILE)

    def body(*refs: Any, **scratch: Any) -> None:
        names = ("q", "keys", "visible", "least", "most", "out")
        _lse_kernel(shape, scale, dict(zip(names, refs, strict=True)) | scratch)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((shape.batch, heads, shape.tokens), jnp.float32),
        scratch_types={
            "q_smem": plgpu.SMEM((LSE_GROUPS, TOKENS, h), q.dtype, transforms=_TILED),
            "k_smem": plgpu.SMEM((LSE_STAGES, LSE_KEYS, h), q.dtype, transforms=_TILED),
            "q_full": plgpu.Barrier(num_barriers=LSE_GROUPS),
            "k_full": plgpu.Barrier(num_barriers=LSE_STAGES),
            "k_free": plgpu.Barrier(num_arrivals=LSE_GROUPS, num_barriers=LSE_STAGES),
        },
        grid=(shape.batch, heads, tiles),
        grid_names=("b", "n", "x"),
        num_threads=LSE_GROUPS + 1,
        thread_name="wg",
        kernel_name="selection_log_sum_exp",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=128),
    )(q, keys, visible, by_tile.min(-1), by_tile.max(-1))


def _lse_kernel(shape: Shape, scale: float, refs: dict[str, Any]) -> None:
    """Warpgroups 0 to 3 take 64 tokens of one head each, the last one copies keys."""
    wg, b, n = lax.axis_index("wg"), lax.axis_index("b"), lax.axis_index("n")
    x = shape.tokens // TILE - 1 - lax.axis_index("x")
    stages = lax.div(refs["most"][b, x] + (LSE_KEYS - 1), LSE_KEYS)

    @pl.when(wg < LSE_GROUPS)
    def _consumer() -> None:
        plgpu.set_max_registers(112, action="increase")
        _lse_consume(shape, scale, refs, stages, (b, n, x), wg)

    @pl.when(wg == LSE_GROUPS)
    def _producer() -> None:
        plgpu.set_max_registers(24, action="decrease")
        row = b * shape.kv_heads + lax.div(n, jnp.int32(shape.group))

        def fill(i: Any, _: None) -> None:
            slot = lax.rem(i, jnp.int32(LSE_STAGES))
            pl.when(i >= LSE_STAGES)(lambda: plgpu.barrier_wait(refs["k_free"].at[slot]))
            plgpu.copy_gmem_to_smem(
                refs["keys"].at[row, pl.ds(i * LSE_KEYS, LSE_KEYS)],
                refs["k_smem"].at[slot],
                refs["k_full"].at[slot],
            )

        lax.fori_loop(0, stages, fill, None)
        # The simulator wants every release observed before the barriers go.
        for slot in range(LSE_STAGES):

            @pl.when(slot < stages)
            def _drain(slot: int = slot) -> None:
                plgpu.barrier_wait(refs["k_free"].at[slot])


def _lse_consume(
    shape: Shape, scale: float, refs: dict[str, Any], stages: Any,
    where: tuple[Any, Any, Any], wg: Any,
) -> None:  # fmt: skip
    b, n, x = where
    token = x * TILE + wg * TOKENS
    q = refs["q_smem"].at[wg]
    plgpu.copy_gmem_to_smem(
        refs["q"].at[pl.ds(b * shape.tokens + token, TOKENS), n], q, refs["q_full"].at[wg]
    )
    visible = plgpu.load(refs["visible"].at[b, pl.ds(token, TOKENS)], layout=_ROW, optimized=False)
    plgpu.barrier_wait(refs["q_full"].at[wg])
    row = lambda value: plgpu.layout_cast(jnp.full((TOKENS,), value, jnp.float32), _ROW)

    def step(i: Any, state: Any, masked: bool = False) -> Any:
        top, total = state
        slot = lax.rem(i, jnp.int32(LSE_STAGES))
        plgpu.barrier_wait(refs["k_full"].at[slot])
        s = _product(q, refs["k_smem"].at[slot], LSE_KEYS)
        plgpu.barrier_arrive(refs["k_free"].at[slot])
        if masked:
            key = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
            limit = lax.broadcast_in_dim(visible - i * LSE_KEYS, s.shape, [0])
            s = jnp.where(key < limit, s, -jnp.inf)
        new_top = jnp.maximum(top, s.max(axis=1) * (scale * _LOG2E))
        base = jnp.where(new_top == -jnp.inf, jnp.zeros_like(new_top), new_top)
        e = jnp.exp2(s * (scale * _LOG2E) - lax.broadcast_in_dim(base, s.shape, [0]))
        return new_top, total * jnp.exp2(top - base) + e.sum(axis=1)

    full = lax.div(refs["least"][b, x], LSE_KEYS)
    state = lax.fori_loop(0, full, step, (row(-jnp.inf), row(0)))
    top, total = lax.fori_loop(full, stages, functools.partial(step, masked=True), state)
    refs["out"][b, n, pl.ds(token, TOKENS)] = top + jnp.log2(total)


def _product(a: Any, b: Any, columns: int) -> Any:
    """a @ b.T of two shared-memory tiles, in float32."""

    def multiply(ref: Any) -> Any:
        plgpu.wgmma(ref, a, b.transpose((1, 0)))
        return ref[...]

    return pl.run_scoped(multiply, plgpu.ACC((TOKENS, columns), jnp.float32))


def _products(a: Any, *, keys: Any, parts: int, columns: int) -> list[Any]:
    """a @ keys.T, cut into ``parts`` of ``columns``; one product where its registers suffice."""
    if parts * columns > COLUMNS:
        return [_product(a, keys.at[pl.ds(i * columns, columns)], columns) for i in range(parts)]
    s = _product(a, keys, parts * columns)
    return [s[:, i * columns : (i + 1) * columns] for i in range(parts)]


# ---- block scores ---------------------------------------------------------------------------


def pooled_scores(
    shape: Shape, scale: float, q: Array, keys: Array, query_block: Array, visible: Array,
    lse: Array | None,
) -> Array:  # fmt: skip
    """Pooled scores, float32 [B K, T, columns].

    Args:
        shape: sizes.
        scale: factor on the dot products of multi-head.
        q: [B T, N, H].
        keys: from ``keys_apart``.
        query_block: own block of each token.
        visible: keys that each token sees.
        lse: from ``log_sum_exp``, for multi-head.

    Returns:
        Maximum over the visible keys r m - 1 + i of block m: raw scores, -inf where none is
        visible, or probabilities, 0 there.  Columns from M on, and unless ``complete`` those
        after a tile's last own block, may stay unwritten.
    """
    h, r, m = shape.head_dim, shape.strides, shape.tile_blocks
    tiles = shape.tokens // (2 * TOKENS)
    # The last block that can matter: the own one, or the last with a visible key r m - 1.
    last = lax.div(visible, jnp.int32(r)) if shape.complete else query_block
    last = last.reshape(shape.batch, tiles, 2 * TOKENS).max(-1)
    inputs, names = [q, keys, visible, last], ["q", "keys", "visible", "last"]
    if lse is not None:
        inputs.append(lse)
        names.append("lse")
    buffers = 1 if lse is None else 2

    def body(*refs: Any, **scratch: Any) -> None:
        named = dict(zip((*names, "out"), refs, strict=True)) | scratch
        b, x, y = lax.axis_index("b"), lax.axis_index("x"), lax.axis_index("y")
        wanted = y * m <= named["last"][b, x]
        pl.when(wanted)(lambda: _score_tile(shape, scale, named))
        if shape.complete:
            pl.when(~wanted)(lambda: _empty_tile(shape, named))

    rows = (shape.batch * shape.kv_heads, shape.tokens, shape.columns)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(rows, jnp.float32),
        scratch_types={
            "q_smem": plgpu.SMEM((2, buffers, TOKENS, h), q.dtype, transforms=_TILED),
            "k_smem": plgpu.SMEM(((r + 1) * m, h), q.dtype, transforms=_TILED),
            "lse_smem": plgpu.SMEM((2, shape.group if lse is not None else 1, TOKENS), jnp.float32),
            "q_full": plgpu.Barrier(num_barriers=2 * buffers),
            "k_full": plgpu.Barrier(num_arrivals=r + 1),
            "lse_full": plgpu.Barrier(num_barriers=2),
        },
        grid=(shape.batch, shape.kv_heads, tiles, -(-shape.blocks // m)),
        grid_names=("b", "k", "x", "y"),
        num_threads=2,
        thread_name="wg",
        kernel_name="selection_block_scores",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=128),
    )(*inputs)


def _score_tile(shape: Shape, scale: float, refs: dict[str, Any]) -> None:
    """64 tokens (of this warpgroup) x ``tile_blocks`` blocks of one KV head."""
    wg, b, k = lax.axis_index("wg"), lax.axis_index("b"), lax.axis_index("k")
    x, y = lax.axis_index("x"), lax.axis_index("y")
    r, m, group = shape.strides, shape.tile_blocks, shape.group
    token = x * 2 * TOKENS + wg * TOKENS
    row = b * shape.kv_heads + k

    @pl.when(wg == 0)
    def _keys() -> None:
        for i in range(r + 1):
            plgpu.copy_gmem_to_smem(
                refs["keys"].at[row * (r + 1) + i, pl.ds(y * m, m)],
                refs["k_smem"].at[pl.ds(i * m, m)],
                refs["k_full"],
            )

    buffers = refs["q_smem"].shape[1]

    def fetch(head: Any, buffer: Any) -> None:
        plgpu.copy_gmem_to_smem(
            refs["q"].at[pl.ds(b * shape.tokens + token, TOKENS), k * group + head],
            refs["q_smem"].at[wg, buffer],
            refs["q_full"].at[wg * buffers + buffer],
        )

    for head in range(min(buffers, group)):
        fetch(head, head)
    visible = plgpu.load(refs["visible"].at[b, pl.ds(token, TOKENS)], layout=_ROW, optimized=False)
    plgpu.barrier_wait(refs["k_full"])
    products = functools.partial(_products, keys=refs["k_smem"], parts=r + 1, columns=m)
    if "lse" not in refs:
        plgpu.barrier_wait(refs["q_full"].at[wg])
        sums, nothing = products(refs["q_smem"].at[wg, 0]), -jnp.inf
    else:
        plgpu.copy_gmem_to_smem(
            refs["lse"].at[b, pl.ds(k * group, group), pl.ds(token, TOKENS)],
            refs["lse_smem"].at[wg],
            refs["lse_full"].at[wg],
        )
        plgpu.barrier_wait(refs["lse_full"].at[wg])

        def add_head(head: Any, sums: Any) -> Any:
            buffer = lax.rem(head, jnp.int32(buffers))
            lse = plgpu.load(refs["lse_smem"].at[wg, head], layout=_ROW, optimized=False)
            plgpu.barrier_wait(refs["q_full"].at[wg * buffers + buffer])
            scores = products(refs["q_smem"].at[wg, buffer])
            pl.when(head + buffers < group)(lambda: fetch(head + buffers, buffer))
            minus = lax.broadcast_in_dim(lse, (TOKENS, m), [0])
            shares = [jnp.exp2(s * (scale * _LOG2E) - minus) for s in scores]
            return tuple(a + b for a, b in zip(sums, shares, strict=True))

        zero = plgpu.layout_cast(jnp.full((TOKENS, m), 0, jnp.float32), plgpu.Layout.WGMMA)
        sums, nothing = lax.fori_loop(0, group, add_head, (zero,) * (r + 1)), 0.0
    best = _pool(shape, list(sums), visible, y * m, nothing)
    refs["out"][row, pl.ds(token, TOKENS), pl.ds(y * m, m)] = best


def _empty_tile(shape: Shape, refs: dict[str, Any]) -> None:
    """A tile of which no token sees a key."""
    row = lax.axis_index("b") * shape.kv_heads + lax.axis_index("k")
    token = (lax.axis_index("x") * 2 + lax.axis_index("wg")) * TOKENS
    m = shape.tile_blocks
    value = jnp.full((TOKENS, m), 0.0 if shape.multi_head else -jnp.inf, jnp.float32)
    value = plgpu.layout_cast(value, plgpu.Layout.WGMMA)
    refs["out"][row, pl.ds(token, TOKENS), pl.ds(lax.axis_index("y") * m, m)] = value


def _pool(shape: Shape, parts: list[Any], visible: Any, first: Any, nothing: float) -> Any:
    """Maximum over the keys r m - 1 + i of block m; an invisible key counts as ``nothing``."""
    r = shape.strides
    block = plgpu.broadcasted_iota(jnp.int32, parts[0].shape, 1, layout=plgpu.Layout.WGMMA) + first
    pooled_parts = []
    for i, part in enumerate(parts):
        # Key r m - 1 + i < visible, in terms of m, so that the division is per row.
        limit = lax.div(visible + (r - i), jnp.int32(r))
        seen = block < lax.broadcast_in_dim(limit, part.shape, [0])
        if i == 0:
            seen = seen & (block > 0)
        pooled_parts.append(jnp.where(seen, part, nothing))
    best = functools.reduce(jnp.maximum, pooled_parts)
    # Blocks whose first key r m - 1 (0 for m = 0) does not exist, visible or not.
    pooled = shape.compressed // r if shape.compressed else -1
    return jnp.where(block <= pooled, best, -jnp.inf)
