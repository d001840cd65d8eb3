"""docs/report.md from the files in results/: every figure in it is a row of one of them.

Nothing is computed here but the choice of rows and their rounding, and no sentence holds a figure:
the page can be made again from the files at any time, and a test does.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sparda_jax.evaluation import plots
from sparda_jax.evaluation.plots import Point
from sparda_jax.evaluation.quality_report import TABLES as QUALITY_TABLES
from sparda_jax.evaluation.quality_report import table

PUBLISHED = "published"
# Files of more rows are summarised by tables of their own kind.
MOST_ROWS = 130
INTRODUCTION = """\
# Report

Made by `python scripts/report.py` from the files in `results/`, and by nothing else: do not edit
it. Each section is a file, with the command that measured it. Brackets hold what the file calls
spread: an interval of confidence for scores, the range or the outer percentiles of repetitions for
times.
"""
BUDGETS = """\
## Accuracy against the budget

Mean scores of the evaluations below over the share of the context that a token attends; dense
attends all of it. Blocks of another size are another policy.
"""
COMPARISON = """\
## Against published numbers

Theirs are for other weights and other hardware than ours, as the columns say; they come from
secondary sources (named in the file). Ours is empty where nothing comparable has been measured. Our
decode rows are of random weights at the hit rate that a row names, which decides the speed; the hit
rates of theirs are the models' own and not known to us.
"""


@dataclasses.dataclass(frozen=True)
class Results:
    """A results file.

    Attributes:
        path: from the folder above `results`.
        document: all of it.
    """

    path: Path
    document: dict[str, Any]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Its rows."""
        return list(self.document["rows"])

    @property
    def named(self) -> dict[str, dict[str, Any]]:
        """Rows that have a name, by it."""
        return {row["name"]: row for row in self.rows if "name" in row}

    @property
    def title(self) -> str:
        """Folder and name."""
        return f"{self.path.parent.name}: {self.path.stem.replace('_', ' ')}"


def read_results(folder: Path) -> list[Results]:
    """All files below a folder, in the order of their names.

    Raises:
        ValueError: a file without rows or command.
    """
    found = []
    for path in sorted(folder.rglob("*.json")):
        document = json.loads(path.read_text())
        missing = {"command", "rows", "device", "date"} - document.keys()
        if missing:
            raise ValueError(f"{path}: no {', '.join(sorted(missing))}")
        found.append(Results(path.relative_to(folder.parent), document))
    return found


def _figure(value: Any) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def _interval(row: dict[str, Any]) -> str:
    value = _figure(row["median"])
    if not row.get("spread"):
        return value
    low, high = row["spread"]
    return f"{value} [{_figure(low)}, {_figure(high)}]"


def _plain_table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a row."""
    lines = [
        [
            row["name"],
            _interval(row),
            row["unit"],
            _figure(row.get("n", "")),
            _figure(row.get("of_roofline", "")),
            _figure(row.get("target", "")),
            ("met" if row["meets"] else "missed") if "meets" in row else "",
        ]
        for row in rows
    ]
    return table(["row", "value", "unit", "n", "of roofline", "target", ""], lines)


def _own_columns(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of another form, with their own fields."""
    head = list(dict.fromkeys(key for row in rows for key in row if key != "commit"))
    return table(head, [[_figure(row.get(key, "")) for key in head] for row in rows])


def _score_tables(results: Results) -> Iterator[str]:
    """Tasks by mode, for every suite and length of an evaluation."""
    # suite, length, what, mode; what may hold slashes.
    split = {
        name: (*name.split("/")[:2], "/".join(name.split("/")[2:-1]), name.split("/")[-1])
        for name in results.named
    }
    for heading in dict.fromkeys(parts[:2] for parts in split.values()):
        here = {parts[2:]: results.named[n] for n, parts in split.items() if parts[:2] == heading}
        modes = list(dict.fromkeys(mode for _, mode in here))
        lines = []
        for what in dict.fromkeys(what for what, _ in here):
            rows = [here.get((what, mode)) for mode in modes]
            some = next(row for row in rows if row)
            cells = [_interval(row) if row else "" for row in rows]
            lines.append([what, some["unit"], _figure(some.get("n", "")), *cells])
        yield f"### {', '.join(heading)}\n\n" + table(["", "unit", "n", *modes], lines)


def _quality_tables(results: Results) -> Iterator[str]:
    """Those of docs/forecast_quality.md for which there are rows."""
    sections = {name.split("/")[0] for name in results.named}
    own = any(name.split("/")[1].endswith("_policy") for name in results.named)
    wanted = {
        "own": own and "selection" in sections,
        "positions": own and "selection" in sections,
        "layers": own and "selection" in sections,
        "budgets": "language" in sections,
        "needles": "needle" in sections,
    }
    for name, there in wanted.items():
        if there:
            yield f"### {name}\n\n{QUALITY_TABLES[name](results.named)}"


