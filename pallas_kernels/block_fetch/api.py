"""Copies of KV blocks between a pool, on the host or the device, and device slots."""

from jaxtyping import Array, Float, Float32, Int32, Num

from pallas_kernels import dispatch, layout
from pallas_kernels.block_fetch import reference
from pallas_kernels.dispatch import Implementation


def fetch_blocks(
    pool: Num[Array, "X 2 P H"],
    slots: Float[Array, "Y 2 P H"],
    source: Int32[Array, " A"],
    target: Int32[Array, " A"],
    count: Int32[Array, ""],
    *,
    pool_scales: Float32[Array, "X 2"] | None = None,
    after: Array | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "Y 2 P H"]:
    """Copies ``pool[source[i]]`` to ``slots[target[i]]`` for ``i < count``.

    With ``pool_scales`` the pool is quantised and ``slots[target[i], j]`` becomes
    ``pool[source[i], j] * pool_scales[source[i], j]``, rounded to the dtype of the slots.
    Slots that are not named keep their contents.  Meant for use inside a jit in which
    ``slots`` is donated or a loop carry: then the update is in place.

    Args:
        pool: runs of one block and KV head, in pinned host or device memory.
        slots: device slots.
        source: runs to read, valid below ``count``.
        target: slots to write, valid and distinct below ``count``.
        count: number of copies, on the device; at most A.
        pool_scales: of the keys and the values of each run, in device memory.
        after: what has to be computed before the kernel begins, though it does not read it: where
            all that the data allows runs side by side (a CUDA graph), this puts copies in a row.
        implementation: "auto", "mosaic" or "xla".

    Returns:
        The updated slots, in device memory.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NotImplementedError: "mosaic" cannot be served.
    """
    layout.match(
        ("pool", pool, "X 2 P H"),
        ("slots", slots, "Y 2 P H"),
        ("source", source, "A"),
        ("target", target, "A"),
        ("count", count, ""),
        ("pool_scales", pool_scales, "X 2"),
    )
    if pool_scales is None:
        _check_dtypes("slots", slots, pool)
    return dispatch.run(
        "block_fetch",
        implementation,
        reference.fetch_blocks,
        pool,
        slots,
        source,
        target,
        count,
        pool_scales=pool_scales,
        after=after,
    )


def write_blocks(
    pool: Float[Array, "X 2 P H"],
    blocks: Float[Array, "A 2 P H"],
    target: Int32[Array, " A"],
    *,
    implementation: Implementation = "auto",
) -> Float[Array, "X 2 P H"]:
    """Copies ``blocks[i]`` to ``pool[target[i]]`` wherever ``target[i] >= 0``.

    In place when ``pool`` is donated or a loop carry; the jit needs ``out_shardings`` of the
    pool's memory kind when the pool is in host memory.

    Args:
        pool: runs of one block and KV head, in pinned host or device memory.
        blocks: finished blocks, on the device.
        target: runs to write, -1 to skip; distinct where not -1.
        implementation: "auto", "mosaic" or "xla".

    Returns:
        The updated pool, in the pool's memory.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NotImplementedError: "mosaic" cannot be served.
    """
    layout.match(("pool", pool, "X 2 P H"), ("blocks", blocks, "A 2 P H"), ("target", target, "A"))
    _check_dtypes("blocks", blocks, pool)
    return dispatch.run("block_fetch", implementation, reference.write_blocks, pool, blocks, target)


def _check_dtypes(name: str, array: Array, pool: Array) -> None:
    if array.dtype != pool.dtype:
        raise ValueError(f"{name} has dtype {array.dtype}, the pool has {pool.dtype}")
