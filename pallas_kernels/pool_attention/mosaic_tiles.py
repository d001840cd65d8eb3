"""What the two pool-attention kernels share: shapes, loads of one tile, one softmax step.

A tile is TOK = max(64, P) tokens: the slots of one step, or a stretch of the tail.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.registers import row_layout

LOG2E = math.log2(math.e)
# Rows of one wgmma.
ROWS = 64
# Running maxima start here and not at -inf, so that no difference of infinities arises.
LOWEST = -1e30

BY_ROW = plgpu.Layout.WGMMA.reduce(1)
BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)

# Running output [64, H], maximum [64] (of scores times log2 e), and sum [64].
Carry = tuple[jax.Array, jax.Array, jax.Array]


def swizzled(dtype: jnp.dtype, columns: int | None = None) -> tuple[Any, ...]:
    """Shared-memory layout of wgmma operands: rows of 128 bytes, or what ``columns`` take."""
    item = jnp.dtype(dtype).itemsize
    row = min(128, columns * item if columns else 128)
    return (plgpu.TilingTransform((8, row // item)), plgpu.SwizzleTransform(row))


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one call; the letters are those of ``pool_attention``.

    Attributes:
        rows: query rows per KV head, T*G padded as the kernel wants them.
        tail: tail tokens, a multiple of ``tile_tokens``.
        slot_bias: whether there is a bias per token of the named slots.
        row_mask: whether every query row has its own tail mask ([64 or rows, E]).
        slot_dtype: dtype of the slots, that of the rest unless they are quantised.
    """

    batch: int
    heads: int
    rows: int
    head_dim: int
    block_size: int
    selected: int
    tail: int
    dtype: jnp.dtype
    slot_bias: bool
    row_mask: bool
    slot_dtype: jnp.dtype

    @property
    def quantised(self) -> bool:
        """Whether the slots are quantised, with a scale each for keys and values."""
        return self.slot_dtype != self.dtype

    @property
    def tile_tokens(self) -> int:
        """Tokens of one tile, TOK."""
        return max(64, self.block_size)

    @property
    def slots_per_tile(self) -> int:
        """Slots read in one step."""
        return self.tile_tokens // self.block_size

    @property
    def steps(self) -> int:
        """Tiles that hold the named slots."""
        return -(-self.selected // self.slots_per_tile)

    @property
    def tail_tiles(self) -> int:
        """Tiles that hold the tail."""
        return self.tail // self.tile_tokens

    @property
    def slot_copies(self) -> int:
        """Copies behind the barrier of a tile of slots."""
        return 2 * self.slots_per_tile + self.slot_bias


@dataclasses.dataclass(frozen=True)
class Operands:
    """References to the operands in global memory, seen from one (request, KV head)."""

    slots: Any
    slot_ids: Any
    tail: Any
    tail_columns: Any
    tail_rows: Any
    slot_bias: Any
    slot_scales: Any


def select(
    shape: Shape, batch: jax.Array, head: jax.Array, refs: Sequence[Any]
) -> tuple[Operands, list[Any]]:
    """The operands of one (request, KV head); one with fewer heads is shared by consecutive ones.

    Masks are shared by all heads, slots and tail by the parts that a head is split in.

    Args:
        shape: says which operands there are.
        batch: request.
        head: KV head.
        refs: of a kernel, from the slots on.

    Returns:
        The operands, and the other references.
    """

    def of_head(ref: Any) -> Any:
        sharing = shape.heads // ref.shape[1]
        return ref.at[batch, head if sharing == 1 else lax.div(head, sharing)]

    slots, slot_ids, tail, tail_columns, *rest = refs
    operands = Operands(
        slots=of_head(slots),
        slot_ids=of_head(slot_ids),
        tail=of_head(tail),
        tail_columns=of_head(tail_columns),
        tail_rows=of_head(rest.pop(0)) if shape.row_mask else None,
        slot_bias=rest.pop(0).at[batch, head] if shape.slot_bias else None,
        slot_scales=rest.pop(0).at[batch, head] if shape.quantised else None,
    )
    return operands, rest


@dataclasses.dataclass(frozen=True)
class Ring:
    """Tiles in shared memory, one of each per stage: keys, values, additive bias per token."""

    keys: Any
    values: Any
    columns: Any
    landed: Any
    tail_landed: Any


# Slot ids of one step.
Ids = tuple[jax.Array, ...]


def step_slots(shape: Shape, operands: Operands, step: jax.Array) -> Ids:
    """Slot ids of one step, any step; -1 for none, also past the end of the list."""
    n, r = shape.slots_per_tile, shape.selected
    ids = []
    for i in range(n):
        index = step * n + i
        slot = operands.slot_ids[lax.min(index, r - 1)]
        ids.append(jnp.where(index < r, slot, jnp.int32(-1)))
    return tuple(ids)


# Scales of the keys of the slots of one step, and of the values.
Scales = tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]


