"""Block-sparse prefill attention on Hopper (Mosaic GPU).

One thread block takes a tile of neighbouring tokens of one KV head, all G query heads of each:
2 x 64 rows, one 64-row half per consumer warpgroup, as a wgmma wants.  A producer warpgroup
walks the union of the tile's block lists (``plan``) and copies keys and values by TMA into a
ring of stages of 128 keys.  Each block comes with one bit per token; a row whose token did not
select the block gets probability zero through its row constant, ``exp2(s - inf)``, which costs
nothing per element.  Element masks are used only for blocks that lie partly in a token's
future.  The softmax is the online one; the two consumers alternate on the tensor cores
(FlashAttention-3).

Ran on an H200 (jax 0.11.2): right on all shapes tried, bit-identical when repeated.
"""

import dataclasses
import functools
import math
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import interpret
from pallas_kernels.block_sparse_attention import plan as planning
from pallas_kernels.block_sparse_attention import tuning as tunings

ROWS = 64
KEYS = tunings.STAGE_KEYS
_ROW = plgpu.Layout.WGMMA.reduce(1)
_LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static sizes.

    Attributes:
        batch: B.
        kv_heads: K.
        blocks: M.
        block_size: P.
        head_dim: H.
        padded: rows of a token, G rounded up to a power of two.
        unit_rows: query rows that lie together in memory, G or 64.
        tiles: tiles of 128 rows in the tokens.
        words: 32-bit words that hold one bit per block.
    """

    batch: int
    kv_heads: int
    blocks: int
    block_size: int
    head_dim: int
    padded: int
    unit_rows: int
    tiles: int
    words: int

    @property
    def group(self) -> int:
        """Tokens of one consumer."""
        return ROWS // self.padded

    @property
    def units(self) -> int:
        """Contiguous runs of query rows of one consumer."""
        return ROWS // self.unit_rows

    @property
    def per_stage(self) -> int:
        """Blocks of one stage."""
        return KEYS // self.block_size

    @property
    def mask_words(self) -> int:
        """Words that hold one bit per token of a consumer."""
        return max(1, self.group // 32)


def kernel(shape: Shape, tuning: tunings.Tuning, scale: float, refs: dict[str, Any]) -> None:
    """Warpgroups 0 and 1 compute, 2 copies."""
    wg = lax.axis_index("wg")
    b, k = lax.axis_index("b"), lax.axis_index("k")
    # Late tiles are the long ones: first, so that the last wave is short.
    x = shape.tiles - 1 - lax.axis_index("x")
    in_stages = lambda count: lax.div(count + (shape.per_stage - 1), shape.per_stage)
    counts = [refs["counts"][b, k, x, c] for c in range(4)]
    stages = [in_stages(c) for c in counts]

    @pl.when(wg < 2)
    def _consumer() -> None:
        plgpu.set_max_registers(232, action="increase")
        _consume(shape, tuning, scale, refs, stages, (b, k, x), wg)

    @pl.when(wg == 2)
    def _producer() -> None:
        plgpu.set_max_registers(40, action="decrease")
        _produce(shape, tuning, refs, counts, stages, (b, k, x))


# ---- producer -------------------------------------------------------------------------------


def _produce(
    shape: Shape, tuning: tunings.Tuning, refs: dict[str, Any], counts: list[Any],
    stages: list[Any], where: tuple[Any, Any, Any],
) -> None:  # fmt: skip
    """Fills the ring: shared blocks, then the two consumers' own in turns, then partial ones."""
    b, k, x = where
    fill = functools.partial(_fill, shape, tuning, refs, where)
    take = functools.partial(_take, shape, refs["classes"].at[b, k, x])
    start = lambda c: (jnp.int32(0), refs["classes"][b, k, x, c, 0], jnp.int32(0))

    def shared(i: Any, walk: Any) -> Any:
        return take(planning.SHARED, i, counts[0], walk, functools.partial(fill, i))

    lax.fori_loop(0, stages[0], shared, start(planning.SHARED))
    done = stages[0]
    if tuning.split:
        base = done
        pairs = jnp.maximum(stages[1], stages[2])

        def own(i: Any, walks: Any) -> Any:
            first, second = walks
            to_first = functools.partial(fill, base + 2 * i)
            to_second = functools.partial(fill, base + 2 * i + 1)
            first = take(planning.FIRST, i, counts[1], first, to_first)
            return first, take(planning.SECOND, i, counts[2], second, to_second)

        lax.fori_loop(0, pairs, own, (start(planning.FIRST), start(planning.SECOND)))
        done = base + 2 * pairs
    last = done

    def partial(i: Any, walk: Any) -> Any:
        return take(planning.PARTIAL, i, counts[3], walk, functools.partial(fill, last + i))

    lax.fori_loop(0, stages[3], partial, start(planning.PARTIAL))
    # The simulator wants every release observed before the barriers go.
    for slot in range(tuning.stages):

        @pl.when(slot < last + stages[3])
        def _drain(slot: int = slot) -> None:
            plgpu.barrier_wait(refs["k_free"].at[slot])
            plgpu.barrier_wait(refs["v_free"].at[slot])


