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

    Measured on an H200.  Runs of 16 or 32 KiB, 100 MB a call: 50 GB/s with 4 thread blocks of 6
    buffers; 10 MB a call: 49 with 8 of 6.  Such calls are there to hide behind compute,
    though, and there less in flight is better: 6 MB a call reach 45 GB/s with 4 of 2 as with 8 of
    6, but the layer beside them takes 7.5 ms instead of 9.2 (32 layers, 8 requests), because
    kernel launches wait in the same queue for the link.  Runs of 4 KiB: 50 GB/s with 8 of 8.
    Copies of 256 bytes are bound by their number: 21 GB/s from 8 thread blocks.

    Args:
        run_bytes: size of one contiguous run.
        num_runs: the most runs that a call can copy.
    """
    group = max(1, min(32, 16384 // run_bytes))
    fitting = max(1, SHARED_BYTES // (group * run_bytes))
    if run_bytes >= 16384:
        many = num_runs * run_bytes >= 64 * 2**20
        return FetchConfig(ctas=4, stages=min(6 if many else 2, fitting), group=group)
    ctas = 8 if run_bytes >= 1024 else 32
    return FetchConfig(ctas=ctas, stages=min(8, fitting), group=group)
