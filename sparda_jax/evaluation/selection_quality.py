"""What a policy selects, along the hidden states of dense attention, so that all are asked alike.

Counted are free blocks, those that no rule forces, of tokens that have a choice (more candidates
than free places):

    recall   share of the free blocks of the multi-head selector ("sparse") that a policy takes
    mass     true attention mass of a policy's free blocks over that of the oracle's, which are
             the best of the same number by that mass
    covered  true attention mass of all selected blocks, forced ones included, of 1
    hits     share of a token's free blocks that its predecessor had selected too

A document has more tokens than a mean needs: one pair of neighbours in every so many will do.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.chunking import map_chunks
from sparda_jax.config import SparseConfig
from sparda_jax.evaluation.policies import DENSE, LayerStep, Policy, forward
from sparda_jax.evaluation.selectors import CHUNK_BYTES, forced_blocks, take_best
from sparda_jax.models.decoder import Decoder
from sparda_jax.sparse.mass import block_mass
from sparda_jax.typing import Array, Bool, Float, Int

# (numerator, denominator) of every meter, as fields of `Counts`.
METERS = {
    "recall": ("recalled", "reference"),
    "mass": ("mass", "oracle_mass"),
    "covered": ("covered", "whole"),
    "hits": ("hits", "free_after_first"),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counts:
    """Sums over the tokens and KV heads of each bucket of positions.

    Attributes:
        recalled: the reference's free blocks that the policy takes.
        reference: the reference's free blocks.
        mass: attention mass of the policy's free blocks, 1 a head group.
        oracle_mass: that of the oracle's.
        covered: attention mass of all the policy's blocks.
        whole: 1 for every token and KV head.
        hits: free blocks that the token before had too.
        free_after_first: free blocks of tokens that have a token before them.
    """

    recalled: Float[Array, " X"]
    reference: Float[Array, " X"]
    mass: Float[Array, " X"]
    oracle_mass: Float[Array, " X"]
    covered: Float[Array, " X"]
    whole: Float[Array, " X"]
    hits: Float[Array, " X"]
    free_after_first: Float[Array, " X"]


@partial(jax.jit, static_argnames="block_size")
def attention_mass(
    q: Float[Array, "B T N H"],
    keys: Float[Array, "B K S H"],
    positions: Int[Array, "B T"],
    block_size: int,
) -> Float[Array, "B K T M"]:
    """`block_mass` of all tokens, a chunk at a time, divided by G: sums to 1."""
    chunk = max(1, CHUNK_BYTES // (4 * q.shape[0] * q.shape[2] * keys.shape[2]))
    run = lambda q, positions: (block_mass(q, keys, positions, block_size),)
    (mass,) = map_chunks(run, chunk, (q, positions), axes=(1, 1), out_axes=(2,))
    return mass * (keys.shape[1] / q.shape[2])


@partial(jax.jit, static_argnames=("sparse", "edges"))
def count(
    mask: Bool[Array, "B K T M"],
    reference: Bool[Array, "B K T M"],
    mass: Float[Array, "B K T M"],
    positions: Int[Array, "B T"],
    budgets: Int[Array, " B"],
    sparse: SparseConfig,
    edges: tuple[int, ...],
) -> Counts:
    """Counts of one policy in one layer.

    Args:
        mask: blocks that the policy takes.
        reference: blocks that the multi-head selector takes.
        mass: see `attention_mass`.
        positions: of the tokens.
        budgets: blocks of each row.
        sparse: grid and forced blocks.
        edges: bounds of the buckets of positions.
    """
    _, candidates = forced_blocks(positions, mask.shape[3], sparse)
    places = budgets[:, None, None] - sparse.forced_blocks
    choice = (candidates.sum(-1) > places) & (places > 0)
    counted = candidates & choice[..., None]
    oracle = take_best(mass, positions, budgets, sparse) & counted
    free, wanted = mask & counted, reference & counted
    # Of the tokens at hand: those whose predecessor in the list is the one in the text.
    follows = jnp.diff(positions, axis=1, prepend=positions[:, :1]) == 1
    after = counted & follows[:, None, :, None]
    before = jnp.pad(mask[:, :, :-1], ((0, 0), (0, 0), (1, 0), (0, 0)))

    def total(values: Array) -> Array:
        per_token = values.astype(jnp.float32).sum((1, 3))
        pairs = itertools.pairwise(edges)
        inside = [(positions >= low) & (positions < high) for low, high in pairs]
        return jnp.stack([jnp.where(bucket, per_token, 0.0).sum() for bucket in inside])

    rows = jnp.broadcast_to(choice[..., None], (*mask.shape[:3], 1))
    return Counts(
        recalled=total(free & wanted),
        reference=total(wanted),
        mass=total(jnp.where(free, mass, 0.0)),
        oracle_mass=total(jnp.where(oracle, mass, 0.0)),
        covered=total(jnp.where(mask & rows, mass, 0.0)),
        whole=total(rows),
        hits=total(free & before & after),
        free_after_first=total(free & after),
    )


def document_counts(
    model: Decoder,
    policies: Sequence[Policy],
    reference: Policy,
    document: np.ndarray,
    sparse: SparseConfig,
    budgets: Sequence[int],
    edges: tuple[int, ...],
    *,
    every: int = 1,
) -> dict[str, Counts]:
    """Counts of every policy on one document.

    Args:
        model: the decoder.
        policies: what to measure.
        reference: the policy against which recall is counted.
        document: `int[T]`.
        sparse: grid and forced blocks.
        budgets: blocks selected, forced ones included.
        edges: bounds of the buckets of positions.
        every: count two neighbouring tokens in every so many; 1: all.

    Returns:
        By policy name, fields `float64[len(budgets), L, len(edges) - 1]`.
    """
    found: dict[str, list[list[Counts]]] = {policy.name: [] for policy in policies}

    chosen = jnp.asarray(sampled_tokens(len(document), every), jnp.int32)

    def visit(step: LayerStep) -> None:
        step = step if every == 1 else step.at(chosen)
        state = step.state
        mass = attention_mass(
            state.q, state.keys, state.positions, block_size=sparse.geometry.block_size
        )
        rest = {"sparse": sparse, "edges": edges}
        for policy in policies:
            found[policy.name].append([])
        for budget in budgets:
            limits = jnp.full((1,), budget, jnp.int32)
            wanted = step.mask(reference, limits, sparse)
            for policy in policies:
                mask = step.mask(policy, limits, sparse)
                counts = count(mask, wanted, mass, state.positions, limits, **rest)
                found[policy.name][-1].append(counts)

    forward(model, DENSE, jnp.asarray(document, jnp.int32)[None], sparse, visit=visit)
    return {name: _stacked(layers) for name, layers in found.items()}


def sampled_tokens(length: int, every: int) -> np.ndarray:
    """Two neighbours in every stretch of `every` tokens, at random places that are always the same.

    Raises:
        ValueError: a stretch in which no two tokens follow one another.
    """
    if every == 1:
        return np.arange(length)
    if every < 2:
        raise ValueError(f"a pair in every {every} tokens: at least 2, or 1 for all tokens")
    starts = np.arange(0, length - every + 1, every)
    starts += np.random.default_rng(0).integers(0, every - 1, len(starts))
    return np.stack([starts, starts + 1], axis=1).reshape(-1)


def _stacked(layers: list[list[Counts]]) -> Counts:
    """[L][budgets] of counts as one, budgets first; on the host."""
    by_budget = [list(column) for column in zip(*layers, strict=True)]
    stack = lambda *leaves: np.stack([np.asarray(leaf, np.float64) for leaf in leaves])
    inner = [jax.tree.map(stack, *column) for column in by_budget]
    merged: Counts = jax.tree.map(stack, *inner)
    return merged
