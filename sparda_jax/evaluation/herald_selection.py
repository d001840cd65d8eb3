"""What int8 keys and runs of rows cost in recall, on a model's own keys and queries.

The queries are those of the centre [MASK] of a window's last block, over all rows before the block
ahead of it, in every layer. The exact choice, row by row, is what all others are compared with:

    recall  share of its rows that are chosen
    mass    softmax mass that the chosen rows hold, over what its rows hold

Both say nothing of speed: `benchmark.py herald-host` measures how fast each way scans and gathers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from host_offload.cpu_selection import (
    RUNS,
    CpuSelector,
    SelectionRule,
    covered_mass,
    quantise_rows,
    recall,
)
from sparda_jax.evaluation.herald_windows import Windows
from sparda_jax.evaluation.kernel_benchmarks.harness import Row
from sparda_jax.evaluation.statistics import mean
from sparda_jax.evaluation.tables import make_row
from sparda_jax.herald.config import Budget
from sparda_jax.herald.layerwise import Rows

SHORTLISTS = (1.0, 1.125, 1.5, 2.0)


class _Queries:
    """Dense attention; keeps every layer's queries."""

    def __init__(self) -> None:
        self.of: dict[int, np.ndarray] = {}

    def pool(self, number: int, queries: jax.Array, rows: Rows) -> None:
        self.of[number] = np.asarray(queries)


def rows(windows: Windows, prefix: str) -> Iterator[Row]:
    """Every way at every budget of the plan; intervals over windows.

    Args:
        windows: prefilled.
        prefix: of the rows' names.
    """
    plan, width = windows.plan, windows.width
    start = windows.tokens.shape[1] // width * width - width
    first, end = plan.init_rows, start - width
    windows.at(start, windows.all_masked())
    kept = _Queries()
    windows.run("centre", kept)
    totals: dict[str, list[list[float]]] = {}
    for number, queries in kept.of.items():
        keys = windows.keys(number)
        small, scales = (np.asarray(part) for part in jax.jit(quantise_rows)(keys))
        for row in range(len(keys)):
            for share in plan.shares:
                count = Budget(share).count(end - first, max(RUNS))
                place = first, end, count
                own = (keys[row], small[row], scales[row], queries[row], place)
                for name, value in _compared(*own).items():
                    name = f"{100 * share:g}%/{name}"
                    totals.setdefault(name, [[] for _ in keys])[row].append(value)
    for name, of_windows in totals.items():
        yield make_row(f"{prefix}/{name}", mean(np.array(of_windows).mean(axis=1)), "share")


def _compared(
    keys: Any,
    small: Any,
    scales: Any,
    queries: np.ndarray,
    place: tuple[int, int, int],
) -> dict[str, float]:
    """Recall and mass of every way, for one window and layer."""
    scale = keys.shape[-1] ** -0.5
    exact = CpuSelector(SelectionRule(), scale)
    wanted = exact.select(keys, queries, *place)
    scores = exact.scores(keys, queries, *place[:2])
    most = covered_mass(scores, wanted, place[0])
    chosen = {}
    for run in RUNS[1:]:
        rule = SelectionRule(run=run)
        chosen[f"run{run}"] = CpuSelector(rule, scale).select(keys, queries, *place)
    for shortlist in SHORTLISTS:
        selector = CpuSelector(SelectionRule(shortlist=shortlist), scale)
        chosen[f"int8_shortlist{shortlist:g}"] = selector.select_quantised(
            small, scales, keys, queries, *place
        )
    found = {f"{name}/recall": recall(ids, wanted) for name, ids in chosen.items()}
    masses = {
        f"{name}/mass": covered_mass(scores, ids, place[0]) / most for name, ids in chosen.items()
    }
    return found | masses