def step_scales(shape: Shape, operands: Operands, step: jax.Array) -> Scales | None:
    """Scales of one step, any step; None if the slots are not quantised."""
    if not shape.quantised:
        return None
    n = shape.slots_per_tile
    index = [lax.min(step * n + i, shape.selected - 1) for i in range(n)]
    keys, values = (tuple(operands.slot_scales[of, i] for i in index) for of in range(2))
    return keys, values


def spread(shape: Shape, scales: Scales | None) -> tuple[jax.Array, jax.Array] | None:
    """The scales of a tile as ``attend`` takes them."""
    return None if scales is None else (_by_token(shape, scales[0]), _by_token(shape, scales[1]))


def _by_token(shape: Shape, per_slot: tuple[jax.Array, ...]) -> jax.Array:
    """One number per slot of a tile, for each of its tokens."""
    if len(per_slot) == 1:
        return per_slot[0]
    token = plgpu.layout_cast(lax.iota(jnp.int32, shape.tile_tokens), BY_COLUMN)
    numbers = jnp.zeros_like(token, dtype=jnp.float32) + per_slot[0]
    for i, value in enumerate(per_slot[1:], start=1):
        numbers = jnp.where(token >= i * shape.block_size, value, numbers)
    return numbers


def widen(narrow: Any, wide: Any) -> None:
    """Converts a quantised tile for the tensor cores; exact, since the scales are left out."""
    values = plgpu.load(narrow, layout=row_layout(narrow.shape[1]), optimized=False)
    if jnp.issubdtype(values.dtype, jnp.floating):
        # Hopper converts e4m3 to float16 only.
        values = values.astype(jnp.float32)
    wide[...] = values.astype(wide.dtype)


def named(ids: Ids) -> jax.Array:
    """Whether a step names any slot."""
    return functools.reduce(lax.max, ids) >= 0


def load_slots(
    shape: Shape, operands: Operands, ring: Ring, stage: jax.Array, step: jax.Array, ids: Ids
) -> None:
    """Starts the copies of the slots of one step; nothing if none is named."""
    largest = functools.reduce(lax.max, ids)
    barrier = ring.landed.at[stage]

    @pl.when(largest >= 0)
    def _load() -> None:
        for i, slot in enumerate(ids):
            # A missing slot is masked, but must hold finite values: take another one's.
            slot = jnp.where(slot >= 0, slot, largest) if len(ids) > 1 else slot
            at = pl.ds(i * shape.block_size, shape.block_size)
            plgpu.copy_gmem_to_smem(operands.slots.at[slot, 0], ring.keys.at[stage, at], barrier)
            plgpu.copy_gmem_to_smem(operands.slots.at[slot, 1], ring.values.at[stage, at], barrier)
        if shape.slot_bias:
            at = pl.ds(
                pl.multiple_of(step * shape.tile_tokens, shape.tile_tokens), shape.tile_tokens
            )
            plgpu.copy_gmem_to_smem(operands.slot_bias.at[at], ring.columns.at[stage], barrier)


def load_tail(
    shape: Shape, operands: Operands, ring: Ring, stage: jax.Array, tile: jax.Array
) -> None:
    """Starts the copies of one tile of the tail."""
    at = pl.ds(pl.multiple_of(tile * shape.tile_tokens, shape.tile_tokens), shape.tile_tokens)
    barrier = ring.tail_landed.at[stage]
    plgpu.copy_gmem_to_smem(operands.tail.at[0, at], ring.keys.at[stage], barrier)
    plgpu.copy_gmem_to_smem(operands.tail.at[1, at], ring.values.at[stage], barrier)
    plgpu.copy_gmem_to_smem(operands.tail_columns.at[at], ring.columns.at[stage], barrier)


def slot_columns(shape: Shape, ring: Ring, stage: jax.Array, ids: Ids) -> jax.Array | None:
    """Additive bias per token of a tile of slots, -inf for slots not named; None if none."""
    if shape.slot_bias:
        # Holds -inf for slots not named, too.
        return plgpu.load(ring.columns.at[stage], layout=BY_COLUMN)
    if shape.slots_per_tile == 1:
        return None
    token = plgpu.layout_cast(lax.iota(jnp.int32, shape.tile_tokens), BY_COLUMN)
    columns = jnp.zeros_like(token, dtype=jnp.float32)
    p = shape.block_size
    for i, slot in enumerate(ids):
        missing = (token >= i * p) & (token < (i + 1) * p) & (slot < 0)
        columns = jnp.where(missing, -jnp.inf, columns)
    return columns


