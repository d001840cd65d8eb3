"""Launch shapes of the pool-attention kernels."""

from dataclasses import dataclass

# Shared memory of one Hopper multiprocessor that a thread block may use.
SHARED_BYTES = 227 * 1024
# Thread blocks that saturate the memory of an H200, with three warpgroups each.
SATURATING = 64
# Thread blocks of a cluster, at most.
MAX_SPLITS = 8
# Of an H200; each runs one thread block of the kernel for many rows.
MULTIPROCESSORS = 132
# Tiles in flight per warpgroup, at most; shared memory has room for two or three of 32 KiB.
MAX_STAGES = 4


@dataclass(frozen=True)
class RowsConfig:
    """Launch of the kernel for few query rows; of that for many, splits and stages.

    Attributes:
        splits: thread blocks per (request, KV head); for many rows, parts that a KV head is cut in.
        stages: tiles in flight per warpgroup, at most.
        warpgroups: of a thread block.
    """

    splits: int
    stages: int
    warpgroups: int

    def __post_init__(self) -> None:
        for name in ("splits", "stages", "warpgroups"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def rows_config(pairs: int, steps: int, tile_tokens: int) -> RowsConfig:
    """The default launch.

    Measured on an H200 (96 slots of 64, K=2, thread blocks x warpgroups): B=32 57.4 us with 1 x 3,
    57.6 with 2 x 3, 59.3 with 2 x 2; B=8 21.4 with 4 x 3, 21.8 with 6 x 3, 21.9 with 5 x 2, 24.2
    with 3 x 3; B=64 101 with 1 x 3, 103 with 1 x 2.

    Args:
        pairs: B * K.
        steps: tiles of slots per pair; each thread block should have four.
        tile_tokens: of one tile.
    """
    splits = max(1, min(MAX_SPLITS, SATURATING // pairs, steps // 4))
    # Three warpgroups have 168 registers a thread: not enough for the scores of larger tiles.
    return RowsConfig(splits=splits, stages=MAX_STAGES, warpgroups=3 if tile_tokens <= 64 else 2)


def block_splits(blocks: int, steps: int) -> int:
    """Parts that the kernel for many rows cuts the slots in, so that all multiprocessors work.

    The fewest tiles one after the other: rounds of thread blocks times the tiles of each, three
    more for its start, the tail and the merging (a guess). Without it, 8 thread blocks reach
    31 TFLOP/s of the 435 that 256 do (H200, 96 slots of 64, H=128).

    Args:
        blocks: thread blocks without splits.
        steps: tiles of slots per thread block; a part has at least eight.
    """
    fitting = [splits for splits in (1, 2, 4, 8, 16) if splits == 1 or steps // splits >= 8]
    rounds = lambda splits: -(-blocks * splits // MULTIPROCESSORS)
    return min(fitting, key=lambda splits: (rounds(splits) * (-(-steps // splits) + 3), splits))
