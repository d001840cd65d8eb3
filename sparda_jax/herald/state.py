"""What the device holds of a batch: blocks at work, pools of chosen rows, what is never fetched."""

from __future__ import annotations

import dataclasses

import jax

from sparda_jax.diffusion.state import BlockState, LayerKV
from sparda_jax.typing import Array, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pool:
    """Chosen rows of one layer, packed: a cache of `count` tokens.

    Attributes:
        kv: slots of P rows.
        count: rows that count; the same for all KV heads of a request.
    """

    kv: Float[Array, "B K Z 2 P H"]
    count: Int[Array, " B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeraldState:
    """A batch between two forwards. All rows are in the same block's turn, or rest.

    Attributes:
        block: tokens, masks and settings of every row; it has no caches of its own.
        caches: L whole caches, None where a layer's KV lies in host memory.
        init: L leading rows of every request, None where a layer has its cache and no pool.
        previous: L blocks before the one at work; of a row that has committed, the block itself.
    """

    block: BlockState
    caches: tuple[LayerKV | None, ...]
    init: tuple[Float[Array, "B K 2 I H"] | None, ...]
    previous: tuple[Float[Array, "B K 2 W H"] | None, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Turn:
    """What the rows gave in this turn: at most one block each.

    Attributes:
        gave: rows whose block is complete: committed, or ended inside by a stop token.
        committed: those whose KV was written.
        tokens: of these blocks, fixed prompt tokens included.
        steps: denoising forwards that each took.
        draft: what every position would have got in the block's first forward.
        open: positions that were masked then.
        equal: of these, those that got the drafted token in the end.
        handover: the next block's first token, where the family's commit yields it; else -1.
        forwards: of the batch so far.
    """

    gave: Bool[Array, " B"]
    committed: Bool[Array, " B"]
    tokens: Int[Array, "B W"]
    steps: Int[Array, " B"]
    draft: Int[Array, "B W"]
    open: Bool[Array, "B W"]
    equal: Int[Array, " B"]
    handover: Int[Array, " B"]
    forwards: Int[Array, ""]
