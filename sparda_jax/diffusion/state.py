"""Everything a block decode loop carries, as typed pytrees; parameters are elsewhere."""

from __future__ import annotations

import dataclasses

import jax

from sparda_jax.diffusion.config import RuleState
from sparda_jax.engine.state import SamplingState
from sparda_jax.typing import Array, Bool, Float, Int

# KV of one layer, block j at row j; what a fresh cache holds is finite.
LayerKV = Float[Array, "B K M 2 P H"]
# KV of the block at work, of every layer.
BlockKV = tuple[Float[Array, "B K 2 W H"], ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
    """What the rows of a block attend of the tokens before it, in one layer.

    Dense: the cache itself. Sparse: a pool of chosen rows, other slots for other KV heads.

    Attributes:
        slots: attended whole where `slot_ids` names them.
        slot_ids: -1 names none.
        rest: rows that fill no slot.
        rest_mask: which of them count.
    """

    slots: Float[Array, "B K Z 2 P H"]
    slot_ids: Int[Array, "B K R"]
    rest: Float[Array, "B K 2 E H"]
    rest_mask: Bool[Array, "B E"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockState:
    """State of a batch between two forwards. Rows may be at different steps and blocks.

    A boolean says what is masked; a token id never does, so a prompt may hold the mask token.

    Attributes:
        start: position of the block at work; the KV of all tokens before it is cached.
        tokens: of that block; what stands where `masked` is set means nothing.
        masked: tokens that are not decided.
        step: denoising forwards done in this block.
        last_sub: sub-block of the forward before, -1 in a new block; for the dual cache.
        active: the request still generates. An inactive row computes along and changes nothing.
        failed: the request met logits that are not finite and was stopped.
        prompt_length: tokens from here on may be stop tokens.
        limit: prompt length plus tokens asked for.
        sampling: its sampling settings.
        rule: its denoising settings.
        layers: L caches.
        block_kv: of the block at work, L layers, where sub-blocks run against a cached block
            (Fast-dLLM v2's dual cache); None otherwise.
    """

    start: Int[Array, " B"]
    tokens: Int[Array, "B W"]
    masked: Bool[Array, "B W"]
    step: Int[Array, " B"]
    last_sub: Int[Array, " B"]
    active: Bool[Array, " B"]
    failed: Bool[Array, " B"]
    prompt_length: Int[Array, " B"]
    limit: Int[Array, " B"]
    sampling: SamplingState
    rule: RuleState
    layers: tuple[LayerKV, ...]
    block_kv: BlockKV | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForwardOutput:
    """What one forward of every row's block did.

    Attributes:
        token: what each position would get.
        probability: its confidence.
        entropy: of each position's distribution, nats.
        decided: positions that were decided now.
        committed: rows whose block was finished before: this forward wrote its KV.
        ended: rows whose request ended inside a block, by a stop token.
        handover: the next block's first token, where the family's commit yields it; else -1.
        ran: tokens of the block that were run: all, a sub-block, or none where a row waited.
    """

    token: Int[Array, "B W"]
    probability: Float[Array, "B W"]
    entropy: Float[Array, "B W"]
    decided: Bool[Array, "B W"]
    committed: Bool[Array, " B"]
    ended: Bool[Array, " B"]
    handover: Int[Array, " B"]
    ran: Int[Array, " B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockOutput:
    """What a call hands to the host: up to n blocks of each row.

    Attributes:
        count: blocks that each row gave.
        tokens: of these blocks, fixed prompt tokens included.
        steps: denoising forwards each took.
        handover: the token after each block where the commit yields it; else -1.
        forwards: forwards of the batch that the call ran.
        narrow: how many of these ran sub-blocks alone.
    """

    count: Int[Array, " B"]
    tokens: Int[Array, "B X W"]
    steps: Int[Array, "B X"]
    handover: Int[Array, "B X"]
    forwards: Int[Array, ""]
    narrow: Int[Array, ""]
