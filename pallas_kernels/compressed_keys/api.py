"""Compressed keys (SparDA, sec. 3; InfLLM-V2): the public functions."""

from jaxtyping import Array, Float

from pallas_kernels import dispatch, layout
from pallas_kernels.compressed_keys import reference
from pallas_kernels.dispatch import Implementation
from pallas_kernels.geometry import BlockGeometry


def compress_keys(
    keys: Float[Array, "B K S H"],
    geometry: BlockGeometry,
    *,
    implementation: Implementation = "auto",
) -> Float[Array, "B K C H"]:
    """Means of all complete windows of keys.

    ``out[b, k, j] = mean(keys[b, k, j*stride : j*stride + kernel])`` for
    ``j < C = geometry.num_compressed(S)``, accumulated in float32.  A window that reaches
    into padding gives a compressed key that the caller must not make visible.

    Args:
        keys: keys after RoPE, sequence order.
        geometry: window and stride.
        implementation: "auto", "mosaic" or "xla".

    Returns:
        Compressed keys of the dtype of ``keys``; C may be 0.

    Raises:
        ValueError: ``keys`` is not of rank 4.
        NotImplementedError: "mosaic" cannot be served.
    """
    layout.match(("keys", keys, "B K S H"))
    return dispatch.run("compressed_keys", implementation, reference.compress_keys, keys, geometry)


def compress_latest(
    window: Float[Array, "B K kernel H"],
    *,
    implementation: Implementation = "auto",
) -> Float[Array, "B K H"]:
    """Mean of one full window of keys, in any order (a ring buffer will do).

    Args:
        window: the keys of one window; its length is the kernel size.
        implementation: "auto", "mosaic" or "xla".

    Returns:
        The compressed key, of the dtype of ``window``, accumulated in float32.

    Raises:
        ValueError: ``window`` is not of rank 4.
        NotImplementedError: "mosaic" cannot be served.
    """
    layout.match(("window", window, "B K kernel H"))
    return dispatch.run("compressed_keys", implementation, reference.compress_latest, window)
