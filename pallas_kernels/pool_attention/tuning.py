"""Launch shapes of the pool-attention kernels."""

from dataclasses import dataclass

# Shared memory of one Hopper multiprocessor that a thread block may use.
SHARED_BYTES = 227 * 1024
# Thread blocks that keep the memory busy.
ENOUGH = 54
# Largest cluster of thread blocks.  16 clusters of 7 or 8 do not all find room at once on an H200
# (8 requests, 2 KV heads: 30 us; clusters of 5 or 6 took 22); with ``ENOUGH`` there are fewer.
MAX_SPLITS = 8


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
    """As few as keep the memory busy: to merge splits costs about 5 us.

    Args:
        pairs: B * K.
        steps: tiles of slots per pair; each thread block should have four.
    """
    return max(1, min(MAX_SPLITS, -(-ENOUGH // pairs), steps // 4))
