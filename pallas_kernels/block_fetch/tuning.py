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


def fetch_config(run_bytes: int) -> FetchConfig:
    """The default launch for runs of ``run_bytes``.

    Measured on an H200.  Runs of 32 or 16 KiB: 50 GB/s with 4 thread blocks of 6 buffers for
    100 MB a call, 49 for 10 MB; fewer buffers do as well alone, but not beside compute that keeps
    the memory busy (docs/decode_kernels.md, the hiding).  Runs of 4 KiB: 50 GB/s with 8 of 8.
    Copies of 256 bytes are bound by their number: 25.0 GB/s with 32 thread blocks (8, 16 and 64 in
    development runs: 21.0, 23.7, 26.4).

    Args:
        run_bytes: size of one contiguous run.
    """
    group = max(1, min(32, 16384 // run_bytes))
    fitting = max(1, SHARED_BYTES // (group * run_bytes))
    if run_bytes >= 16384:
        return FetchConfig(ctas=4, stages=min(6, fitting), group=group)
    ctas = 8 if run_bytes >= 1024 else 32
    return FetchConfig(ctas=ctas, stages=min(8, fitting), group=group)
