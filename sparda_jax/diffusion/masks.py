"""Who attends whom in block diffusion, as boolean arrays: True = may attend.

Blocks of W tokens are aligned to position 0, whatever the prompt's length (spec/herald.md,
sec. 2.1).
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from sparda_jax.typing import Array, Bool, Int


def last_visible(
    positions: Int[Array, "*rows"], block_size: int, *, causal: bool = False
) -> Int[Array, "*rows"]:
    """The last position that a query sees, which with "all before it" is the whole rule.

    Args:
        positions: of the queries.
        block_size: W.
        causal: see nothing behind oneself (clean tokens of checkpoints trained that way).
    """
    return positions if causal else positions // block_size * block_size + block_size - 1


def block_causal(
    queries: Int[Array, "*B T"], keys: Int[Array, "*B S"], block_size: int
) -> Bool[Array, "*B T S"]:
    """Bidirectional inside a block, causal across blocks: key block <= query block."""
    return keys[..., None, :] <= last_visible(queries, block_size)[..., None]


def training_mask(length: int, block_size: int, *, causal_clean: bool = False) -> np.ndarray:
    """Of a row that holds a noisy copy and then a clean copy of the same tokens.

    noisy -> noisy: same block; noisy -> clean: earlier blocks; clean -> clean: same or earlier
    blocks; clean -> noisy: never. A last block may be cut short.

    Args:
        length: n, tokens of each half.
        block_size: W.
        causal_clean: clean -> clean is token-causal instead.

    Returns:
        `bool[2n, 2n]`, rows are queries.
    """
    place = np.arange(length)
    block = place // block_size
    query, key = block[:, None], block[None]
    clean = place[:, None] >= place if causal_clean else query >= key
    return np.block([[query == key, query > key], [np.zeros_like(clean), clean]])


def block_causal_mask(length: int, block_size: int) -> np.ndarray:
    """`block_causal` of a whole sequence, `bool[n, n]`."""
    place = np.arange(length)
    return np.asarray(block_causal(jnp.asarray(place), jnp.asarray(place), block_size))
