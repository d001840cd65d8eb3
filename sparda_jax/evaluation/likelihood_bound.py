"""A lower bound on the log-likelihood of a text under block diffusion, by Monte Carlo.

A block with n target tokens x, whose clean prefix is c, has (spec/evaluation.md, sec. 5.3)

    log p(x | c) >= E_l E_S [ n/l * sum over i in S of log p(x_i | c, the tokens outside S) ]

with l uniform in 1..n and S a set of l of the n positions, masked in one forward. Target tokens are
split at the model's blocks and the bounds of the blocks are added, each given the true tokens
before it. The first token of a block that comes from the commit of the one before it (a logit
shift) is not denoised: its log p is exact, and so is that of a last single token. What follows the
targets in their last block is masked, as it is when the model generates.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sparda_jax.config import SamplingParams
from sparda_jax.diffusion.config import diffusion_of
from sparda_jax.diffusion.decode import run_layers
from sparda_jax.diffusion.generate import BlockEngine
from sparda_jax.diffusion.state import LayerKV
from sparda_jax.evaluation.language import score_tokens
from sparda_jax.evaluation.tasks.base import generator
from sparda_jax.models.decoder import Decoder
from sparda_jax.models.rope import RopeTable
from sparda_jax.typing import Array, Bool, Float, Int

# Draws whose l are spread evenly over 1..n; a standard error is one over such groups.
STRATA = 8


@dataclasses.dataclass(frozen=True)
class Bound:
    """Of one continuation.

    Attributes:
        value: nats.
        error: standard error of the estimate; 0 where nothing was drawn.
        draws: masks drawn in each block, at most.
    """

    value: float
    error: float
    draws: int


@dataclasses.dataclass(frozen=True)
class _Forward:
    """A block to run, and what its log-probabilities count.

    Attributes:
        row: which sequence.
        start: position of the block.
        masked: positions in the block.
        targets: positions in the block, predicted now; W: the first of the next block.
        weight: of their log-probabilities.
        group: which estimate of the block they belong to.
    """

    row: int
    start: int
    masked: tuple[int, ...]
    targets: tuple[int, ...]
    weight: float
    group: int


def strata(n: int, count: int, rng: np.random.Generator) -> list[int]:
    """Numbers of masks 1..n for so many draws: evenly spread from a random start, each uniform."""
    first = int(rng.integers(n))
    return [(first + round(j * n / count)) % n + 1 for j in range(count)]


def masks_of(
    targets: Sequence[int], draws: int, rng: np.random.Generator
) -> Iterator[tuple[int, tuple[int, ...], float]]:
    """Masked sets of a block: (group, positions, weight of the log-probabilities in the group).

    All sets, in one group, where these are no more than the draws; else groups of `STRATA`, whose
    mean is the estimate.

    Args:
        targets: positions that are not known.
        draws: how many.
        rng: draws them.
    """
    n = len(targets)
    if 2**n - 1 <= draws:
        for size in range(1, n + 1):
            for chosen in itertools.combinations(targets, size):
                yield 0, chosen, 1 / (size * math.comb(n, size))
        return
    for group in range(draws // STRATA):
        for size in strata(n, STRATA, rng):
            picked = rng.choice(n, size, replace=False)
            yield group, tuple(targets[i] for i in sorted(picked)), n / size / STRATA


def _forwards(
    row: int, context: int, total: int, width: int, shift: bool, draws: int, stream: tuple
) -> Iterator[_Forward]:
    """All forwards of one sequence: tokens `context` to `total` are its targets."""
    for start in range(context // width * width, total, width):
        places = range(max(context - start, 0), min(total - start, width))
        if shift and places[0] == 0:
            # Known once the block before it is committed.
            yield _Forward(row, start - width, (), (width,), 1.0, -1)
            places = places[1:]
        if not places:
            continue
        after = tuple(range(places[-1] + 1, width))
        rng = generator(*stream, start)
        for group, chosen, weight in masks_of(places, draws, rng):
            yield _Forward(row, start, chosen + after, chosen, weight, group)


class BoundScorer:
    """Bounds for batches of continuations.

    Attributes:
        engine: runs the clean prefixes; its model, its limits.
        draws: masks of a block at most, a multiple of `STRATA`.
        seed: of the masks.
        together: blocks that run in one forward.

    Raises:
        ValueError: draws that make no whole group, or a single one, which has no error.
    """

    def __init__(self, engine: BlockEngine, *, draws: int = 128, seed: int = 0, together: int = 64):
        if draws % STRATA or draws < 2 * STRATA:
            raise ValueError(
                f"draws {draws} is not a multiple of {STRATA} of at least {2 * STRATA}"
            )
        self.engine, self.draws, self.seed, self.together = engine, draws, seed, together

    def __call__(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], *, draws: int | None = None
    ) -> list[Bound]:
        """Bounds of continuations, each given its context.

        The masks of a continuation depend on it, its context, the seed and the draws alone.

        Args:
            pairs: token ids, at least one of each.
            draws: in place of the scorer's.

        Raises:
            ValueError: an empty context or continuation, or a sequence beyond the engine's limit.
        """
        for number, (context, continuation) in enumerate(pairs):
            if not context or not continuation:
                raise ValueError(
                    f"pair {number} has {len(context)} tokens of context and {len(continuation)} "
                    "of continuation, expected one of each at least"
                )
        draws = draws or self.draws
        facts, _ = diffusion_of(self.engine.model.config)
        rows = [[*context, *continuation] for context, continuation in pairs]
        work = [
            forward
            for row, (context, _) in enumerate(pairs)
            for forward in _forwards(
                row,
                len(context),
                len(rows[row]),
                facts.block_size,
                facts.logit_shift,
                draws,
                (self.seed, "bound", draws, len(context), *rows[row]),
            )
        ]
        sums = self._run(rows, work)
        # By sequence and block, by group.
        blocks: list[dict[int, dict[int, float]]] = [{} for _ in rows]
        for forward, value in zip(work, sums, strict=True):
            place = forward.start if forward.group >= 0 else -1 - forward.start
            groups = blocks[forward.row].setdefault(place, {})
            groups[forward.group] = groups.get(forward.group, 0.0) + forward.weight * value
        return [_estimate(found, draws) for found in blocks]

    def _run(self, rows: Sequence[Sequence[int]], work: Sequence[_Forward]) -> np.ndarray:
        """Summed log p of each forward's targets."""
        engine, facts = self.engine, diffusion_of(self.engine.model.config)[0]
        width = facts.block_size
        generation = engine.prepare(rows, SamplingParams(max_new_tokens=1))
        generation.prefill()
        assert generation.state is not None
        padded = np.zeros((len(rows), max(map(len, rows)) + 2 * width), np.int32)
        for number, ids in enumerate(rows):
            padded[number, : len(ids)] = ids
        program = engine.programs.on_model(_log_p)
        found = []
        for first in range(0, len(work), self.together):
            part = list(work[first : first + self.together])
            part += [part[-1]] * (self.together - len(part))  # the program of the others
            row = np.array([forward.row for forward in part], np.int32)
            start = np.array([forward.start for forward in part], np.int32)
            index = start[:, None] + np.arange(width)
            masked = np.zeros(index.shape, bool)
            for number, forward in enumerate(part):
                masked[number, list(forward.masked)] = True
            shift = int(facts.logit_shift)
            tokens = padded[row[:, None], index], padded[row[:, None], index + shift]
            blocks = engine.put((row, start, *tokens, masked))
            log_p = program(engine.parameters.arrays, engine.rope, generation.state.layers, *blocks)
            # Row i - 1 predicts token i where there is a shift.
            log_p = np.asarray(log_p, np.float64)
            found += [log_p[j, [t - shift for t in f.targets]].sum() for j, f in enumerate(part)]
        return np.array(found[: len(work)])


