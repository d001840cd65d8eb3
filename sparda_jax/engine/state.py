"""Everything a decode loop carries, as typed pytrees.

Modules hold parameters only; caches, positions and sampling settings travel here, so that a whole
decode loop can be jitted, donated, saved and tested. The host pool is the one thing outside:
programs read it in place and never return it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from sparda_jax.config import SamplingParams


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseCache:
    """KV of one layer for dense attention, token-major as `jax.nn.dot_product_attention` reads it.

    Attributes:
      k: keys, position s at row s.
      v: values, likewise.
    """

    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K H"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Misses:
    """What the newest selection of a layer has to fetch.

    Attributes:
      source: flat run index in the host pool of each missed (block, KV head).
      target: flat run index in the slots, likewise.
      count: how many of them count.
    """

    source: Int[Array, " A"]
    target: Int[Array, " A"]
    count: Int[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseCache:
    """What the device holds of one layer in sparse mode.

    Attributes:
      blocks: KV blocks. Resident (`slot_blocks` is None): all of them, block j at row j. Offloaded:
        the slots, Z blocks that were fetched from the host pool.
      slot_blocks: block id in each slot, -1 empty; None when resident.
      last_used: position of the token that last selected what is in each slot; None when resident.
      misses: what the newest selection fetched; None when resident. Part of the state so that these
        lists have memory of their own: a copy that runs behind other work may still read them.
      tail: the last two KV blocks, block j in row j % 2. New tokens are written here; the filled
        block stays until the next one is full, which is when the host copy is known to exist.
      window: the last `kernel_size` keys, position p at row p % kernel_size.
      compressed: compressed keys; a query sees the first `complete_windows(position)`.
      partial: InfiniGen's keys on few channels, position s at row s; None in other modes.
      bias: NOSA's importance of the tokens of all M blocks, wherever their KV is; None otherwise.
    """

    blocks: Float[Array, "B K Z 2 P H"]
    slot_blocks: Int[Array, "B K Z"] | None
    last_used: Int[Array, "B K Z"] | None
    misses: Misses | None
    tail: Float[Array, "B K 2 2 P H"]
    window: Float[Array, "B K E H"]
    compressed: Float[Array, "B K C H"]
    partial: Float[Array, "B K S E"] | None = None
    bias: Float[Array, "B K M P"] | None = None


LayerCache = DenseCache | SparseCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingState:
    """Sampling settings of every request of the batch.

    Attributes:
      temperature: 0 is greedy.
      top_k: 0 keeps all.
      top_p: 1 keeps all.
      min_p: 0 keeps all.
      seed: random stream; the key of a token is `fold_in(seed, position)`, so a request draws the
        same tokens whatever its neighbours do.
      stop_ids: tokens that end the request, padded with -1.
      logprobs: whether log-probabilities are wanted.
    """

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    seed: UInt[Array, " B"]
    stop_ids: Int[Array, "B E"]
    logprobs: Bool[Array, " B"]


def sampling_fields(
    requests: Sequence[SamplingParams], *, width: int | None = None
) -> dict[str, np.ndarray]:
    """The fields of `SamplingState` for a batch, on the host.

    Args:
      requests: settings of each request.
      width: E, stop tokens a request can have; None: as many as one has.
    """
    if width is None:
        width = max(1, *(len(request.stop_token_ids) for request in requests))
    stops = np.full((len(requests), width), -1, np.int32)
    for row, request in enumerate(requests):
        stops[row, : len(request.stop_token_ids)] = request.stop_token_ids
    return {
        "temperature": np.array([request.temperature for request in requests], np.float32),
        "top_k": np.array([request.top_k for request in requests], np.int32),
        "top_p": np.array([request.top_p for request in requests], np.float32),
        "min_p": np.array([request.min_p for request in requests], np.float32),
        "seed": np.array([request.seed for request in requests], np.uint32),
        "stop_ids": stops,
        "logprobs": np.array([request.logprobs is not None for request in requests]),
    }


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """State of a batch between two decode steps.

    Attributes:
      lengths: tokens whose KV is cached.
      last_token: the newest token; its KV is not cached yet, its position is `lengths`.
      active: the request still generates. An inactive row computes along and changes nothing.
      failed: the request met logits that are not finite and was stopped.
      remaining: tokens it may still generate.
      sampling: its sampling settings.
      layers: L caches.
      pages: page of the host pool that each block is in; None where every row has its own part of
        the pool, or there is none.
    """

    lengths: Int[Array, " B"]
    last_token: Int[Array, " B"]
    active: Bool[Array, " B"]
    failed: Bool[Array, " B"]
    remaining: Int[Array, " B"]
    sampling: SamplingState
    layers: tuple[LayerCache, ...]
    pages: Int[Array, "B M"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Step:
    """What every layer of one decode step needs to know.

    Attributes:
      position: of the token being decoded.
      active: rows that still generate; the others select and fetch nothing.
      cos: RoPE rows.
      sin: RoPE rows.
      pages: see `DecodeState`.
    """

    position: Int[Array, " B"]
    active: Bool[Array, " B"]
    cos: Float[Array, "B 1 H"]
    sin: Float[Array, "B 1 H"]
    pages: Int[Array, "B M"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogProbabilities:
    """Log-probabilities of one step; zeros where no request wants any.

    Attributes:
      drawn: of the token drawn.
      top_tokens: the likeliest tokens, likeliest first.
      top: their log-probabilities.
    """

    drawn: Float[Array, " B"]
    top_tokens: Int[Array, "B E"]
    top: Float[Array, "B E"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutput:
    """What one decode step (or, stacked on a leading axis, several) hands to the host.

    Attributes:
      tokens: the token drawn for each request.
      emitted: which of them count (the request was active and its logits finite).
      logprobs: how likely they were.
      free: selected blocks that no rule forced, summed over layers, KV heads and active requests.
      hits: how many of `free` were already in slots.
      fetched: (block, KV head) runs copied from the host.
    """

    tokens: Int[Array, " B"]
    emitted: Bool[Array, " B"]
    logprobs: LogProbabilities
    free: Int[Array, ""]
    hits: Int[Array, ""]
    fetched: Int[Array, ""]
