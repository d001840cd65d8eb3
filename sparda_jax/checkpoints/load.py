"""One entry for every kind of checkpoint: folder, GGUF file, hub id, or the default model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from sparda_jax.assets import fetch_default_model
from sparda_jax.checkpoints.assemble import Look, assemble
from sparda_jax.checkpoints.gguf import read_gguf
from sparda_jax.checkpoints.progress import LoadReport, Progress
from sparda_jax.checkpoints.safetensors import read_folder
from sparda_jax.config import ModelConfig
from sparda_jax.models.decoder import Decoder
from sparda_jax.tokenization import Tokenizer

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Weights in other formats are not worth the download.
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")


def load_pretrained(
    model: str | Path = "default",
    *,
    dtype: DTypeLike = jnp.float32,
    cache_dir: str | Path | None = None,
    check_finite: bool = True,
) -> tuple[Decoder, Tokenizer | None]:
    """A model and its tokenizer; see `load_checkpoint`, and `sparda_jax.from_pretrained`."""
    loaded = load_checkpoint(model, dtype=dtype, cache_dir=cache_dir, check_finite=check_finite)
    return loaded.model, loaded.tokenizer


class Loaded(NamedTuple):
    """What `load_checkpoint` found.

    Attributes:
        model: the decoder.
        tokenizer: None where the folder has no `tokenizer.json`.
        path: of the folder or GGUF file.
        report: how long it took.
    """

    model: Decoder
    tokenizer: Tokenizer | None
    path: Path
    report: LoadReport


def load_checkpoint(
    model: str | Path = "default",
    *,
    dtype: DTypeLike = jnp.float32,
    mesh: Mesh | None = None,
    importance: bool = True,
    overrides: Mapping[str, Any] | None = None,
    cache_dir: str | Path | None = None,
    check_finite: bool = True,
    look: Look | None = None,
    progress: bool | None = False,
) -> Loaded:
    """Loads a model and its tokenizer.

    Args:
        model: a folder with `config.json` and safetensors, or with one GGUF file; a GGUF file; a
            hub id such as `org/name` (needs the `hub` extra); or "default", the model that
            `sparda_jax.assets` fetches. What exists on disk comes before the hub.
        dtype: of the parameters, and so of the computation and the KV cache.
        mesh: several devices; see `sparda_jax.sharding`. None: the default device.
        importance: False leaves NOSA's importance out: with dense attention, the published "dense
            NOSA", which is not what the weights were trained for.
        overrides: fields of `config.json` to read otherwise, such as the rotary embedding for a
            context longer than the model's own (docs/models.md).
        cache_dir: where the default model is kept; None: the user's cache.
        check_finite: refuse NaN and infinity in the weights.
        look: called with what is known of the checkpoint before its weights are read; see
            `sparda_jax.checkpoints.assemble`.
        progress: show a line; None: where standard error is a terminal.

    Raises:
        FileNotFoundError: nothing of that name, or no weights there.
        ValueError: damaged files, or weights that do not fit; all of them in one message.
        NotImplementedError: a model, rope or quantisation type that is not supported.
        ImportError: a hub id or a GGUF without the package that reads it.
        sparda_jax.assets.AssetError: the default model cannot be fetched.
    """
    path = fetch_default_model(cache_dir) if str(model) == "default" else _locate(model)
    if path.is_dir() and not any(path.glob("*.safetensors*")):
        files = sorted(path.glob("*.gguf"))
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise ValueError(f"{len(files)} GGUF files in {path}, name one of them: {names}")
        if not files:
            raise FileNotFoundError(f"no *.safetensors and no *.gguf file in {path}")
        path = files[0]
    if path.is_file():
        return _load_gguf(path, dtype, mesh, overrides, check_finite, look, progress)
    decoder, report = read_folder(
        path,
        dtype=dtype,
        check_finite=check_finite,
        mesh=mesh,
        importance=importance,
        overrides=overrides,
        look=look,
        progress=progress,
    )
    has_tokenizer = (path / "tokenizer.json").is_file()
    tokenizer = Tokenizer.from_directory(path) if has_tokenizer else None
    return Loaded(decoder, tokenizer, path, report)


def _locate(model: str | Path) -> Path:
    path = Path(model)
    if path.is_file() and path.suffix != ".gguf":
        raise ValueError(f"{path} is neither a folder nor a .gguf file")
    if path.exists():
        return path
    # A hub id has exactly one slash, so "./model" and "/model" are never taken for one.
    if isinstance(model, str) and _HUB_ID.fullmatch(model):
        return _download(model)
    raise FileNotFoundError(f"no model at {path}: expected a folder, a .gguf file or org/name")


def _download(hub_id: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ImportError(
            f"{hub_id} is not a local path; fetching it from the hub needs huggingface_hub: "
            "pip install 'sparda_jax[hub]'"
        ) from error
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # the hub client's own, requests' and the operating system's
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise FileNotFoundError(
            f"{hub_id} is not a local path and cannot be fetched from the hub: {reason}"
        ) from error


def _load_gguf(
    path: Path,
    dtype: DTypeLike,
    mesh: Mesh | None,
    overrides: Mapping[str, Any] | None,
    check_finite: bool,
    look: Look | None,
    progress: bool | None,
) -> Loaded:
    checkpoint = read_gguf(path)
    config = ModelConfig.from_huggingface(checkpoint.config | dict(overrides or {}))
    counter = Progress(sum(header.nbytes for header in checkpoint.headers.values()), progress)
    decoder = assemble(
        config,
        checkpoint,
        dtype=dtype,
        check_finite=check_finite,
        mesh=mesh,
        look=look,
        progress=counter,
    )
    return Loaded(decoder, Tokenizer.from_gguf(checkpoint.tokenizer), path, counter.finish())
