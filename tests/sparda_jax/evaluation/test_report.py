"""Every figure of docs/report.md is in a file of results/; pictures draw what they are given."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from scripts import report as script
from sparda_jax.evaluation import plots, report

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "report.md"
NUMBER = r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.]*[A-Za-z_])"


@pytest.fixture(scope="module")
def results():
    return report.read_results(ROOT / "results")


def numbers(tree):
    """All that a results file says, as numbers."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list):
        return [n for part in tree for n in numbers(part)]
    return [float(tree)] if isinstance(tree, (int, float)) else []


def test_pictures_are_of_files_that_are_there(results):
    pictures = re.findall(r"!\[[^]]*\]\((report/[^)]+)\)", PAGE.read_text())
    files = {f"{part.path.parent.name}_{part.path.stem}" for part in results}
    assert pictures
    for picture in pictures:
        assert (PAGE.parent / picture).is_file(), picture
        owner, kind = Path(picture).stem.rsplit("_", 1)
        assert kind == "budget" or owner in files, picture


def test_every_figure_in_a_table_is_a_row(results):
    """Not by the code that made the page: each number of a section is looked up in its file."""
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.M)[1:]
    by_title = {part.title: [part] for part in results} | dict.fromkeys(
        ("Against published numbers", "Accuracy against the budget"), results
    )
    checked = 0
    for section in sections:
        parts = by_title[section.splitlines()[0]]
        known = sorted(n for part in parts for n in numbers(part.document))
        body = re.sub(r"^\|.*\n(?=\| ---)", "", section, flags=re.M)  # without heads of tables
        for line in re.findall(r"^\| .*$", body, flags=re.M):
            cells = [cell for cell in line.split("|")[2:] if "`" not in cell]
            for text in re.findall(NUMBER, " ".join(cells)):
                half = 0.5 * 10.0 ** -len(text.partition(".")[2].partition("e")[0])
                slack = max(half, 1e-5 * abs(float(text)))  # six digits are shown
                near = known[np.searchsorted(known, float(text) - 1.001 * slack) :][:1]
                assert near and near[0] <= float(text) + 1.001 * slack, (
                    f"{text} is not in {parts[0].path}; run scripts/report.py? {line}"
                )
                checked += 1
    assert checked > 100


def test_no_sentence_of_ours_holds_a_figure():
    for text in (report.INTRODUCTION, report.COMPARISON, report.BUDGETS):
        assert not re.search(r"\d", text)


ROW = {"median": 1.5, "unit": "tok/s", "spread": [1, 2], "n": 3, "better": "higher"}


@pytest.fixture
def write(tmp_path):
    def file(name, rows, **more):
        path = tmp_path / "results" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {"command": "make it", "device": "none", "date": "today", "rows": rows}
        path.write_text(json.dumps(document | more))
        return tmp_path

    return file


def test_sections_and_comparison(write):
    name = "decode/model/4K/B2/hit0.9/sparda"
    write("gpu/decode.json", [ROW | {"name": name, "target": 2, "meets": False}])
    published = {"name": "decode/model/4K/B2/sparda", "median": 9, "unit": "tok/s", "device": "H"}
    write("published/paper.json", [published])
    scores = [ROW | {"name": f"ruler/{n}K/vt/{m}", "unit": "score"}
              for n in (1, 2) for m in ("dense", "sparda")]  # fmt: skip
    folder = write("cpu/evaluation.json", scores, settings={})
    page = report.page(
        report.read_results(folder / "results"), {"results/gpu/decode.json": ["x.svg"]}
    )
    assert f"| decode/model/4K/B2/sparda | 9 | tok/s | H | 1.5 [1, 2] | none | `{name}` |" in page
    assert f"| {name} | 1.5 [1, 2] | tok/s | 3 | 2 | missed |" in page
    assert "### ruler, 1K" in page and "| vt | score | 3 | 1.5 [1, 2] | 1.5 [1, 2] |" in page
    assert "```\nmake it\n```" in page and "![gpu: decode](x.svg)" in page
    (folder / "results" / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad\.json: no command, date, device, rows"):
        report.read_results(folder / "results")


def test_pictures(write):
    pytest.importorskip("matplotlib", reason="the extra 'plots' is not installed")
    rows = [ROW | {"name": f"decode/m/{k}K/B{b}/sparda", "of_roofline": 0.5}
            for b, k in ((1, 4), (2, 4), (2, 8))]  # fmt: skip
    write("gpu/decode.json", rows, events=[["compute", "attend", 0, 5], ["copy", "fetch", 2, 9]])
    ids = [[[[0, 2]], [[1, 2]]]]
    folder = write(
        "cpu/attended.json", [], attended={"blocks": 3, "ids": ids}, unmasked=[[0, 1, -1]]
    )
    scores = [ROW | {"name": f"ruler/{n}K/vt/dense", "unit": "score"} for n in (1, 2)]
    scores += [ROW | {"name": f"perplexity/1K/tokens_{a}-{b}/dense"} for a, b in ((1, 8), (8, 16))]
    write("cpu/evaluation.json", scores, settings={})
    for budget in (2, 8):
        rules = {"budget_blocks": budget, "geometry": {"block_size": 64}}
        modes = {"dense": {"engine": {}}, "sparse": {"engine": {}, "sparse": rules}}
        means = [ROW | {"name": f"ruler/1K/mean/{mode}", "unit": "score"} for mode in modes]
        write(f"gpu/evaluation_{budget}.json", means, settings={"modes": modes})
    shown = report._by_budget(report.read_results(folder / "results"))
    assert [point.x for point in shown["ruler, 1K tokens"]["sparse, blocks of 64"]] == [0.125, 0.5]
    assert [point.x for point in shown["ruler, 1K tokens"]["dense"]] == [1.0]
    arguments = ["--results", str(folder / "results"), "--page", str(folder / "docs" / "page.md")]
    stale = folder / "docs" / "page" / "gone.svg"
    stale.parent.mkdir(parents=True)
    stale.touch()
    assert script.main(arguments) == 0 and not stale.exists()
    drawn = {path.name: path.read_bytes() for path in stale.parent.iterdir()}
    kinds = {name.removesuffix(".svg").split("_", 1)[1] for name in drawn}
    assert kinds == {
        *("budget", "decode_batch", "decode_context", "decode_roofline", "decode_timeline"),
        *("attended_attended", "attended_unmasked", "evaluation_length", "evaluation_position"),
    }
    assert all(name in (folder / "docs" / "page.md").read_text() for name in drawn)
    assert script.main(arguments) == 0
    assert drawn == {path.name: path.read_bytes() for path in stale.parent.iterdir()}
    mask = report.blocks_of({"blocks": 3, "ids": ids})
    assert mask.tolist() == [[[[True, False, True]], [[False, True, True]]]]
    for call in (plots.attended, plots.unmasking):
        with pytest.raises(ValueError, match=r"got shape \(3,\)"):
            call(np.zeros(3), folder / "x.svg")
    with pytest.raises(ValueError, match="a timeline of no events"):
        plots.timeline([], folder / "x.svg")
