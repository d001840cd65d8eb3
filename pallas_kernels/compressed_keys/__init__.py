"""Compressed keys: means of overlapping windows of keys."""

from pallas_kernels.compressed_keys.api import compress_keys, compress_latest

__all__ = ["compress_keys", "compress_latest"]
