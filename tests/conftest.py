"""Shared pytest set-up: test data paths, and skipping of GPU tests where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def _has_gpu() -> bool:
    import jax

    return any(device.platform == "gpu" for device in jax.devices())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        skip = pytest.mark.skip(reason="needs a CUDA GPU")
        for item in marked:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the reference data, ``tests/data``."""
    return TESTS / "data"
