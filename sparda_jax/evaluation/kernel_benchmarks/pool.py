"""Pool attention: one query token (bound by memory) and a block of them (bound by compute)."""

import functools
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.pool_attention import mosaic, pool_attention
from pallas_kernels.pool_attention.tuning import RowsConfig
from sparda_jax.evaluation.kernel_benchmarks.harness import Row, Session, benchmark, converted

SELECTED, BLOCK, HEAD_DIM = 96, 64, 128
# Slots that no request names: ids are not simply 0..R-1.
SPARE = 8
# Bytes of distinct slots behind one timing; the L2 cache holds 60 MB.
ROTATE = 150e6


@benchmark("pool_attention/W1")
def one_token(session: Session) -> Iterator[Row]:
    """N=32, K=2, tail of 64: bytes of the slots read, as a share of copy bandwidth."""
    for batch in (1, 8, 32, 64):
        variants, mask = _variants(batch, 1, heads=2, group=16), _mask(batch, 1)
        timing, outputs = session.time(_call, variants, shared=(mask,))
        moved = _bytes_read(batch)
        rate = converted(timing, moved * 1e-3)
        copy = _copy_rate(session, moved)
        yield Row(
            name=f"pool_attention/W1/B{batch}",
            timing=rate,
            unit="GB/s",
            better="higher",
            target=0.85 * session.copy_bandwidth * 1e-9 if batch >= 8 else None,
            of_roofline=rate.median * 1e9 / session.copy_bandwidth,
            peers={"copy of as many bytes": copy},
            error=_error((*variants[-1], mask), outputs[-1]) if session.refcheck else None,
        )


@benchmark("pool_attention/launches")
def launches(session: Session) -> Iterator[Row]:
    """``one_token`` with other launch shapes than the default: thread blocks x warpgroups."""
    tried = {
        8: ((3, 3), (4, 2), (4, 3), (5, 2), (5, 3), (6, 3)),
        32: ((1, 2), (1, 3), (2, 2), (2, 3)),
        64: ((1, 2), (1, 3)),
    }
    for batch, shapes in tried.items():
        variants, mask = _variants(batch, 1, heads=2, group=16), _mask(batch, 1)
        for splits, warpgroups in shapes:
            config = RowsConfig(splits=splits, stages=4, warpgroups=warpgroups)
            call = functools.partial(
                mosaic.pool_attention,
                slot_bias=None,
                tail_bias=None,
                slot_scales=None,
                scale=HEAD_DIM**-0.5,
                return_lse=False,
                config=config,
            )
            timing, outputs = session.time(call, variants, shared=(mask,))
            rate = converted(timing, _bytes_read(batch) * 1e-3)
            yield Row(
                name=f"pool_attention/launches/B{batch}/{splits}x{warpgroups}",
                timing=rate,
                unit="GB/s",
                better="higher",
                of_roofline=rate.median * 1e9 / session.copy_bandwidth,
                error=_error((*variants[-1], mask), outputs[-1]) if session.refcheck else None,
            )


@benchmark("pool_attention/quantised")
def quantised(session: Session) -> Iterator[Row]:
    """As ``one_token`` with int8 and e4m3 slots: half the bytes, counted as they are stored."""
    for batch in (8, 32, 64):
        mask = _mask(batch, 1)
        variants = _variants(batch, 1, heads=2, group=16)
        for name, dtype in (("int8", jnp.int8), ("e4m3", jnp.float8_e4m3fn)):
            narrow = [(q, *_narrow(slots, dtype), *rest) for q, slots, *rest in variants]
            timing, outputs = session.time(_call_quantised, narrow, shared=(mask,))
            stored = batch * 2 * 2 * BLOCK * HEAD_DIM * (SELECTED + 2)
            rate = converted(timing, stored * 1e-3)
            error = None
            if session.refcheck:
                error = _error_quantised((*narrow[-1], mask), outputs[-1])
            yield Row(
                name=f"pool_attention/W1/B{batch}/{name}",
                timing=rate,
                unit="GB/s",
                better="higher",
                of_roofline=rate.median * 1e9 / session.copy_bandwidth,
                error=error,
            )


def _bytes_read(batch: int) -> int:
    """Slots and tail of all requests, K=2."""
    return batch * 2 * (SELECTED + 1) * 2 * BLOCK * HEAD_DIM * 2


def _copy_rate(session: Session, moved: float) -> float:
    """GB/s of a device copy that reads and writes ``moved`` bytes in all, timed the same way."""
    elements = int(moved) // 8
    count = max(2, min(4, round(ROTATE / (4 * elements))))
    arrays = [(jnp.arange(elements, dtype=jnp.float32) + i,) for i in range(count)]
    timing, _ = session.time(lambda x: -x, arrays)
    return converted(timing, moved * 1e-3).median


