"""Reference cases and random inputs for the kernels' tests."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file


@pytest.fixture(scope="session")
def load_case(data_dir: Path) -> Callable[[str], tuple[dict, dict[str, np.ndarray]]]:
    """Parameters and arrays of a case below tests/data/sparda."""

    def load(name: str) -> tuple[dict, dict[str, np.ndarray]]:
        folder = data_dir / "sparda" / name
        meta = json.loads((folder / "case.json").read_text())
        return meta["params"], load_file(folder / meta["file"])

    return load


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that depend on the test's name only."""
    return np.random.default_rng(list(request.node.name.encode()))
