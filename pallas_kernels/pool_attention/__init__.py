"""Pool attention for decode: device slots named by id, and the tail block."""

from pallas_kernels.pool_attention.api import pool_attention

__all__ = ["pool_attention"]
