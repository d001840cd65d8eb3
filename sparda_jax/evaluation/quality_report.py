"""Tables and plot of the quality evaluation, made from its results file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = dict[str, dict[str, Any]]

# Policies as they stand in tables, in this order. Others, runs of the training that are compared
# with "sparda", have a table of their own.
ORDER = (
    "dense",
    "oracle",
    "teacher",
    "sparda_keys",
    "sparse",
    "sparda",
    "published",
    "infinigen",
    "local",
    "random",
    "initial",
)


def read_rows(path: Path) -> Rows:
    """The rows of a results file by name."""
    return {row["name"]: row for row in json.loads(path.read_text())["rows"]}


def _parts(rows: Rows, section: str) -> list[list[str]]:
    return [name.split("/") for name in rows if name.split("/")[0] == section]


def _policies(found: Sequence[str]) -> list[str]:
    rank = {name: number for number, name in enumerate(ORDER)}
    return sorted(dict.fromkeys(found), key=lambda name: (rank.get(name, len(ORDER)), name))


def _value(row: dict[str, Any] | None, digits: int, *, interval: bool = True) -> str:
    if row is None:
        return ""
    text = f"{row['median']:.{digits}f}"
    if not interval:
        return text
    low, high = row["spread"]
    return f"{text} [{low:.{digits}f}, {high:.{digits}f}]"


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Markdown; columns that are empty everywhere are left out."""
    full = [i for i in range(len(head)) if any(line[i] for line in lines)]
    rule = ["---"] + ["--:"] * (len(head) - 1)
    picked = ([line[i] for i in full] for line in (head, rule, *lines))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in picked)


def _settings(rows: Rows, section: str, *, own: bool) -> list[str]:
    found = [p[1] for p in _parts(rows, section) if p[1].endswith("_policy") == own]
    return list(dict.fromkeys(found))


def own_table(rows: Rows) -> str:
    """Under the model's own policy: all meters of the policies in `ORDER`."""
    return _own(rows, lambda name: name in ORDER)


def ablation_table(rows: Rows) -> str:
    """Likewise, "sparda" and the policies that are not in `ORDER`."""
    return _own(rows, lambda name: name == "sparda" or name not in ORDER)


def _own(rows: Rows, wanted: Callable[[str], bool]) -> str:
    lines = []
    (setting,) = _settings(rows, "selection", own=True)
    found = [p[4] for p in _parts(rows, "selection") if p[1] == setting and len(p) == 5]
    for name in filter(wanted, _policies(found)):
        line = [name]
        for meter in ("mass", "covered", "recall", "hits"):
            line.append(_value(rows.get(f"selection/{setting}/own/{meter}/{name}"), 3))
        for meter in ("gap", "kl"):
            line.append(_value(rows.get(f"language/{setting}/own/{meter}/{name}"), 4))
        lines.append(line)
    head = ["policy", "mass", "covered", "recall", "hits", "gap, nats", "KL, nats"]
    return table(head, lines)


def position_table(rows: Rows) -> str:
    """Mass of the free blocks by position, under the model's own policy."""
    (setting,) = _settings(rows, "selection", own=True)
    prefix = f"selection/{setting}/own/mass"
    found = [n.split("/") for n in rows if n.startswith(prefix) and "/tokens_" in n]
    buckets = list(dict.fromkeys(parts[5] for parts in found))
    lines = [
        [name, *(_value(rows.get(f"{prefix}/{name}/{bucket}"), 3) for bucket in buckets)]
        for name in _policies([parts[4] for parts in found])
        if name in ORDER
    ]
    return table(["policy", *(bucket.removeprefix("tokens_") for bucket in buckets)], lines)


def layer_table(rows: Rows) -> str:
    """Mass of the free blocks by layer, under the model's own policy."""
    (setting,) = _settings(rows, "selection", own=True)
    prefix = f"selection/{setting}/own/mass"
    found = [n.split("/") for n in rows if n.startswith(prefix) and "/layer_" in n]
    names = [n for n in _policies([p[4] for p in found]) if n in ORDER and n != "oracle"]
    layers = sorted({parts[5] for parts in found})
    lines = [
        [
            layer.removeprefix("layer_"),
            *(_value(rows.get(f"{prefix}/{name}/{layer}"), 3, interval=False) for name in names),
        ]
        for layer in layers
    ]
    return table(["layer", *names], lines)


def budget_table(rows: Rows) -> str:
    """Mass, KL and gap by budget, every setting with percentages."""
    lines = []
    for setting in _settings(rows, "language", own=False):
        parts = [p for p in _parts(rows, "language") if p[1] == setting and len(p) == 5]
        labels = [label for label in dict.fromkeys(p[2] for p in parts) if label != "100%"]
        for label in labels:
            names = [p[4] for p in parts if p[2] == label]
            for name in _policies(names):
                at = f"{setting}/{label}"
                lines.append(
                    [
                        f"{setting}, {label}, {name}",
                        _value(rows.get(f"selection/{at}/mass/{name}"), 3),
                        _value(rows.get(f"language/{at}/perplexity/{name}"), 3, interval=False),
                        _value(rows.get(f"language/{at}/gap/{name}"), 4),
                        _value(rows.get(f"language/{at}/kl/{name}"), 4),
                        _value(rows.get(f"language/{at}/kl_over_sparse/{name}"), 4),
                    ]
                )
    head = ["setting, budget, policy", "mass", "perplexity", "gap, nats", "KL, nats"]
    return table([*head, "KL less sparse's"], lines)