def _take(shape: Shape, classes: Any, c: int, i: Any, count: Any, walk: Any, fill: Any) -> Any:
    """The next blocks of class ``c`` into one stage; past the end the last one again, unused.

    ``walk`` is (word index, its remaining bits, last block).
    """
    word, bits, block = walk
    blocks, valid = [], []
    for u in range(shape.per_stage):
        exists = i * shape.per_stage + u < count

        def empty(state: Any, exists: Any = exists) -> Any:
            return (state[1] == 0) & exists

        def advance(state: Any) -> Any:
            return state[0] + 1, classes[c, state[0] + 1]

        word, bits = lax.while_loop(empty, advance, (word, bits))
        lowest = bits & -bits
        block = jnp.where(exists, word * 32 + (31 - lax.clz(lowest)), block)
        bits = bits ^ lowest
        blocks.append(block)
        valid.append(exists)
    fill(blocks, valid)
    return word, bits, block


def _fill(
    shape: Shape, tuning: tunings.Tuning, refs: dict[str, Any], where: tuple[Any, Any, Any],
    stage: Any, blocks: list[Any], valid: list[Any],
) -> None:  # fmt: skip
    """Copies one stage of blocks and says which tokens want them."""
    b, k, x = where
    slot = lax.rem(stage, jnp.int32(tuning.stages))
    words = shape.mask_words
    masks = []
    for block, exists in zip(blocks, valid, strict=True):
        for side in range(2):
            for bits in _member_bits(shape, refs["members"].at[b, k], 2 * x + side, block):
                masks.append(jnp.where(exists, bits, 0))

    reused = stage >= tuning.stages
    pl.when(reused)(lambda: plgpu.barrier_wait(refs["k_free"].at[slot]))
    for u, block in enumerate(blocks):
        refs["info"][slot, u, 0] = block
        for i in range(2 * words):
            refs["info"][slot, u, 1 + i] = masks[u * 2 * words + i]
    # All four warps have stored before the copy's arrival lets a consumer read.
    plgpu.commit_smem()
    for which, name in ((0, "k"), (1, "v")):
        if which:
            pl.when(reused)(lambda: plgpu.barrier_wait(refs["v_free"].at[slot]))
        for u, block in enumerate(blocks):
            row = ((b * shape.kv_heads + k) * shape.blocks + block) * 2 + which
            plgpu.copy_gmem_to_smem(
                refs["kv"].at[row],
                refs[f"{name}_smem"].at[slot, pl.ds(u * shape.block_size, shape.block_size)],
                refs[f"{name}_full"].at[slot],
            )


def _member_bits(shape: Shape, members: Any, group: Any, block: Any) -> list[Any]:
    """Words of one bit per token of the group: who selected the block."""
    tokens = shape.group
    first = group * tokens
    row = lax.div(first, 32)
    if tokens >= 32:
        return [members[row + w, block] for w in range(shape.mask_words)]
    bits = lax.shift_right_arithmetic(members[row, block], lax.rem(first, 32))
    return [bits & ((1 << tokens) - 1)]


# ---- consumers ------------------------------------------------------------------------------


