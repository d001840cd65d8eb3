"""Memory kinds, byte accounting and budget checks.

The two kinds this package uses exist on every supported back end: ``device`` (GPU memory; on the
CPU back end ordinary memory) and ``pinned_host`` (page-locked host memory that the device reads
over PCIe; on the CPU back end ordinary memory too, so that offloaded code runs and is tested
there). Scripts aside, this and `cache_folder` alone read the environment.
"""

import contextlib
import ctypes
import mmap
import os
from pathlib import Path

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

DEVICE = "device"
HOST = "pinned_host"

# XLA's pool of pinned memory on GPUs is limited to this unless the variable below says otherwise
# (read once, when the back end starts).
PINNED_LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
PINNED_LIMIT_DEFAULT_GB = 64


def host_sharding(device: jax.Device) -> SingleDeviceSharding:
    """Sharding of arrays in pinned host memory that ``device`` can read."""
    return SingleDeviceSharding(device, memory_kind=HOST)


def device_sharding(device: jax.Device) -> SingleDeviceSharding:
    """Sharding of arrays in the memory of ``device``."""
    return SingleDeviceSharding(device, memory_kind=DEVICE)


def host_view(array: jax.Array) -> np.ndarray:
    """A writable numpy view of an array in host memory, without a copy.

    Made from the address, valid as long as the array lives: `numpy.asarray` would leave a reference
    inside the JAX array that blocks its donation.
    """
    array = jax.block_until_ready(array)
    raw = (ctypes.c_char * array.nbytes).from_address(array.unsafe_buffer_pointer())
    return np.frombuffer(raw, dtype=array.dtype).reshape(array.shape)


def host_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros in ordinary host memory, in huge pages where the system has them; touched when used.

    Rows here and there in many GB cost a walk through page tables each in pages of 4 KiB.
    """
    size = max(int(np.prod(shape)) * np.dtype(dtype).itemsize, 1)
    pages = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without huge pages refuses; ordinary ones do, too.
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8).view(dtype).reshape(shape)


def tree_bytes(tree: object) -> int:
    """Total bytes of the arrays (or ``ShapeDtypeStruct``) in a pytree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def format_bytes(count: float) -> str:
    """Bytes as text in binary units, for example ``12.5 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if round(abs(count), 1) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def available_host_bytes() -> int | None:
    """Host memory the kernel says can still be used, in bytes; None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def pinned_limit_bytes(device: jax.Device) -> int | None:
    """Most bytes XLA will pin on the host for ``device``; None where it sets no limit (CPU)."""
    if device.platform == "cpu":
        return None
    text = os.environ.get(PINNED_LIMIT_VARIABLE, str(PINNED_LIMIT_DEFAULT_GB))
    try:
        return int(float(text) * 2**30)
    except (ValueError, OverflowError):
        raise ValueError(f"{PINNED_LIMIT_VARIABLE} must be a number of GiB, got {text!r}") from None


def free_device_bytes(device: jax.Device) -> int | None:
    """Bytes that can still be allocated on ``device``; None where the back end does not say."""
    if device.platform == "cpu":
        return available_host_bytes()
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats["bytes_in_use"]


def check_budget(what: str, needed: int, limit: int | None, source: str) -> None:
    """Raises if ``needed`` bytes exceed ``limit``.

    Args:
      what: the thing that needs memory, for the message.
      needed: bytes it needs.
      limit: bytes there are; None means unlimited.
      source: where the limit comes from, for the message.

    Raises:
      ValueError: naming need, limit and its source.
    """
    if limit is not None and needed > limit:
        need, most = format_bytes(needed), format_bytes(limit)
        if need == most:
            need, most = f"{needed} B", f"{limit} B"
        raise ValueError(f"{what} needs {need} but {source} allows {most}")


def check_host_budget(
    what: str, needed: int, budget: int | None, device: jax.Device, *, pinned: bool = True
) -> None:
    """Checks host bytes against the user's budget, XLA's limit if pinned, and free memory."""
    check_budget(what, needed, budget, "the host KV budget (host_kv_bytes)")
    if pinned:
        limit = pinned_limit_bytes(device)
        check_budget(what, needed, limit, f"XLA's pinned-memory limit ({PINNED_LIMIT_VARIABLE})")
    check_budget(what, needed, available_host_bytes(), "free host memory")


def check_device_budget(what: str, needed: int, budget: int | None, device: jax.Device) -> None:
    """Checks ``needed`` device bytes against the user's budget and the device's free memory."""
    check_budget(what, needed, budget, "the device KV budget (device_kv_bytes)")
    where = "free host memory" if device.platform == "cpu" else f"free memory of {device}"
    check_budget(what, needed, free_device_bytes(device), where)
