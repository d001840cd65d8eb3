"""Pictures: curves, blocks attended, a timeline, the order in which positions were unmasked.

SVG or PNG by the file's suffix; the same bytes for the same numbers. Needs the extra `plots`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Point:
    """A measured point with its interval."""

    x: float
    y: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that ran.

    Attributes:
        lane: where: a stream, a thread.
        name: what.
        start: microseconds.
        duration: microseconds.
    """

    lane: str
    name: str
    start: float
    duration: float


@contextlib.contextmanager
def _figure(path: Path, width: float, height: float, count: int = 1) -> Iterator[Any]:
    """Axes to draw on; saved at the end."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("pictures need matplotlib: install the extra 'plots'") from error
    matplotlib.use("Agg")
    with matplotlib.rc_context({"svg.hashsalt": "sparda_jax", "svg.fonttype": "none"}):
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(
            1, count, figsize=(width * count, height), squeeze=False, layout="constrained"
        )
        yield axes[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)


def curves(
    panels: Mapping[str, Mapping[str, Sequence[Point]]],
    path: Path,
    *,
    x: str,
    y: str,
) -> None:
    """A panel for each title, a curve with its interval for each name, over powers of two.

    Args:
        panels: points by title and name.
        path: of the picture.
        x: what the horizontal axis shows.
        y: what the vertical axis shows.
    """
    with _figure(path, 3.8, 3.2, len(panels)) as axes:
        named: set[str] = set()
        for axis, (title, series) in zip(axes, panels.items(), strict=True):
            for name, points in series.items():
                points = sorted(points, key=lambda point: point.x)
                xs = [point.x for point in points]
                line = [point.y for point in points]
                axis.plot(xs, line, marker="o", markersize=3, linewidth=1, label=name)
                low, high = ([getattr(p, side) for p in points] for side in ("low", "high"))
                axis.fill_between(xs, low, high, alpha=0.15)
            ticks = sorted({p.x for points in series.values() for p in points})
            axis.set_xscale("log", base=2)
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.minorticks_off()
            axis.set_xlabel(x, fontsize=8)
            axis.set_ylabel(y, fontsize=8)
            axis.set_title(title, fontsize=8)
            axis.tick_params(labelsize=7)
            if named != set(series):  # else the legend before still holds
                axis.legend(fontsize=7)
                named = set(series)


def bars(values: Mapping[str, Point], path: Path, *, x: str, mark: float | None = None) -> None:
    """A horizontal bar for each name, and a line at `mark`; a point's x is not looked at."""
    with _figure(path, 6, 0.6 + 0.18 * len(values)) as (axis,):
        names = list(values)[::-1]
        heights = [values[name].y for name in names]
        error = [
            [max(0.0, values[n].y - values[n].low) for n in names],
            [max(0.0, values[n].high - values[n].y) for n in names],
        ]
        axis.barh(names, heights, xerr=error, height=0.7, error_kw={"linewidth": 0.8})
        if mark is not None:
            axis.axvline(mark, color="black", linewidth=0.8, linestyle=":")
        axis.set_xlabel(x, fontsize=8)
        axis.tick_params(labelsize=6)


def attended(blocks: np.ndarray, path: Path) -> None:
    """Heat map of the blocks attended: a panel a KV head, steps on top of one another by layer.

    Args:
        blocks: `bool[L, K, U, M]`: layer, KV head, step, block.
        path: of the picture.

    Raises:
        ValueError: another shape.
    """
    if blocks.ndim != 4:
        raise ValueError(f"expected [layers, heads, steps, blocks], got shape {blocks.shape}")
    layers, heads, steps, _ = blocks.shape
    with _figure(path, 3.2, 0.8 + 0.018 * layers * steps, heads) as axes:
        for head, axis in enumerate(axes):
            image = blocks[:, head].reshape(layers * steps, -1)
            axis.imshow(image, aspect="auto", interpolation="nearest", cmap="Greys")
            axis.set_yticks(
                [steps * layer + (steps - 1) / 2 for layer in range(0, layers, 2)],
                [str(layer) for layer in range(0, layers, 2)],
            )
            for layer in range(1, layers):
                axis.axhline(steps * layer - 0.5, color="tab:blue", linewidth=0.3)
            axis.set_title(f"KV head {head}", fontsize=8)
            axis.set_xlabel("block", fontsize=8)
            axis.tick_params(labelsize=6)
        axes[0].set_ylabel(f"layer; in it steps 0 to {steps - 1}", fontsize=8)


def timeline(events: Sequence[Event], path: Path) -> None:
    """What ran when: a line a lane, a colour a name.

    Args:
        events: of a few steps, at most.
        path: of the picture.

    Raises:
        ValueError: nothing ran.
    """
    if not events:
        raise ValueError("a timeline of no events")
    lanes = list(dict.fromkeys(event.lane for event in events))
    names = list(dict.fromkeys(event.name for event in events))
    start = min(event.start for event in events)
    with _figure(path, 9, 0.8 + 0.35 * len(lanes)) as (axis,):
        for number, name in enumerate(names):
            for row, lane in enumerate(lanes):
                spans = [
                    (event.start - start, event.duration)
                    for event in events
                    if (event.lane, event.name) == (lane, name)
                ]
                if spans:
                    axis.broken_barh(spans, (row - 0.4, 0.8), color=f"C{number % 10}")
            axis.plot([], [], color=f"C{number % 10}", linewidth=4, label=name)
        axis.set_yticks(range(len(lanes)), lanes)
        axis.invert_yaxis()
        axis.set_xlabel("microseconds", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.legend(fontsize=6, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.35))


def unmasking(steps: np.ndarray, path: Path) -> None:
    """Order in which a block-diffusion model unmasked positions.

    Args:
        steps: `int[blocks, W]`, the denoising step at which each position was settled; -1: never.
        path: of the picture.

    Raises:
        ValueError: another shape.
    """
    if steps.ndim != 2:
        raise ValueError(f"expected [blocks, positions], got shape {steps.shape}")
    with _figure(path, 5, 0.8 + 0.25 * len(steps)) as (axis,):
        shown = np.ma.masked_less(steps, 0)
        image = axis.imshow(shown, aspect="auto", interpolation="nearest", cmap="viridis")
        axis.set_xlabel("position in the block", fontsize=8)
        axis.set_ylabel("block", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.figure.colorbar(image, ax=axis).set_label("denoising step", fontsize=8)
