"""Sizes that tie tokens, compressed keys and KV blocks together."""

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

# An int stays an int; a numpy or jax array of integers stays an array.
IntLike = TypeVar("IntLike", int, np.ndarray, jax.Array)


@dataclasses.dataclass(frozen=True)
class BlockGeometry:
    """The token grid of InfLLM-V2 block selection (SparDA, sec. 3).

    Block ``m`` holds tokens ``[m*block_size, (m+1)*block_size)``.  Compressed key ``j`` is the
    mean of the keys of tokens ``[j*kernel_stride, j*kernel_stride + kernel_size)``.

    Attributes:
        block_size: tokens per KV block (P).
        kernel_size: tokens averaged into one compressed key.
        kernel_stride: tokens between the starts of neighbouring compressed keys.

    Raises:
        ValueError: a size that is not positive; a block or a window that is not a whole
            number of strides.
    """

    block_size: int = 64
    kernel_size: int = 32
    kernel_stride: int = 16

    def __post_init__(self) -> None:
        for name in ("block_size", "kernel_size", "kernel_stride"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.block_size % self.kernel_stride:
            raise ValueError(
                f"block_size {self.block_size} is not a multiple of "
                f"kernel_stride {self.kernel_stride}"
            )
        if self.kernel_size % self.kernel_stride:
            raise ValueError(
                f"kernel_size {self.kernel_size} is not a multiple of "
                f"kernel_stride {self.kernel_stride}"
            )

    @property
    def strides_per_block(self) -> int:
        """Compressed keys that start inside one block, r = P / stride."""
        return self.block_size // self.kernel_stride

    def num_blocks(self, length: IntLike) -> IntLike:
        """Blocks that hold ``length`` tokens, the last one possibly partial: ceil(length / P)."""
        return (length + self.block_size - 1) // self.block_size

    def num_compressed(self, length: IntLike) -> IntLike:
        """Complete windows in ``length`` tokens: 0, or (length - kernel) // stride + 1.

        Args:
            length: tokens, an int or an integer array.

        Returns:
            The count, of the same kind as ``length``.
        """
        # Floor division of a negative number by a stride <= kernel gives <= 0 for every
        # length < kernel, so clipping at 0 is all the "no window yet" case needs.
        count = (length - self.kernel_size) // self.kernel_stride + 1
        if isinstance(count, int):
            return max(count, 0)
        if isinstance(count, np.ndarray | np.generic):
            return np.maximum(count, 0)
        return jnp.maximum(count, 0)

    def complete_windows(self, position: IntLike) -> IntLike:
        """Compressed keys whose whole window ends at or before token ``position``.

        This is what the multi-head selector sees in prefill and decode.
        """
        return self.num_compressed(position + 1)

    def started_windows(self, position: IntLike) -> IntLike:
        """Compressed keys whose first token is at or before token ``position``.

        The Forecast selector's prefill rule: position // stride + 1.  The
        caller clips the result to the number of compressed keys that exist.
        """
        return position // self.kernel_stride + 1

    def pool_range(self, block: int, num_compressed: int) -> tuple[int, int]:
        """Compressed keys ``[first, last)`` over which block ``block`` takes its maximum.

        With r = P / stride: ``[max(0, r*block - 1), min(r*block + r, C))``, i.e. the key that
        ends in the block, and those that start in it; empty where last <= first.
        """
        r = self.strides_per_block
        return max(0, r * block - 1), min(r * block + r, num_compressed)