def _log_p(
    model: Decoder,
    rope: RopeTable,
    layers: tuple[LayerKV, ...],
    row: Int[Array, " B"],
    start: Int[Array, " B"],
    tokens: Int[Array, "B W"],
    targets: Int[Array, "B W"],
    masked: Bool[Array, "B W"],
) -> Float[Array, "B W"]:
    """log p of a token at each row of some blocks, each behind a sequence's clean tokens.

    Args:
        model: parameters.
        rope: table that covers every position.
        layers: caches of the sequences.
        row: the sequence that a block belongs to.
        start: its position.
        tokens: of the block; one without a mask runs as a committed one.
        targets: one token a row.
        masked: tokens that are not known.
    """
    caches = (cache[row] for cache in layers)
    x, _ = run_layers(model, rope, caches, start, tokens, masked, ~jnp.any(masked, axis=1))
    log_p: jax.Array = score_tokens(model, x, x, targets)[0]
    return log_p


def _estimate(blocks: dict[int, dict[int, float]], draws: int) -> Bound:
    """Blocks added; the error is that of the mean over each block's groups."""
    value, variance = 0.0, 0.0
    for groups in blocks.values():
        values = np.array(list(groups.values()))
        value += float(values.mean())
        if len(values) > 1:
            variance += float(values.var(ddof=1)) / len(values)
    return Bound(value, math.sqrt(variance), draws)
