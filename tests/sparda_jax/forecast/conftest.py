"""Reference cases with Forecast weights: model, projections, policy and arrays."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.numpy import load_file, save_file

from pallas_kernels.geometry import BlockGeometry
from sparda_jax.checkpoints.assemble import ArraySource, assemble
from sparda_jax.checkpoints.safetensors import read_json
from sparda_jax.config import ModelConfig, RopeConfig, SparseConfig
from sparda_jax.forecast.files import load_forecast


def is_forecast(name):
    return "q_future" in name or "q_curr" in name


@pytest.fixture(scope="package")
def load_case(data_dir, tmp_path_factory):
    def load(name):
        folder: Path = data_dir / "sparda" / name
        tensors = load_file(folder / "model.safetensors")
        config = ModelConfig.from_huggingface(read_json(folder / "config.json"))
        plain = {n: t for n, t in tensors.items() if not is_forecast(n)}
        model = assemble(config, ArraySource(plain))
        path = tmp_path_factory.mktemp("case") / "forecast.safetensors"
        save_file({n: t for n, t in tensors.items() if is_forecast(n)}, path)
        forecast, policy = load_forecast(path, model, verify_base=False)
        assert policy is None
        params = read_json(folder / "case.json")["params"]
        sparse = SparseConfig(
            BlockGeometry(params["block_size"], params["kernel_size"], params["kernel_stride"]),
            init_blocks=params["init_blocks"],
            local_blocks=params["local_blocks"],
            budget_blocks=params["total_selected"],
        )
        return SimpleNamespace(
            model=model,
            forecast=forecast,
            sparse=sparse,
            params=params,
            arrays=load_file(folder / "data.safetensors"),
        )

    return load


@pytest.fixture(scope="package")
def tiny_config():
    return ModelConfig(
        family="llama",
        vocab_size=40,
        hidden_size=24,
        intermediate_size=32,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rope=RopeConfig(head_dim=8),
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )


@pytest.fixture(scope="package")
def tiny_sparse():
    return SparseConfig(BlockGeometry(16, 8, 4), init_blocks=1, local_blocks=1, budget_blocks=4)
