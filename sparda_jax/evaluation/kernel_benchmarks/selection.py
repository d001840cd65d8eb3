"""Block selection in decode: one query token a request, 128K tokens of context."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.block_selection import (
    Selection,
    select_blocks_forecast,
    select_blocks_multi_head,
)
from pallas_kernels.geometry import BlockGeometry
from sparda_jax.evaluation.kernel_benchmarks.harness import Row, Session, benchmark

TOKENS, HEADS, GROUP, HEAD_DIM = 131072, 2, 16, 128
GEOMETRY = BlockGeometry(64, 32, 16)
# Complete windows of 32 tokens, one every 16.
CAPACITY = TOKENS // 16 - 1
RULES: dict[str, Any] = {
    "num_blocks": TOKENS // 64,
    "geometry": GEOMETRY,
    "init_blocks": 1,
    "local_blocks": 8,
    "budget": 96,
}
# Microseconds on top of 1.5 times the time to read the keys at copy bandwidth.
ALLOWANCE = 15.0


@benchmark("block_selection/forecast/decode")
def forecast(session: Session) -> Iterator[Row]:
    """Forecast selection, R=96."""
    yield from _decode(session, "forecast", select_blocks_forecast, HEADS, 1.0)


@benchmark("block_selection/multi_head/decode")
def multi_head(session: Session) -> Iterator[Row]:
    """InfLLM-V2 selection, G=16: twice the time of the Forecast target."""
    yield from _decode(session, "multi_head", select_blocks_multi_head, HEADS * GROUP, 2.0)


def _decode(
    session: Session,
    name: str,
    select: Callable[..., Selection],
    query_heads: int,
    allowance: float,
) -> Iterator[Row]:
    for batch in (8, 32, 64):
        read = batch * HEADS * CAPACITY * HEAD_DIM * 2
        variants = _variants(batch, query_heads, max(2, min(4, round(150e6 / read))))
        call = functools.partial(select, **RULES, implementation="mosaic")
        timing, outputs = session.time(call, variants)
        floor = read / session.copy_bandwidth * 1e6
        peer = functools.partial(select, **RULES, implementation="xla")
        reference_timing, expected = session.time(peer, variants[:2], loops=2)
        yield Row(
            name=f"block_selection/{name}/decode/128K/B{batch}",
            timing=timing,
            unit="us",
            better="lower",
            target=allowance * (1.5 * floor + ALLOWANCE),
            of_roofline=floor / timing.median,
            peers={"xla": reference_timing.median},
            error=_disagreement(outputs[1], expected[1]) if session.refcheck else None,
        )


def _variants(batch: int, query_heads: int, count: int) -> list[tuple[jax.Array, ...]]:
    position = jnp.full((batch, 1), TOKENS - 1, jnp.int32)
    variants: list[tuple[jax.Array, ...]] = []
    for i in range(count):
        first, second = jax.random.split(jax.random.key(i))
        variants.append(
            (
                jax.random.normal(first, (batch, 1, query_heads, HEAD_DIM), jnp.bfloat16),
                _keys(second, (batch, HEADS, CAPACITY, HEAD_DIM)),
                position // GEOMETRY.block_size,
                GEOMETRY.complete_windows(position),
            )
        )
    return variants


@jax.jit(static_argnums=1)
def _keys(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16)


def _disagreement(got: Selection, expected: Selection) -> float:
    """Share of the blocks chosen differently (rounding decides near ties)."""
    size = RULES["num_blocks"]
    chosen = [jax.nn.one_hot(s.ids, size, dtype=jnp.int8).sum(axis=3) for s in (got, expected)]
    return float((chosen[0] != chosen[1]).sum() / (2 * expected.count.sum()))
