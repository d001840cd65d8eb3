"""What block denoising loses when it attends chosen rows of the prefix, teacher-forced.

Windows of text are prefilled whole. Then some of their blocks are denoised with everything before
them true: some tokens are masked, one forward predicts them, over all of the prefix or over what a
mode chooses. Every mode meets the same windows and masks, so differences are paired.

    bound   E_m [mean over m masked tokens of -log p], m uniform in 1..n: nats a token of the
            any-order bound on -log p(block | prefix)
    KL      mean over masked tokens of KL(p_dense || p_mode)
    agreement  share of the masked tokens whose first choice is that of dense attention
    recall  share of the rows that all queries of the block choose over dense attention
    mass    share of these queries' attention to the rows to choose from that the chosen ones hold

What a mode chooses is what its engine would: `mage` by the dense first forward of the block;
`herald` by the draft of the block before, whose own pool was chosen like a first block's;
`herald_serial` by the centre query of the block itself; `infinigen` by the layer before, in every
forward. `near` attends nothing but the init rows and the block before: what the rest is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from sparda_jax.evaluation import herald_meters as meters
from sparda_jax.evaluation.herald_windows import Given, Pools, Windows
from sparda_jax.herald.layerwise import OnDevice, Rows

# Rows by mode, share and layer.
Chosen = dict[str, dict[float, meters.Rows]]
# By mode, share and meter, one value a window.
Scores = dict[tuple[str, float, str], np.ndarray]


class _Scored:
    """Dense attention, and what the queries think of the rows that a chooser scans."""

    def __init__(self, windows: Windows, end: int):
        self._windows, self._end = windows, end
        self.scores: dict[int, np.ndarray] = {}

    def pool(self, number: int, queries: jax.Array, rows: Rows) -> None:
        self.scores[number] = self._windows.row_scores(number, queries, self._end)


class _Several:
    """Dense attention, and a choice for each budget."""

    def __init__(self, choosers: Sequence[OnDevice | _Scored]):
        self.choosers = choosers

    def pool(self, number: int, queries: jax.Array, rows: Rows) -> None:
        for chooser in self.choosers:
            chooser.pool(number, queries, rows)


def masks(windows: Windows, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Masks of a block, the number of masked tokens one from each part of 1..n."""
    whole = windows.all_masked()
    count = int(whole[0].sum())
    for part in range(windows.plan.masks):
        masked = np.zeros_like(whole)
        for row in range(len(whole)):
            number = 1 + int((part + rng.random()) / windows.plan.masks * count)
            places = np.flatnonzero(whole[row])
            masked[row, rng.choice(places, min(number, count), replace=False)] = True
        yield masked


def measure(windows: Windows, rng: np.random.Generator, report: Callable[[str], None]) -> Scores:
    """Meters of every mode and budget, a mean over blocks and masks for each window.

    Args:
        windows: prefilled.
        rng: of the masks.
        report: told of each block.

    Returns:
        By mode, share and meter, `[B]`; of "dense" and "near" the share is 1 and 0.
    """
    plan, width = windows.plan, windows.width
    length = windows.tokens.shape[1]
    places = np.linspace(0.75 * length, length - width, plan.blocks).astype(int) // width * width
    totals: dict[tuple[str, float, str], list[np.ndarray]] = {}

    def add(mode: str, share: float, meter: str, values: np.ndarray) -> None:
        totals.setdefault((mode, share, meter), []).append(values)

    for start in map(int, places):
        pools, found, scores = _choices(windows, start)
        recall = lambda ids, share, of=found["mage"]: meters.recalls(ids, of[share], length)
        for mode, by in found.items():
            for share, ids in by.items():
                add(mode, share, "recall", recall(ids, share))
                add(mode, share, "mass", meters.masses(ids, scores, length))
        for masked in masks(windows, rng):
            runs = _runs(windows, start, masked, pools)
            for share in plan.shares if "infinigen" in plan.modes else ():
                windows.at(start, masked)
                chooser = windows.chooser(share, start - width)
                runs["infinigen", share] = windows.run("all", windows.own(chooser, before=True))
                add("infinigen", share, "recall", recall(_ids(chooser), share))
            for (mode, share), x in runs.items():
                figures = windows.scores(x, runs["dense", 1.0], start, masked)
                for meter, values in zip(("bound", "kl", "agreement"), figures, strict=True):
                    add(mode, share, meter, values)
        report(f"block at {start}")
    return {key: np.mean(values, axis=0) for key, values in totals.items()}


def _runs(
    windows: Windows, start: int, masked: np.ndarray, pools: dict[str, dict[float, Pools]]
) -> dict[tuple[str, float], jax.Array]:
    """Hidden states of dense attention and of every pool, by mode and share."""
    windows.at(start, masked)
    none: Pools = [None] * len(pools["near"][0.0])
    runs = {("dense", 1.0): windows.run("all", Given(none))}
    for mode, by in pools.items():
        for share, chosen in by.items():
            runs[mode, share] = windows.run("all", Given(chosen))
    return runs


def _ids(chooser: OnDevice) -> meters.Rows:
    return {number: np.asarray(ids) for number, ids in chooser.ids.items()}


def _choices(
    windows: Windows, start: int
) -> tuple[dict[str, dict[float, Pools]], Chosen, dict[int, np.ndarray]]:
    """Pools of the modes that choose once a block, the rows, and what all queries think of each."""
    plan, width = windows.plan, windows.width
    pools: dict[str, dict[float, Pools]] = {"near": {0.0: windows.empty_pools()}}
    found: Chosen = {}

    def keep(mode: str, choosers: Sequence[OnDevice]) -> None:
        if mode in plan.modes:
            pools[mode] = {s: c.pools for s, c in zip(plan.shares, choosers, strict=True)}
        found[mode] = {
            share: _ids(chooser) for share, chooser in zip(plan.shares, choosers, strict=True)
        }

    def choosers(end: int) -> list[OnDevice]:
        return [windows.chooser(share, end) for share in plan.shares]

    whole = windows.all_masked()
    windows.at(start, whole)
    every, scored = choosers(start - width), _Scored(windows, start - width)
    windows.run("all", _Several([*every, scored]))
    keep("mage", every)
    if "herald_serial" in plan.modes:
        serial = []
        for share in plan.shares:
            windows.at(start, whole)
            chooser = windows.chooser(share, start - width)
            windows.run("centre", windows.own(chooser, before=False))
            serial.append(chooser)
        keep("herald_serial", serial)
    if "herald" in plan.modes:
        windows.at(start - width, whole)
        first = choosers(start - 2 * width)
        windows.run("centre", _Several(first))
        ahead = []
        for share, cold in zip(plan.shares, first, strict=True):
            windows.at(start - width, whole)
            ahead.append(windows.look_ahead(cold.pools, share, start - width))
        keep("herald", ahead)
    return pools, found, scored.scores
