import shutil
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.checkpoints.load import load_pretrained

CASE = "block_diffusion/llama_tiny"


def test_folder_without_tokenizer(data_dir):
    model, tokenizer = load_pretrained(str(data_dir / CASE), dtype=jnp.bfloat16)
    assert model.dtype == jnp.bfloat16
    assert tokenizer is None


@pytest.mark.parametrize(
    "name, error, message",
    [
        ("missing", FileNotFoundError, "expected a folder, a .gguf file or org/name"),
        ("empty", FileNotFoundError, r"no \*.safetensors and no \*.gguf file in"),
        ("two", ValueError, "2 GGUF files in .*name one of them: a.gguf, b.gguf"),
        ("file.bin", ValueError, "neither a folder nor a .gguf file"),
    ],
)
def test_nothing_to_load(tmp_path, name, error, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "two").mkdir()
    for file in ("two/a.gguf", "two/b.gguf", "file.bin"):
        (tmp_path / file).write_bytes(b"GGUF")
    with pytest.raises(error, match=message) as info:
        load_pretrained(tmp_path / name)
    assert "\n" not in str(info.value)


def test_hub_id_without_the_hub_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"org/name is not a local path.*sparda_jax\[hub\]"):
        load_pretrained("org/name")


def test_hub_id_is_downloaded(tmp_path, monkeypatch, data_dir):
    monkeypatch.chdir(tmp_path)
    asked = []

    class Hub:
        @staticmethod
        def snapshot_download(hub_id, *, allow_patterns):
            asked.append((hub_id, allow_patterns))
            if hub_id == "org/gone":
                raise OSError("404 not found\nmore lines")
            return str(data_dir / CASE)

    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub)
    model, _ = load_pretrained("org/name")
    assert model.config.family == "llama"
    assert asked == [("org/name", ["*.json", "*.safetensors", "*.jinja"])]
    with pytest.raises(FileNotFoundError, match=r"fetched from the hub: 404 not found$"):
        load_pretrained("org/gone")


def test_a_folder_comes_before_the_hub(tmp_path, monkeypatch, data_dir):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    shutil.copytree(data_dir / CASE, tmp_path / "org" / "name")
    assert load_pretrained("org/name")[0].config.family == "llama"


@pytest.mark.slow
def test_default_model(default_model_path, default_checkpoint):
    """The file's weights and tokenizer; that they fit together, test_default_model.py shows."""
    model, tokenizer = load_pretrained(default_model_path)
    assert model.config.tie_word_embeddings and model.config.rope.theta == 100000
    stored = default_checkpoint.read("model.layers.3.self_attn.q_proj.weight")
    np.testing.assert_array_equal(model.layers[3].q.kernel[...].T, stored)
    assert tokenizer.decode(tokenizer.encode("Paris, France")) == "Paris, France"
