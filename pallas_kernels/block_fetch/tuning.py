"""Launch shape of the block-fetch kernels."""

from dataclasses import dataclass

# Shared memory of one Hopper multiprocessor that a kernel may ask for, less room for barriers.
SHARED_BYTES = 220 * 1024


@dataclass(frozen=True)
class FetchConfig:
    """How runs are spread over the machine.

    Attributes:
        ctas: thread blocks; each occupies one multiprocessor, so few leave the rest to compute.
        stages: shared-memory buffers of one group of runs each, all in flight at once.
        group: runs behind one barrier, so that short runs do not pay one round trip each.
    """

    ctas: int
    stages: int
    group: int

    def __post_init__(self) -> None:
        for name in ("ctas", "stages", "group"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def shared_bytes(self, run_bytes: int) -> int:
        """Shared memory of one thread block."""
        return self.stages * self.group * run_bytes


def fetch_config(run_bytes: int, num_runs: int) -> FetchConfig:
    """The default launch for ``num_runs`` runs of ``run_bytes``.

    Measured on an H200: runs of 16 or 32 KiB saturate the link with 4 thread blocks when there
    is much to move; the ramp of a short call wants 8, runs of 4 KiB too.  Copies of 256 bytes
    are bound by their number: 21 GB/s from 8 thread blocks.

    Args:
        run_bytes: size of one contiguous run.
        num_runs: the most runs that a call can copy.
    """
    group = max(1, min(32, 16384 // run_bytes))
    many = num_runs * run_bytes >= 64 * 2**20
    ctas = 4 if many and run_bytes >= 16384 else 8
    if run_bytes < 1024:
        ctas = 32
    stages = max(1, min(8, SHARED_BYTES // (group * run_bytes)))
    if run_bytes >= 16384:
        stages = min(stages, 6)
    return FetchConfig(ctas=ctas, stages=stages, group=group)
