"""From files to rows to tables."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from sparda_jax.evaluation import quality_benchmark, quality_report
from sparda_jax.evaluation.quality_benchmark import Plan, read_inputs
from sparda_jax.forecast.files import save_forecast

PLAN = Plan(
    length=96,
    percents=(50, 25),
    blocks=24,
    calibration_rows=2,
    calibration_length=48,
    sections=quality_benchmark.SECTIONS[:4] + ("language_noise",),
    workers=2,
)
SPARSE = PLAN.setting(PLAN.length, PLAN.percents).sparse


@pytest.fixture(scope="module")
def read(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("quality")
    # The policy is that of the percentages too, so that they share their programs.
    save_forecast(folder / "forecast.safetensors", tiny.forecast, tiny.model, SPARSE)
    save_forecast(folder / "two.safetensors", tiny.forecast, tiny.model, SPARSE, lookahead=2)
    rng = np.random.default_rng(0)
    for name, length in (("long", 100), ("short", 90), ("other", 97)):
        np.save(folder / f"{name}.npy", rng.integers(0, 40, length).astype(np.uint16))
    tokenizer = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))

    def call(**changes):
        arguments = {
            "text": [folder / "long.npy", folder / "short.npy"],
            "haystacks": [folder / "short.npy"],
            "calibration": [folder / "other.npy"],
            "forecasts": [f"sparda={folder}/forecast.safetensors"],
            "variants": [f"ahead={folder}/two.safetensors@2", "initial=random"],
            "documents": 5,
            "plan": PLAN,
        }
        return read_inputs(tiny.model, tokenizer, **arguments | changes)

    return call


def test_inputs(read):
    inputs = read()
    assert [len(d) for d in inputs.documents] == [100]  # the short one is left out
    assert inputs.calibration.shape == (2, 48) and len(inputs.haystacks) == 1
    assert inputs.sparse == SPARSE  # the policy that the Forecast was trained for
    assert inputs.variants["ahead"][1] == 2 and inputs.variants["initial"][1] == 1
    with pytest.raises(ValueError, match="no held-out document has 96 tokens"):
        read(text=[])
    with pytest.raises(ValueError, match="0 tokens of calibration text, 96 are needed"):
        read(calibration=[])
    with pytest.raises(ValueError, match="expected NAME=PATH, got 'plain'"):
        read(forecasts=["plain"])


def test_rows_and_tables(read, tmp_path):
    inputs, lines = read(), []
    rows = list(quality_benchmark.rows(inputs, PLAN, lines.append))
    names = {row.name for row in rows}
    for policy in ("oracle", "sparse", "sparda", "infinigen", "local", "random", "ahead"):
        assert f"selection/96_policy/own/mass/{policy}" in names
        assert f"language/96_policy/own/kl/{policy}" in names
    for bound in ("teacher", "sparda_keys"):
        assert f"selection/96_policy/own/mass/{bound}/layer_03" in names
    assert "selection/96_P4/25%/recall/infinigen" in names
    assert not any("P4" in name and "ahead" in name for name in names)
    floor = next(row for row in rows if row.name == "language/96_P4/100%/kl/sparse")
    assert abs(floor.timing.median) < 1e-4  # all blocks: dense attention
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"rows": [row.as_json() for row in rows]}))
    read_back = quality_report.read_rows(path)
    page = "a\n<!-- table own -->old<!-- end -->\nb <!-- table budgets --><!-- end -->"
    filled = quality_report.fill(page, read_back)
    assert "old" not in filled and filled.startswith("a\n") and "\nb " in filled
    sparda = read_back["selection/96_policy/own/mass/sparda"]
    line = next(text for text in filled.splitlines() if text.startswith("| sparda |"))
    assert f"{sparda['median']:.3f}" in line
    order = [text.split(" |")[0] for text in filled.splitlines() if text.startswith("| ")]
    assert order.index("| oracle") < order.index("| sparse") < order.index("| random")
    assert "| 96_P4, 25%, infinigen |" in filled and "100%" not in filled
    assert quality_report.fill(filled, read_back) == filled
    for table in quality_report.TABLES.values():
        table(read_back)
    with pytest.raises(ValueError, match="no table 'none'"):
        quality_report.fill("<!-- table none --><!-- end -->", read_back)


def test_no_more_documents_when_the_time_is_up(read):
    inputs, lines = read(variants=[]), []
    many = dataclasses.replace(inputs, documents=list(inputs.documents) * 3)
    short = dataclasses.replace(PLAN, sections=("selection",), seconds=0.0)
    row = next(quality_benchmark.rows(many, short, lines.append))
    assert row.timing.n == 1 and lines[-1].startswith("selection 96_policy: 1/3")
    with pytest.raises(ValueError, match="unknown section 'text'"):
        dataclasses.replace(PLAN, sections=("text",))


def test_two_policies_of_one_name(read):
    inputs = read(variants=["sparse=random"])
    with pytest.raises(ValueError, match="two policies of one name: sparse, sparda"):
        list(quality_benchmark.rows(inputs, PLAN, lambda line: None))
