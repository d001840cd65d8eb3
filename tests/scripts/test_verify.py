"""verify.py on a tiny checkpoint: its record, and what it says when the weights are others."""

import json
import shutil

import numpy as np
from safetensors.numpy import load_file, save_file

from scripts.verify import main


def test_record_and_sparse_attention(tmp_path, data_dir, capsys):
    folder, record = data_dir / "sparda" / "minicpm_tiny" / "untied_short", tmp_path / "record.json"
    command = [str(folder), "--record", str(record), "--dtype", "float32", "--tokens", "4",
               "--context", "96", "--block-size", "16", "--kernel-size", "8", "--kernel-stride",
               "4", "--local-blocks", "1", "--budget-blocks", "4"]  # fmt: skip
    assert main(command) == 0
    said = capsys.readouterr()
    assert said.out == f"verified {folder}\n" and "record: not compared, written to" in said.err
    assert "sparse attention: not compared, " in said.err and "of 4 tokens as dense" in said.err
    assert len(json.loads(record.read_text())["tokens"]) == 64 + 4


def test_a_checkpoint_that_does_not_load(tmp_path, data_dir, capsys):
    shutil.copy(data_dir / "block_diffusion" / "sdar_tiny" / "config.json", tmp_path)
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("verify.py: no *.safetensors and no *.gguf file in")


def test_record_then_other_weights(tmp_path, data_dir, capsys):
    folder = tmp_path / "model"
    shutil.copytree(data_dir / "block_diffusion" / "llada2_tiny", folder)
    command = [str(folder), "--record", str(tmp_path / "record.json"), "--dtype", "float32"]
    assert main(command) == 0 and main(command) == 0
    said = capsys.readouterr().err
    assert "weights: ok" in said and "continuation: ok, 100.0% of tokens" in said
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.attention.dense.weight"
    tensors[name] = np.roll(tensors[name], 1, axis=0)
    save_file(tensors, folder / "model.safetensors")
    assert main(command) == 1
    said = capsys.readouterr()
    assert said.out == f"FAILED {folder}\n"
    assert "weights: FAILED" in said.err and "continuation: FAILED" in said.err