def needle_table(rows: Rows) -> str:
    """Share of values found: a line a setting, task and policy, a column a budget."""
    parts = [p for p in _parts(rows, "needle") if "_over_" not in p[3] and "_log_p" not in p[3]]
    labels = [label for label in dict.fromkeys(p[2] for p in parts) if label != "100%"]
    lines = []
    for setting in dict.fromkeys(p[1] for p in parts):
        for task in dict.fromkeys(p[3] for p in parts if p[1] == setting):
            for name in _policies([p[4] for p in parts if p[1] == setting and p[3] == task]):
                dense = rows.get(f"needle/{setting}/100%/{task}/{name}")
                cells = [rows.get(f"needle/{setting}/{label}/{task}/{name}") for label in labels]
                count = next(row["n"] for row in (dense, *cells) if row is not None)
                lines.append(
                    [
                        f"{setting}, {task}, {name}",
                        str(count),
                        _value(dense, 2),
                        *(_value(cell, 2) for cell in cells),
                    ]
                )
    return table(["setting, task, policy", "n", "all", *labels], lines)


TABLES: dict[str, Callable[[Rows], str]] = {
    "own": own_table,
    "ablations": ablation_table,
    "positions": position_table,
    "layers": layer_table,
    "budgets": budget_table,
    "needles": needle_table,
}


def fill(page: str, rows: Rows) -> str:
    """A page with the tables between `<!-- table NAME -->` and `<!-- end -->` made anew.

    Raises:
        ValueError: an unknown table.
    """

    def replaced(match: re.Match[str]) -> str:
        name = match[1]
        if name not in TABLES:
            raise ValueError(f"no table {name!r}, expected one of {', '.join(TABLES)}")
        return f"<!-- table {name} -->\n\n{TABLES[name](rows)}\n\n<!-- end -->"

    return re.sub(r"<!-- table (\w+) -->.*?<!-- end -->", replaced, page, flags=re.DOTALL)


def plot(rows: Rows, path: Path) -> None:
    """KL to dense and needles found against the budget, as one picture.

    Args:
        rows: see `read_rows`.
        path: its suffix decides the format.
    """
    import matplotlib

    matplotlib.use("Agg")
    # The same bytes for the same rows.
    matplotlib.rcParams |= {"svg.hashsalt": "quality", "svg.fonttype": "none"}
    import matplotlib.pyplot as pyplot

    curves = [p for p in _parts(rows, "language") if p[2:] != ["100%", "kl", "sparse"]]
    curves = [p for p in curves if p[3] == "kl" and not p[1].endswith("_policy")]
    panels = [(f"language/{setting}", "kl") for setting in dict.fromkeys(p[1] for p in curves)]
    needles = [p for p in _parts(rows, "needle") if p[4] == "sparda" and p[3] == "single"]
    panels += [(f"needle/{setting}", "single") for setting in dict.fromkeys(p[1] for p in needles)]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(3.6 * len(panels), 3.2), squeeze=False)
    # A policy has one colour in all panels; not every panel has all of them.
    names = _policies([p[4] for prefix, meter in panels for p in _points(rows, prefix, meter)])
    colors = {name: f"C{number}" for number, name in enumerate(names)}
    for axis, (prefix, meter) in zip(axes[0], panels, strict=True):
        _panel(axis, rows, prefix, meter, colors)
    lines = {line.get_label(): line for axis in axes[0] for line in axis.get_lines()}
    axes[0][0].legend(lines.values(), lines.keys(), fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _points(rows: Rows, prefix: str, meter: str) -> list[list[str]]:
    """Names of a panel's points, by parts."""
    found = [n.split("/") for n in rows if n.startswith(prefix + "/")]
    return [p for p in found if p[3] == meter and len(p) == 5 and p[2] != "100%"]


def _panel(axis: Any, rows: Rows, prefix: str, meter: str, colors: Mapping[str, str]) -> None:
    found = _points(rows, prefix, meter)
    for name in _policies([p[4] for p in found]):
        labels = [p[2] for p in found if p[4] == name]
        points = [rows[f"{prefix}/{label}/{meter}/{name}"] for label in labels]
        budgets = [float(label.removesuffix("%")) for label in labels]
        values = [point["median"] for point in points]
        low, high = ([point["spread"][side] for point in points] for side in range(2))
        style: dict[str, Any] = {"marker": "o", "markersize": 3, "linewidth": 1}
        axis.plot(budgets, values, color=colors[name], label=name, **style)
        axis.fill_between(budgets, low, high, color=colors[name], alpha=0.15, linewidth=0)
    dense = rows.get(f"{prefix}/100%/{meter}/dense")
    if dense is not None:
        axis.axhline(dense["median"], color="black", linewidth=0.8, linestyle=":", label="dense")
    axis.set_xscale("log", base=2)
    axis.set_xticks([6.25, 12.5, 25, 50], ["6.25", "12.5", "25", "50"])
    axis.set_xlabel("budget, % of the context", fontsize=8)
    setting = prefix.split("/")[1].replace("_", ", ")
    if meter == "kl":
        axis.set_yscale("log")
        axis.set_title(f"KL to dense, nats/token ({setting})", fontsize=8)
    else:
        axis.set_ylim(-0.03, 1.03)
        axis.set_title(f"needles found ({setting})", fontsize=8)
    axis.tick_params(labelsize=7)
