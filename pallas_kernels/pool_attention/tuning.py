"""Launch shapes of the pool-attention kernels."""

from dataclasses import dataclass

# Multiprocessors of an H100 or H200, and what one thread block may use of its shared memory.
MULTIPROCESSORS = 132
SHARED_BYTES = 227 * 1024
# Largest cluster of thread blocks.  16 clusters of 7 or 8 do not all find room at once on an H200
# (8 requests, 2 KV heads: 30 us; clusters of 5 take 21, of 4 take 23).
MAX_SPLITS = 5


@dataclass(frozen=True)
class RowsConfig:
    """Launch of the kernel for few query rows.

    Attributes:
        splits: thread blocks per (request, KV head).
        stages: tiles in flight per warpgroup.
    """

    splits: int
    stages: int

    def __post_init__(self) -> None:
        for name in ("splits", "stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def splits_for(pairs: int, steps: int) -> int:
    """Enough thread blocks to fill the machine once; a second wave would wait for the first.

    Args:
        pairs: B * K.
        steps: tiles of slots per pair; each thread block should have four.
    """
    return max(1, min(MAX_SPLITS, MULTIPROCESSORS // pairs, steps // 4))
