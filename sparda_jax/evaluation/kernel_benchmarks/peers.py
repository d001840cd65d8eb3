"""Attention by other libraries: PyTorch FlexAttention with a block mask, tokamax."""

import functools
import importlib.util
import logging
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from sparda_jax.evaluation.kernel_benchmarks.harness import (
    Row,
    Session,
    Timing,
    benchmark,
    converted,
    time_calls,
)

_logger = logging.getLogger("sparda_jax")

TOKENS = 32768
HEADS, KV_HEADS, HEAD_DIM, TILE, SELECTED = 32, 2, 128, 128, 48


@benchmark("peers/flex_attention")
def flex_attention(session: Session) -> Iterator[Row]:
    """32K tokens, 48 of the 128x128 blocks a row, one random mask for all heads.

    FlexAttention has no lists of its own per token and KV head: this is the work that it is made
    for, 6144 tokens a row as in 96 blocks of 64.  Counted: whole blocks, half the diagonal one.
    """
    timing, operations = _flex_time(session, TOKENS)
    rate = converted(timing, operations * 1e-6)
    yield Row(
        name="peers/flex_attention/shared_blocks/32K",
        timing=rate,
        unit="TFLOP/s",
        better="higher",
        of_roofline=rate.median / 989.0,
    )


@benchmark("peers/tokamax_attention")
def tokamax_attention(session: Session) -> Iterator[Row]:
    """32K tokens, dense and causal, by tokamax's Hopper kernel; no row where it is not installed.

    cuDNN's time for the same work stands beside block_sparse_attention/drift10/32K/time.
    """
    if importlib.util.find_spec("tokamax") is None:
        _logger.warning("tokamax is not installed: no row for it")
        return
    import tokamax

    normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    q = normal(jax.random.key(0), (1, TOKENS, HEADS, HEAD_DIM))
    k, v = (normal(jax.random.key(i), (1, TOKENS, KV_HEADS, HEAD_DIM)) for i in (1, 2))
    attend = functools.partial(
        tokamax.dot_product_attention, is_causal=True, implementation="mosaic"
    )
    timing = time_calls(
        functools.partial(jax.jit(attend), q, k, v), calls=1, repetitions=session.repetitions
    )
    operations = 4.0 * HEADS * HEAD_DIM * TOKENS * (TOKENS + 1) / 2
    rate = converted(timing, operations * 1e-6)
    yield Row(
        name="peers/tokamax_attention/dense_causal/32K",
        timing=rate,
        unit="TFLOP/s",
        better="higher",
        of_roofline=rate.median / 989.0,
    )


def _flex_time(session: Session, tokens: int) -> tuple[Timing, float]:
    """Timing, and operations on the pairs of the mask."""
    import torch
    from torch.nn.attention.flex_attention import BlockMask
    from torch.nn.attention.flex_attention import flex_attention as flex

    rows = tokens // TILE
    generator = torch.Generator().manual_seed(0)
    # Whole blocks of the past, and the diagonal one, which is masked inside.
    lists = torch.zeros((1, 1, rows, rows), dtype=torch.int32)
    counts = torch.zeros((1, 1, rows), dtype=torch.int32)
    for row in range(rows):
        chosen = torch.randperm(row, generator=generator)[: SELECTED - 1].sort().values
        counts[0, 0, row] = len(chosen)
        lists[0, 0, row, : len(chosen)] = chosen.to(torch.int32)
    own = torch.arange(rows, dtype=torch.int32).reshape(1, 1, rows, 1).expand(1, 1, rows, rows)
    mask = BlockMask.from_kv_blocks(
        torch.ones_like(counts).cuda(),
        own.contiguous().cuda(),
        counts.cuda(),
        lists.cuda(),
        BLOCK_SIZE=TILE,
        mask_mod=lambda b, h, q, k: q >= k,
    )
    q = torch.randn((1, HEADS, tokens, HEAD_DIM), dtype=torch.bfloat16, device="cuda")
    k, v = (
        torch.randn((1, KV_HEADS, tokens, HEAD_DIM), dtype=torch.bfloat16, device="cuda")
        for _ in range(2)
    )
    compiled = torch.compile(flex, dynamic=False)

    def call() -> None:
        compiled(q, k, v, block_mask=mask, enable_gqa=True)
        torch.cuda.synchronize()

    with torch.no_grad():
        call()  # compiles
        timing = time_calls(call, calls=1, repetitions=session.repetitions)
    pairs = int(counts.sum()) * TILE * TILE + rows * TILE * (TILE + 1) // 2
    return timing, 4.0 * HEADS * HEAD_DIM * pairs
