"""A tiny checkpoint in the published format, and `scripts/decode.py` run in this process."""

from __future__ import annotations

import contextlib
import io
import json
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from scripts import decode
from sparda_jax.checkpoints.names import is_transposed, published_name
from sparda_jax.config import ModelConfig
from sparda_jax.engine import generate
from sparda_jax.models.decoder import Decoder

# Blocks so small that a prompt of two lines has more of them than the budget.
SMALL = [
    "--block-size=8",
    "--kernel-size=4",
    "--kernel-stride=2",
    "--local-blocks=2",
    "--budget-blocks=6",
    "--prefill-chunk=32",
    "--steps-per-call=4",
    "--max-new-tokens=24",
    "--ignore-eos",
]
SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>")
TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|>"
CONFIG = {
    "model_type": "llama",
    "vocab_size": 256 + len(SPECIAL),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 256,
}


def write_tokenizer(folder: Path) -> None:
    """Every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": SPECIAL[0], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def published_tensors() -> dict[str, np.ndarray]:
    """Random weights under the names and in the layout of a checkpoint."""
    config = ModelConfig.from_huggingface(CONFIG)
    model = Decoder.random(config, seed=1)
    tensors = {}
    for path, parameter in nnx.to_flat_state(nnx.state(model)):
        value = np.asarray(parameter[...])
        value = value.T if is_transposed(path) else value
        tensors[published_name(config, path)] = np.ascontiguousarray(value)
    return tensors


@pytest.fixture(scope="session")
def tensors() -> dict[str, np.ndarray]:
    return published_tensors()


@pytest.fixture(scope="session")
def write_checkpoint(tensors) -> Callable[..., Path]:
    """Writes a checkpoint; `changes` replaces tensors, or leaves them out where it says None."""

    def write(folder: Path, changes: dict[str, Any] | None = None) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        write_tokenizer(folder)
        changed = tensors | (changes or {})
        kept = {name: value for name, value in changed.items() if value is not None}
        save_file(kept, folder / "model.safetensors")
        return folder

    return write


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, write_checkpoint) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")


@dataclass(frozen=True)
class Outcome:
    """What a run of the command line left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)

    @property
    def tokens(self) -> list[int]:
        (result,) = self.json["results"]
        return result["tokens"]


class Terminal(io.StringIO):
    """Standard error that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def call(*arguments: str, terminal: bool = False) -> Outcome:
    """Runs the command line in this process."""
    out, err = io.StringIO(), Terminal() if terminal else io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = decode.main(arguments)
        except SystemExit as stop:  # argparse
            code = stop.code
    return Outcome(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="package")
def shared_engines():
    """Runs with equal weights and settings share an engine, and so its compiled programs."""
    engines: dict[Any, generate.Engine] = {}
    original = generate.Engine

    def engine(model, *, sparse, config, **selector):
        leaves = jax.tree.leaves((nnx.state(model), selector))
        weights = hash(b"".join(np.asarray(leaf).tobytes() for leaf in leaves))
        key = (weights, sparse, config)
        if key not in engines:
            engines[key] = original(model, sparse=sparse, config=config, **selector)
        return engines[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "Engine", engine)
        yield


@pytest.fixture(scope="package")
def run(checkpoint, shared_engines):
    """Runs `decode.py` on the tiny checkpoint; the same arguments again cost nothing."""
    outcomes: dict[tuple[str, ...], Outcome] = {}

    def run_once(*arguments: str) -> Outcome:
        if arguments not in outcomes:
            outcomes[arguments] = call("--model", str(checkpoint), *SMALL, *arguments)
        return outcomes[arguments]

    return run_once


@pytest.fixture(autouse=True)
def ctrl_c_works():
    """Whoever runs the tests may have switched it off (nohup, a background job)."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)
