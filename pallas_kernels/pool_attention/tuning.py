"""Launch shapes of the pool-attention kernels."""

from dataclasses import dataclass

# Shared memory of one Hopper multiprocessor that a thread block may use.
SHARED_BYTES = 227 * 1024
# Multiprocessors of an H100 or H200.
MULTIPROCESSORS = 132
# Thread blocks of a cluster: 8 run everywhere, but 16 clusters of 7 or 8 do not all find room at
# once on an H200 (8 requests, 2 KV heads: 30 us; clusters of 5: 21 to 22, of 4: 23).
MAX_SPLITS, MAX_SPLITS_OF_MANY = 8, 5


@dataclass(frozen=True)
class RowsConfig:
    """Launch of the kernel for few query rows.

    Attributes:
        splits: thread blocks per (request, KV head).
        stages: tiles in flight per warpgroup, at most.
        warpgroups: of a thread block.  Two read 52 GB/s per multiprocessor, so that 64 thread
            blocks cannot saturate the memory; with three they should (not measured yet).
    """

    splits: int
    stages: int
    warpgroups: int = 2

    def __post_init__(self) -> None:
        for name in ("splits", "stages", "warpgroups"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def splits_for(pairs: int, steps: int) -> int:
    """Enough thread blocks to fill the machine once; a second wave would wait for the first.

    Args:
        pairs: B * K.
        steps: tiles of slots per pair; each thread block should have four.
    """
    most = MAX_SPLITS if pairs <= 8 else MAX_SPLITS_OF_MANY
    return max(1, min(most, MULTIPROCESSORS // pairs, steps // 4))
