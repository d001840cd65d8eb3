"""Launch shapes of the pool-attention kernels."""

from dataclasses import dataclass

# Multiprocessors of an H100 or H200, and what one thread block may use of its shared memory.
MULTIPROCESSORS = 132
SHARED_BYTES = 227 * 1024


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
    return max(1, min(MULTIPROCESSORS // pairs, steps // 4))