def _body(results: Results) -> str:
    rows = results.rows
    if not all("name" in row for row in rows):
        return _own_columns(rows)
    if "settings" in results.document:
        return "\n\n".join(_score_tables(results))
    if {name.split("/")[0] for name in results.named} & {"selection", "language", "needle"}:
        return "\n\n".join(_quality_tables(results))
    shown = _plain_table(rows[:MOST_ROWS])
    return shown if len(rows) <= MOST_ROWS else f"{shown}\n\nFurther rows stand in the file."


def _section(results: Results, pictures: Sequence[str]) -> str:
    document = results.document
    commits = sorted({row.get("commit", document.get("commit", "")) for row in results.rows})
    versions = ", ".join(f"{k} {v}" for k, v in document.get("versions", {}).items())
    facts = [
        f"[{results.path}](../{results.path})",
        document["device"],
        document["date"],
        f"commit {', '.join(filter(None, commits))}",
        versions,
    ]
    parts = [
        f"## {results.title}",
        "; ".join(fact for fact in facts if fact) + ".",
        f"```\n{document['command']}\n```",
        document.get("notes", ""),
        *(f"![{results.title}]({name})" for name in pictures),
        _body(results),
    ]
    return "\n\n".join(part for part in parts if part)


def _comparison(results: Sequence[Results]) -> str:
    """Published rows beside those of ours that are named like them but for the hit rate."""
    ours: dict[str, list[tuple[str, dict[str, Any], Results]]] = {}
    for part in results:
        for name, row in part.named.items() if part.path.parent.name != PUBLISHED else ():
            ours.setdefault(re.sub(r"/hit[\d.]+", "", name), []).append((name, row, part))
    lines = []
    for part in results:
        for name, row in part.named.items() if part.path.parent.name == PUBLISHED else ():
            theirs = [name, _figure(row["median"]), row["unit"], row["device"]]
            found = [
                [*theirs, _interval(mine), where.document["device"], f"`{own}`"]
                for own, mine, where in ours.get(name, [])
            ]
            lines += found or [[*theirs, "", "", ""]]
    head = ["", "theirs", "unit", "on", "ours", "on", "row"]
    return f"{COMPARISON}\n{table(head, lines)}" if lines else ""


def page(results: Sequence[Results], pictures: dict[str, list[str]]) -> str:
    """The whole page.

    Args:
        results: see `read_results`.
        pictures: paths from the page, by the path of the results file that they show.
    """
    own = [part for part in results if part.path.parent.name != PUBLISHED]
    budgets = [f"![Accuracy against the budget]({name})" for name in pictures.get("budget", [])]
    budgets[:0] = [BUDGETS.rstrip()] if budgets else []
    sections = [_section(part, pictures.get(str(part.path), [])) for part in own]
    return (
        "\n\n".join(
            filter(None, [INTRODUCTION.rstrip(), _comparison(results), *budgets, *sections])
        )
        + "\n"
    )


# Pictures


def _point(x: float, row: dict[str, Any]) -> Point:
    low, high = row.get("spread") or (row["median"],) * 2
    return Point(x, row["median"], low, high)


def _throughput(over: str, results: Results) -> dict[str, dict[str, list[Point]]]:
    """Rows named .../<context>K/B<batch>/<what> in tok/s over one of both: a panel the other."""
    panels: dict[str, dict[str, list[Point]]] = {}
    for name, row in results.named.items():
        found = re.fullmatch(r"(.*)/(\d+)K/B(\d+)/(.+)", name)
        if found and row["unit"] == "tok/s":
            title, x = f"{found[1]}, {found[2]}K", int(found[3])
            if over == "context":
                title, x = f"{found[1]}, batch {found[3]}", 1024 * int(found[2])
            panels.setdefault(title, {}).setdefault(found[4], []).append(_point(x, row))
    return panels


def _share(own: dict[str, Any], length: float) -> float:
    """Of a context, what a token attends in a mode."""
    if "sparse" in own:
        rules = own["sparse"]
        return min(1.0, rules["budget_blocks"] * rules["geometry"]["block_size"] / length)
    budget = own["engine"].get("budget")
    return 1.0 if budget is None or own["engine"]["mode"] == "dense" else budget["share"]


