"""Tuning of the block-sparse prefill kernel."""

import dataclasses

# Largest dynamic shared memory of one block on Hopper, less what barriers and masks take.
SHARED_MEMORY = 232_448 - 2_560
# Keys of one pipeline stage, whatever the block size: the widest product whose scores,
# probabilities and output fit the registers of a consumer (FlashAttention-3's choice).
STAGE_KEYS = 128


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Choices that change speed and never the result beyond rounding.

    Attributes:
        stages: ring of shared-memory stages, each of 128 keys and values.
        split: blocks that only one consumer's tokens selected are computed by that consumer
            alone; without it both compute the whole union.
        ping_pong: the two consumers take turns on the tensor cores (FlashAttention-3).

    Raises:
        ValueError: fewer than two stages.
    """

    stages: int
    split: bool = True
    ping_pong: bool = True

    def __post_init__(self) -> None:
        if self.stages < 2:
            raise ValueError(f"stages must be at least 2, got {self.stages}")


def heuristic(head_dim: int) -> Tuning:
    """As many stages as fit beside the queries, at most four.

    Args:
        head_dim: H.
    """
    stage = 2 * STAGE_KEYS * head_dim * 2
    queries = 2 * 64 * head_dim * 2
    return Tuning(stages=min(4, (SHARED_MEMORY - queries) // stage))
