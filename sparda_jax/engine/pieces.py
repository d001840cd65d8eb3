"""How a prompt is cut: chunks as long as they fit, then parts of one.

A large chunk is what a GPU runs fast; a small piece wastes little where a prompt, or what is known
of it, ends in the middle of one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import jax
from jaxtyping import Array, Int


def piece_sizes(chunk: int, block_size: int) -> tuple[int, ...]:
    """Tokens of the pieces that prompts are run in: a chunk, and parts of it that are whole blocks.

    Args:
      chunk: tokens of a chunk, whole blocks.
      block_size: P.
    """
    blocks = chunk // block_size
    return tuple(blocks // part * block_size for part in (1, 4, 16) if blocks % part == 0)


def capacities(sizes: Sequence[int], length: int) -> list[int]:
    """Token capacities of the buckets: one chunk, then twice as many, the last covers `length`.

    Args:
      sizes: of pieces, largest first.
      length: tokens of the longest prompt.
    """
    found, most = [sizes[0]], -(-length // sizes[-1]) * sizes[-1]
    while found[-1] < length:
        found.append(min(2 * found[-1], most))
    return found


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Which tokens run together: those from `bounds[i]` to `bounds[i + 1]` by `sizes[i]`.

    Attributes:
      sizes: largest first.
      bounds: one more than there are sizes.
    """

    sizes: tuple[int, ...]
    bounds: tuple[int, ...]

    @classmethod
    def of(cls, first: int, length: int, capacity: int, sizes: tuple[int, ...]) -> Pieces:
        """As few pieces as cover the tokens from `first` to `length`, or a little more.

        Args:
          first: a multiple of the smallest size.
          length: tokens of the prompt.
          capacity: tokens of the bucket, which no piece exceeds; also such a multiple.
          sizes: see `piece_sizes`.
        """
        bounds = [first]
        for size, smaller in zip(sizes, (*sizes[1:], 0), strict=True):
            count, rest = divmod(max(length - bounds[-1], 0), size)
            # A GPU takes no longer for one piece than for four of a quarter.
            if rest > 3 * smaller and bounds[-1] + (count + 1) * size <= capacity:
                count += 1
            bounds.append(bounds[-1] + count * size)
        return cls(sizes, tuple(bounds))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """First token and tokens of each piece, in order."""
        for size, begin, end in zip(self.sizes, self.bounds, self.bounds[1:], strict=False):
            yield from ((at, size) for at in range(begin, end, size))


Carry = TypeVar("Carry")


def over_pieces(
    write: Callable[[Array, int, Carry], Carry],
    bounds: Int[Array, " E"],
    sizes: Sequence[int],
    carry: Carry,
) -> Carry:
    """Folds `write(first token, tokens, carry)` over all pieces, in a program; see `Pieces`."""
    for index, size in enumerate(sizes):
        begin, end = bounds[index], bounds[index + 1]

        def step(number: Array, carry: Carry, begin: Array = begin, size: int = size) -> Carry:
            return write(begin + number * size, size, carry)

        carry = jax.lax.fori_loop(0, (end - begin) // size, step, carry)
    return carry