def _by_budget(results: Sequence[Results]) -> dict[str, dict[str, list[Point]]]:
    """Mean scores of evaluations of one device over the budget: a panel a suite and length."""
    panels: dict[str, dict[str, list[Point]]] = {}
    for part in results:
        settings = part.document.get("settings", {}).get("modes", {})
        for name, row in part.named.items():
            found = re.fullmatch(r"(\w+)/(\w+)/mean/(\w+)", name)
            length = _length(found[2]) if found else None
            if not found or not length or found[3] not in settings or row["unit"] != "score":
                continue
            own, mode = settings[found[3]], found[3]
            if "sparse" in own:
                mode += f", blocks of {own['sparse']['geometry']['block_size']}"
            kind = "blocks" if "denoise" in own else found[1]
            point = _point(_share(own, length), row)
            points = panels.setdefault(f"{kind}, {found[2]} tokens", {}).setdefault(mode, [])
            if point not in points:  # one dense run serves several files
                points.append(point)
    return panels


def _length(text: str) -> float | None:
    found = re.fullmatch(r"(\d+)(K?)", text)
    return int(found[1]) * (1024 if found[2] else 1) if found else None


def _by_length(results: Results) -> dict[str, dict[str, list[Point]]]:
    """Scores of an evaluation by length: a panel a task or mean."""
    panels: dict[str, dict[str, list[Point]]] = {}
    if "settings" not in results.document:
        return panels
    for name, row in results.named.items():
        parts = name.split("/")
        length = _length(parts[1]) if len(parts) == 4 else None
        if length and row["unit"] == "score" and "." not in parts[2]:
            series = panels.setdefault(f"{parts[0]}, {parts[2]}", {})
            series.setdefault(parts[3], []).append(_point(length, row))
    return panels


def _by_position(results: Results) -> dict[str, dict[str, list[Point]]]:
    """Perplexity by position: a panel a length."""
    panels: dict[str, dict[str, list[Point]]] = {}
    for name, row in results.named.items():
        found = re.fullmatch(r"perplexity/(\w+)/tokens_(\d+)-(\d+)/(\w+)", name)
        if found:
            series = panels.setdefault(f"perplexity, {found[1]} tokens", {})
            series.setdefault(found[4], []).append(_point(int(found[3]), row))
    return panels


_CURVES: dict[str, tuple[Callable[[Results], dict[str, dict[str, list[Point]]]], str, str]] = {
    "batch": (partial(_throughput, "batch"), "batch", "tokens/s"),
    "context": (partial(_throughput, "context"), "context", "tokens/s"),
    "length": (_by_length, "tokens", "score"),
    "position": (_by_position, "position, up to", "perplexity"),
}


def _several(panels: dict[str, dict[str, list[Point]]]) -> dict[str, dict[str, list[Point]]]:
    """Panels that have a curve: one point is none."""
    xs = lambda series: {point.x for points in series.values() for point in points}
    return {title: series for title, series in panels.items() if len(xs(series)) > 1}


def draw(results: Sequence[Results], folder: Path) -> dict[str, list[str]]:
    """Draws what can be drawn of each file.

    Args:
        results: see `read_results`.
        folder: for the pictures.

    Returns:
        File names by the path of the results file; those of several files by "budget".
    """
    made: dict[str, list[str]] = {}

    def target(part: Results, kind: str) -> Path:
        name = f"{part.path.parent.name}_{part.path.stem}_{kind}.svg"
        made.setdefault(str(part.path), []).append(name)
        return folder / name

    for device in sorted({part.path.parent.name for part in results}):
        panels = _several(_by_budget([p for p in results if p.path.parent.name == device]))
        if panels:
            made.setdefault("budget", []).append(f"{device}_budget.svg")
            path = folder / made["budget"][-1]
            plots.curves(panels, path, x="share of the context attended", y="score")
    for part in results:
        if part.path.parent.name == PUBLISHED:
            continue
        for kind, (choose, x, y) in _CURVES.items():
            if panels := _several(choose(part)):
                plots.curves(panels, target(part, kind), x=x, y=y)
        roofline = {
            name: Point(0, row["of_roofline"], row["of_roofline"], row["of_roofline"])
            for name, row in part.named.items()
            if "of_roofline" in row
        }
        if roofline:
            plots.bars(roofline, target(part, "roofline"), x="share of the roofline", mark=1.0)
        if "attended" in part.document:
            plots.attended(blocks_of(part.document["attended"]), target(part, "attended"))
        if "events" in part.document:
            events = [plots.Event(*event) for event in part.document["events"]]
            plots.timeline(events, target(part, "timeline"))
        if "unmasked" in part.document:
            import numpy as np

            plots.unmasking(np.array(part.document["unmasked"]), target(part, "unmasked"))
    return made


def blocks_of(attended: dict[str, Any]) -> Any:
    """The mask in a results file: `{"blocks": M, "ids": [layer][head][step] -> ids}`."""
    import numpy as np

    ids = attended["ids"]
    mask = np.zeros((len(ids), len(ids[0]), len(ids[0][0]), attended["blocks"]), bool)
    for layer, head, step in np.ndindex(*mask.shape[:3]):
        mask[layer, head, step, ids[layer][head][step]] = True
    return mask