def _consume(
    shape: Shape, tuning: tunings.Tuning, scale: float, refs: dict[str, Any],
    stages: list[Any], where: tuple[Any, Any, Any], wg: Any,
) -> None:  # fmt: skip
    """Attention of one 64-row half of the tile."""
    b, k, x = where
    units = shape.units
    if shape.unit_rows == ROWS:
        unit = lambda e: (b * shape.tiles * 2 + 2 * x + wg) * shape.kv_heads + k
    else:
        token = (2 * x + wg) * shape.group
        unit = lambda e: (b * shape.tiles * 2 * shape.group + token + e) * shape.kv_heads + k
    part = lambda e: refs["q_smem"].at[wg, pl.ds(e * shape.unit_rows, shape.unit_rows)]
    for e in range(units):
        plgpu.copy_gmem_to_smem(refs["q"].at[unit(e)], part(e), refs["q_full"].at[wg])
    positions = plgpu.load(
        refs["positions"].at[b, x, pl.ds(wg * ROWS, ROWS)], layout=_ROW, optimized=False
    )
    plgpu.barrier_wait(refs["q_full"].at[wg])

    row = lambda value: plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), _ROW)
    acc = jnp.full((ROWS, shape.head_dim), 0, jnp.float32)
    state = (plgpu.layout_cast(acc, plgpu.Layout.WGMMA), row(-jnp.inf), row(0))
    step = functools.partial(_step, shape, tuning, scale, refs, where, wg)
    turn = functools.partial(_take_turn, refs["turn"])

    if tuning.ping_pong:
        pl.when(wg == 1)(turn)
    shared = functools.partial(step, ping_pong=tuning.ping_pong)
    state = lax.fori_loop(0, stages[0], shared, state)
    if tuning.ping_pong:
        pl.when(wg == 0)(turn)
    done = stages[0]
    if tuning.split:
        base = done
        pairs = jnp.maximum(stages[1], stages[2])
        skip = functools.partial(_skip, tuning, refs)

        def own(i: Any, state: Any) -> Any:
            pl.when(wg == 1)(lambda: skip(base + 2 * i))
            state = step(base + 2 * i + wg, state)
            pl.when(wg == 0)(lambda: skip(base + 2 * i + 1))
            return state

        def others(i: Any, _: None) -> None:
            skip(base + 2 * i)
            skip(base + 2 * i + 1)

        mine = jnp.where(wg == 0, stages[1], stages[2])
        state = lax.fori_loop(0, mine, own, state)
        lax.fori_loop(mine, pairs, others, None)
        done = base + 2 * pairs
    partial = functools.partial(step, positions=positions)
    acc, top, total = lax.fori_loop(done, done + stages[3], partial, state)

    inverse = jnp.where(total > 0, 1 / total, row(0))
    acc = acc * lax.broadcast_in_dim(inverse, acc.shape, [0])
    refs["q_smem"][wg] = acc.astype(refs["q"].dtype)
    if "lse" in refs:
        # log2(total) of an empty row is -inf, as is its top.
        lse = (top + jnp.log2(total)) * (1 / _LOG2E)
        refs["lse"][b, k, pl.ds((2 * x + wg) * ROWS, ROWS)] = lse
    plgpu.commit_smem()
    for e in range(units):
        plgpu.copy_smem_to_gmem(part(e), refs["out"].at[unit(e)])
    plgpu.wait_smem_to_gmem(0)


def _take_turn(barrier: Any) -> None:
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def _skip(tuning: tunings.Tuning, refs: dict[str, Any], stage: Any) -> None:
    """Releases a stage that only the other consumer needs, in step with the ring."""
    slot = lax.rem(stage, jnp.int32(tuning.stages))
    for name in ("k", "v"):
        plgpu.barrier_wait(refs[f"{name}_full"].at[slot])
        plgpu.barrier_arrive(refs[f"{name}_free"].at[slot])


