"""Block fetch: copies of whole KV blocks between a (host) pool and device slots."""

from pallas_kernels.block_fetch.api import fetch_blocks, write_blocks

__all__ = ["fetch_blocks", "write_blocks"]
