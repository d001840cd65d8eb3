"""A synthetic checkpoint is one that loads: real names, in shards."""

import json

import numpy as np

from sparda_jax.evaluation.loading_benchmark import write_checkpoint
from sparda_jax.presets import PRESETS
from sparda_jax.pretrained import from_pretrained


def test_synthetic_checkpoint_loads(tmp_path, monkeypatch):
    tiny = dict(PRESETS["llada2.0-mini"]) | {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128,
        "num_experts": 16,
        "moe_intermediate_size": 32,
        "mask_token_id": 100,
    }
    monkeypatch.setitem(PRESETS, "tiny", tiny)
    monkeypatch.setattr("sparda_jax.evaluation.loading_benchmark.DRAWN", 1 << 16)
    total = write_checkpoint("tiny", tmp_path, shard_bytes=100_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2 and index["metadata"]["total_size"] == total
    loaded = from_pretrained(tmp_path)
    assert loaded.config.moe.num_experts == 16
    layer = loaded.model.layers[1]
    assert (np.asarray(layer.attention_norm.scale[...]) == 1).all()
    spread = np.asarray(layer.mlp.experts.gate.kernel[...], np.float32).std() * 8
    assert 0.9 < spread < 1.1  # unit gain
