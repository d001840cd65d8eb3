"""Attention kernels on blocks of a KV cache: arrays in, arrays out.

Every operation is a folder with a public function (``api.py``), a plain jax.numpy
reference that defines what it computes (``reference.py``) and, where one exists, a Mosaic
GPU kernel with the same signature (``mosaic.py``).  Import from ``pallas_kernels.<op>``.
"""

from pallas_kernels.geometry import BlockGeometry

__all__ = ["BlockGeometry"]