def clear_unseen_values(ring: Ring, stage: jax.Array) -> None:
    """Zeroes values that no row sees: whatever lies there times a weight of 0 must be 0."""
    seen = plgpu.load(ring.columns.at[stage], layout=BY_ROW) > LOWEST
    values = plgpu.load(ring.values.at[stage], layout=plgpu.Layout.WGMMA)
    seen = lax.broadcast_in_dim(seen, values.shape, [0])
    ring.values.at[stage][...] = jnp.where(seen, values, jnp.zeros_like(values))
    plgpu.commit_smem()


def initial(head_dim: int) -> Carry:
    """The softmax over nothing."""
    return (
        plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), BY_ROW),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), BY_ROW),
    )


def attend(
    q: Any,
    keys: Any,
    values: Any,
    carry: Carry,
    *,
    scale: float,
    columns: jax.Array | None = None,
    rows: jax.Array | None = None,
    scales: tuple[jax.Array, jax.Array] | None = None,
    staging: Any = None,
) -> Carry:
    """One tile: ``softmax(scale * q . keys + bias) . values`` added to the running softmax.

    Args:
        q: [64, H] in shared memory.
        keys: [TOK, H] in shared memory.
        values: [TOK, H] in shared memory.
        carry: the state before.
        scale: factor on the dot products.
        columns: additive bias [TOK] shared by the rows; -inf hides a token.
        rows: additive bias [64, TOK]; -inf hides a token from a row.
        scales: factors on keys and on values, one each or [TOK].
        staging: shared memory [64, TOK] for the weights.  None keeps them in registers, which
            the CPU simulator cannot feed to a wgmma.
    """
    acc, largest, total = carry

    def product(accumulator: Any) -> jax.Array:
        plgpu.wgmma(accumulator, q, keys.transpose((1, 0)))
        return accumulator[...]

    s = pl.run_scoped(product, plgpu.ACC((ROWS, keys.shape[0]), jnp.float32))
    # Powers of two: exp2 is the hardware's instruction.
    s = s * (scale * LOG2E)
    if scales is not None:
        s = s * _over_rows(scales[0], s)
    if columns is not None:
        bias = lax.broadcast_in_dim(columns, s.shape, [1])
        # Where hidden, the key may hold anything, so that adding -inf would not do.
        s = jnp.where(bias > LOWEST, s + bias * LOG2E, -jnp.inf)
    if rows is not None:
        s = jnp.where(rows > LOWEST, s + rows * LOG2E, -jnp.inf)
    new_largest = jnp.maximum(largest, s.max(axis=1))
    decay = jnp.exp2(largest - new_largest)
    weights = jnp.exp2(s - lax.broadcast_in_dim(new_largest, s.shape, [0]))
    total = total * decay + weights.sum(axis=1)
    if scales is not None:
        weights = weights * _over_rows(scales[1], weights)
    narrow = weights.astype(values.dtype)
    acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
    if staging is None:
        acc = pl.run_state(lambda ref: plgpu.wgmma(ref, narrow, values))(plgpu.ACC.init(acc))
        return acc, new_largest, total
    staging[...] = narrow
    plgpu.commit_smem()

    def weighted(accumulator: Any) -> jax.Array:
        plgpu.wgmma(accumulator, staging, values)
        return accumulator[...]

    acc = acc + pl.run_scoped(weighted, plgpu.ACC((ROWS, acc.shape[1]), jnp.float32))
    return acc, new_largest, total


def _over_rows(factor: jax.Array, tile: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(factor, tile.shape, [1]) if factor.ndim else factor


def merge(a: Carry, b: Carry) -> Carry:
    """The softmax over both sets of tokens."""
    largest = jnp.maximum(a[1], b[1])
    decay_a, decay_b = jnp.exp2(a[1] - largest), jnp.exp2(b[1] - largest)
    acc = a[0] * lax.broadcast_in_dim(decay_a, a[0].shape, [0])
    acc += b[0] * lax.broadcast_in_dim(decay_b, a[0].shape, [0])
    return acc, largest, a[2] * decay_a + b[2] * decay_b


def finish(carry: Carry) -> tuple[jax.Array, jax.Array]:
    """Output rows, zero where a row saw nothing, and their natural log-sum-exp, -inf there."""
    acc, largest, total = carry
    inverse = jnp.where(total > 0, 1.0 / total, 0.0)
    lse = jnp.where(total > 0, (largest + jnp.log2(total)) * (1.0 / LOG2E), -jnp.inf)
    return acc * lax.broadcast_in_dim(inverse, acc.shape, [0]), lse
