"""How far two runs of the same prompts agree."""

from __future__ import annotations

from collections.abc import Sequence


def equal_share(tokens: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """Share of positions at which two free-running generations drew the same token.

    The longer of the two counts, so that a run which stops early is not favoured. A single early
    difference makes later ones likely: the figure is a lower bound of per-step agreement.

    Args:
      tokens: generated tokens of each request.
      others: those of the run to compare with.

    Returns:
      A share in [0, 1]; 1 if nothing was generated in either.
    """
    equal = total = 0
    for mine, theirs in zip(tokens, others, strict=True):
        equal += sum(a == b for a, b in zip(mine, theirs, strict=False))
        total += max(len(mine), len(theirs))
    return equal / total if total else 1.0
