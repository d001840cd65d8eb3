"""How a prompt is cut: chunks as long as they fit, then parts of one.

A large chunk is what a GPU runs fast; a small piece wastes little where a prompt, or what is known
of it, ends in the middle of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


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


def cut(first: int, length: int, capacity: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First token and size of as few pieces as cover the tokens from `first` to `length`.

    Args:
      first: a multiple of the smallest size.
      length: tokens of the prompt; the last piece may go beyond it.
      capacity: tokens of the bucket, which no piece exceeds; also such a multiple.
      sizes: see `piece_sizes`.
    """
    at = first
    for size, smaller in zip(sizes, (*sizes[1:], 0), strict=True):
        # A GPU takes no longer for one piece than for four of a quarter.
        while length - at >= size or (length - at > 3 * smaller and at + size <= capacity):
            yield at, size
            at += size
