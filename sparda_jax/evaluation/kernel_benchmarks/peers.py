"""PyTorch FlexAttention with a block mask, the peer of block-sparse prefill."""

from collections.abc import Iterator

from sparda_jax.evaluation.kernel_benchmarks.harness import (
    Row,
    Session,
    Timing,
    benchmark,
    converted,
    time_calls,
)

HEADS, KV_HEADS, HEAD_DIM, TILE, SELECTED = 32, 2, 128, 128, 48


@benchmark("peers/flex_attention")
def flex_attention(session: Session) -> Iterator[Row]:
    """32K tokens, 48 of the 128x128 blocks a row, one random mask for all heads.

    FlexAttention has no lists of its own per token and KV head: this is the work that it is made
    for, 6144 tokens a row as in 96 blocks of 64.  Counted: whole blocks, half the diagonal one.
    """
    timing, operations = _time(session, 32768)
    rate = converted(timing, operations * 1e-6)
    yield Row(
        name="peers/flex_attention/shared_blocks/32K",
        timing=rate,
        unit="TFLOP/s",
        better="higher",
        of_roofline=rate.median / 989.0,
    )


def _time(session: Session, tokens: int) -> tuple[Timing, float]:
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
        timing = time_calls(call, calls=1, repetitions=session.repetitions)
    pairs = int(counts.sum()) * TILE * TILE + rows * TILE * (TILE + 1) // 2
    return timing, 4.0 * HEADS * HEAD_DIM * pairs