@benchmark("pool_attention/W32")
def token_block(session: Session) -> Iterator[Row]:
    """32 query tokens a request, N=32: operations on the selected tokens and the tail."""
    for batch, heads, group in ((1, 2, 16), (8, 2, 16), (32, 2, 16), (64, 2, 16), (32, 8, 4)):
        variants, mask = _variants(batch, 32, heads=heads, group=group), _mask(batch, 32)
        timing, outputs = session.time(_call, variants, shared=(mask,))
        operations = 4 * batch * 32 * heads * group * (SELECTED + 1) * BLOCK * HEAD_DIM
        yield Row(
            name=f"pool_attention/W32/B{batch}/G{group}",
            timing=converted(timing, operations * 1e-6),
            unit="TFLOP/s",
            better="higher",
            target=400.0 if batch >= 32 else None,
            error=_error((*variants[-1], mask), outputs[-1]) if session.refcheck else None,
        )


def _call(*operands: jax.Array) -> jax.Array:
    out = pool_attention(*operands, implementation="mosaic")
    assert isinstance(out, jax.Array)
    return out


def _call_quantised(
    q: jax.Array,
    slots: jax.Array,
    scales: jax.Array,
    ids: jax.Array,
    tail: jax.Array,
    mask: jax.Array,
    implementation: Literal["mosaic", "xla"] = "mosaic",
) -> jax.Array:
    out = pool_attention(
        q, slots, ids, tail, mask, slot_scales=scales, implementation=implementation
    )
    assert isinstance(out, jax.Array)
    return out


@jax.jit(static_argnums=1)
def _narrow(slots: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Slots of an 8-bit dtype and the scales of their keys and values."""
    wide = slots.astype(jnp.float32)
    most = 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
    scales = jnp.abs(wide).max(axis=(4, 5)) / most
    wide = wide / scales[..., None, None]
    return (jnp.rint(wide) if dtype == jnp.int8 else wide).astype(dtype), scales


def _error_quantised(operands: tuple[jax.Array, ...], output: jax.Array) -> float:
    """Relative L2 error of the first requests against the reference on the same 8-bit slots."""
    q, slots, scales, ids, tail, mask = (operand[:4] for operand in operands)
    wide = (q.astype(jnp.float32), slots, scales, ids, tail.astype(jnp.float32), mask)
    with jax.default_matmul_precision("highest"):
        expected = _call_quantised(*wide, implementation="xla")
    difference = output[:4].astype(jnp.float32) - expected
    return float(jnp.linalg.norm(difference) / jnp.linalg.norm(expected))


def _variants(batch: int, tokens: int, *, heads: int, group: int) -> list[tuple[jax.Array, ...]]:
    rng = np.random.default_rng(batch)
    slots = SELECTED + SPARE
    size = batch * heads * slots * 2 * BLOCK * HEAD_DIM * 2
    variants: list[tuple[jax.Array, ...]] = []
    for i in range(max(2, min(4, round(ROTATE / size)))):
        keys = jax.random.split(jax.random.key(i), 3)
        ids = np.stack([rng.permutation(slots)[:SELECTED] for _ in range(batch * heads)])
        variants.append(
            (
                _normal(keys[0], (batch, tokens, heads * group, HEAD_DIM)),
                _normal(keys[1], (batch, heads, slots, 2, BLOCK, HEAD_DIM)),
                jnp.asarray(ids.reshape(batch, heads, SELECTED), jnp.int32),
                _normal(keys[2], (batch, heads, 2, BLOCK, HEAD_DIM)),
            )
        )
    return variants


def _mask(batch: int, tokens: int) -> jax.Array:
    """A tail of 37 tokens; one mask for all layers of a model, as in the engine."""
    return jnp.broadcast_to(jnp.arange(BLOCK) < 37, (batch, tokens, BLOCK))


@jax.jit(static_argnums=1)
def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16)


def _error(operands: tuple[jax.Array, ...], output: jax.Array) -> float:
    """Relative L2 error of the first requests, against the reference in float32."""
    few = [
        operand[:4].astype(jnp.float32 if operand.dtype == jnp.bfloat16 else operand.dtype)
        for operand in operands
    ]
    with jax.default_matmul_precision("highest"):
        expected = pool_attention(*few, implementation="xla")
    assert isinstance(expected, jax.Array)
    difference = output[:4].astype(jnp.float32) - expected
    return float(jnp.linalg.norm(difference) / jnp.linalg.norm(expected))
