"""Shared pytest set-up: test data, the default model, GPU tests skipped where there is no GPU."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# XLA's threads on the CPU, read when jax starts. The simulator of GPU kernels parks one in every
# kernel thread that waits at a barrier: with as few threads as two cores give it can hang.
os.environ.setdefault("NPROC", "8")

if TYPE_CHECKING:
    from sparda_jax.checkpoints.gguf import GGUFCheckpoint
    from sparda_jax.tokenization import Tokenizer

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


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's GGUF; downloaded (93 MB) unless it is in the cache."""
    from sparda_jax.assets import fetch_default_model

    return fetch_default_model(os.environ.get("SPARDA_JAX_CACHE"))


@pytest.fixture(scope="session")
def default_checkpoint(default_model_path: Path) -> GGUFCheckpoint:
    from sparda_jax.checkpoints.gguf import read_gguf

    return read_gguf(default_model_path)


@pytest.fixture(scope="session")
def default_tokenizer(default_checkpoint: GGUFCheckpoint) -> Tokenizer:
    from sparda_jax.tokenization import Tokenizer

    return Tokenizer.from_gguf(default_checkpoint.tokenizer)


@pytest.fixture(autouse=True, scope="module")
def release_compiled_programs() -> Iterator[None]:
    """Every compiled program maps memory; a process may hold some 65,000 maps, then XLA crashes."""
    yield
    import jax

    jax.clear_caches()
    gc.collect()
