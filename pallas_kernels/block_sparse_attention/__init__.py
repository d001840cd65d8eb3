"""Block-sparse attention for prefill: every query token has its own list of KV blocks."""

from pallas_kernels.block_sparse_attention.api import block_sparse_attention

__all__ = ["block_sparse_attention"]