def _step(
    shape: Shape, tuning: tunings.Tuning, scale: float, refs: dict[str, Any],
    where: tuple[Any, Any, Any], wg: Any, stage: Any, state: Any, *,
    ping_pong: bool = False, positions: Any = None,
) -> Any:  # fmt: skip
    """One stage of 128 keys; ``state`` is (output, row maximum in log2 units, row sum)."""
    acc, top, total = state
    p, parts = shape.block_size, range(shape.per_stage)
    slot = lax.rem(stage, jnp.int32(tuning.stages))
    turn = functools.partial(_take_turn, refs["turn"])
    plgpu.barrier_wait(refs["k_full"].at[slot])
    info = [_wanted(shape, refs["info"], slot, u, wg) for u in parts]

    def scores(ref: Any) -> Any:
        plgpu.wgmma(ref, refs["q_smem"].at[wg], refs["k_smem"].at[slot].transpose((1, 0)))
        if ping_pong:
            turn()
        return ref[...]

    s = pl.run_scoped(scores, plgpu.ACC((ROWS, KEYS), jnp.float32))
    plgpu.barrier_arrive(refs["k_free"].at[slot])
    s = [s[:, u * p : (u + 1) * p] for u in parts]
    if "bias" in refs:
        s = [_biased(shape, scale, refs["bias"], where, info[u][0], s[u]) for u in parts]
    if positions is not None:
        s = [_causal(s[u], positions - info[u][0] * p) for u in parts]

    factor = scale * _LOG2E
    nothing = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), _ROW)
    new_top = top
    for u in parts:
        highest = s[u].max(axis=1) * factor
        new_top = jnp.maximum(new_top, jnp.where(info[u][1], highest, nothing))
    # Where nothing is visible yet, subtract 0: -inf - (-inf) would be NaN.
    base = jnp.where(new_top == -jnp.inf, jnp.zeros_like(new_top), new_top)
    alpha = jnp.exp2(top - base)
    probabilities = []
    total = total * alpha
    for u in parts:
        constant = jnp.where(info[u][1], -base, nothing)
        e = jnp.exp2(s[u] * factor + lax.broadcast_in_dim(constant, s[u].shape, [0]))
        total = total + e.sum(axis=1)
        probabilities.append(e.astype(refs["q"].dtype))
    acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
    if p < 64:  # The depth of a product is a multiple of 64 keys.
        probabilities = [jnp.concatenate(probabilities, axis=1)]
    acc, new_top, total, *probabilities = lax.optimization_barrier(
        (acc, new_top, total, *probabilities)
    )
    if ping_pong:
        plgpu.barrier_arrive(refs["turn"])
    plgpu.barrier_wait(refs["v_full"].at[slot])
    if ping_pong:
        plgpu.barrier_wait(refs["turn"])

    depth = probabilities[0].shape[1]
    values = [refs["v_smem"].at[slot, pl.ds(u * depth, depth)] for u in range(len(probabilities))]
    acc = _accumulated(acc, probabilities, values)
    plgpu.barrier_arrive(refs["v_free"].at[slot])
    return acc, new_top, total


def _accumulated(acc: Any, left: list[Any], right: list[Any]) -> Any:
    """acc + sum of left[u] @ right[u]: registers times shared memory."""
    if interpret.is_active():
        # The simulator of jax 0.11.2 knows neither run_state nor a left operand in registers.
        for a, b in zip(left, right, strict=True):
            acc = acc + jnp.dot(a, b[...], preferred_element_type=jnp.float32)
        # An ordinary read, unlike a wgmma's, is fenced off from the copy that overwrites it.
        plgpu.commit_smem()
        return acc

    def multiply(ref: Any) -> None:
        for a, b in zip(left, right, strict=True):
            plgpu.wgmma(ref, a, b)

    return pl.run_state(multiply)(plgpu.ACC.init(acc))


def _wanted(shape: Shape, info: Any, slot: Any, u: int, wg: Any) -> tuple[Any, Any]:
    """Block id and which of the 64 rows selected it."""
    words = shape.mask_words
    masks = [info[slot, u, 1 + wg * words + w] for w in range(words)]
    token = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=_ROW)
    token = lax.shift_right_logical(token, jnp.int32(shape.padded.bit_length() - 1))
    spread = lambda mask: plgpu.layout_cast(jnp.full((ROWS,), mask, jnp.int32), _ROW)
    bits = spread(masks[0])
    if words == 2:
        bits = jnp.where(token < 32, bits, spread(masks[1]))
    return info[slot, u, 0], (lax.shift_right_logical(bits, token & 31) & 1) != 0


def _biased(
    shape: Shape, scale: float, bias: Any, where: tuple[Any, Any, Any], block: Any, s: Any
) -> Any:
    """s + bias / scale: the factor applied later makes it the scaled score plus bias."""
    b, k, _ = where
    row = bias.at[(b * shape.kv_heads + k) * shape.blocks + block]
    column = plgpu.load(row, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
    return s + lax.broadcast_in_dim(column * (1 / scale), s.shape, [1])


def _causal(s: Any, last: Any) -> Any:
    """-inf after key ``last`` of the block."""
    key = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
    return jnp.where(key <= lax.broadcast_in_dim(last, s.shape, [0]), s, -jnp.inf)
