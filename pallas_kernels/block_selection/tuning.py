"""Launch shapes of the decode selection kernels."""

from dataclasses import dataclass

# Multiprocessors of an H100 or H200.
MULTIPROCESSORS = 132


@dataclass(frozen=True)
class ScoreConfig:
    """How the compressed keys are spread over the machine.

    Attributes:
        ctas: thread blocks: in all (Forecast), or per (request, KV head) (multi-head).
        stages: tiles of 64 keys in flight per thread block.
    """

    ctas: int
    stages: int

    def __post_init__(self) -> None:
        for name in ("ctas", "stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def forecast_launch(tiles: int) -> ScoreConfig:
    """Two or three persistent thread blocks per multiprocessor hide each other's waits.

    Args:
        tiles: tiles of 64 compressed keys in all.
    """
    return ScoreConfig(ctas=max(1, min(3 * MULTIPROCESSORS, tiles)), stages=4)


def multi_head_launch(pairs: int, tiles: int) -> ScoreConfig:
    """Thread blocks per (request, KV head): about two per multiprocessor in all.

    Args:
        pairs: B * K.
        tiles: tiles of 64 compressed keys per pair.
    """
    return ScoreConfig(ctas=max(1, min(2 * MULTIPROCESSORS // pairs, tiles)), stages=4)
