"""Several devices: same tokens and logits as one. Runs in a process of its own with 8 of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparda_jax.config import ModelConfig, RopeConfig

ROOT = Path(__file__).parents[2]
CONFIG = ModelConfig(
    family="llama",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    rope=RopeConfig(16),
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    qkv_bias=True,
    output_bias=True,
    kv_importance=True,
)


def test_eight_devices():
    # Almost all of the time goes to compiling, and little is computed.
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    environment = os.environ | {"XLA_FLAGS": f"{flags} --xla_llvm_disable_expensive_passes=true"}
    command = [sys.executable, "-c", "from tests.sparda_jax.test_sharding import main; main()"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split() == ["engine", "experts", "loading"]


def main():
    """What the process with 8 devices does."""
    for check in (check_engine, check_experts, check_loading):
        check()
        print(check.__name__.removeprefix("check_"), flush=True)


def check_engine():
    """Tokens of 2 x 4 devices, NOSA by Forecast and offloaded, equal those of one."""
    import numpy as np

    from pallas_kernels.geometry import BlockGeometry
    from sparda_jax.config import EngineConfig, SamplingParams, SparseConfig
    from sparda_jax.engine.generate import Engine
    from sparda_jax.forecast.projection import Forecast
    from sparda_jax.models import Decoder
    from sparda_jax.sharding import distribute, make_mesh

    sparse = SparseConfig(BlockGeometry(8, 4, 2), 1, 2, 6, query_blocks=5)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 96, n).tolist() for n in (70, 41, 23, 64)]

    def generate(mesh):
        model, forecast = Decoder.random(CONFIG, seed=3), Forecast.random(CONFIG, seed=4)
        if mesh is not None:
            distribute(model, mesh)
            distribute(forecast, mesh)
        config = EngineConfig(mode="sparda", offload="host", prefill_chunk=16, steps_per_call=4)
        engine = Engine(model, sparse=sparse, config=config, forecast=forecast)
        results, report = engine.generate(prompts, SamplingParams(max_new_tokens=20))
        return [result.tokens for result in results], report.fetched_runs, engine

    alone, runs, _ = generate(None)
    split, split_runs, engine = generate(make_mesh(data=2, model=4))
    assert split == alone
    assert split_runs == runs > 0
    try:
        engine.generate(prompts[:3], SamplingParams(max_new_tokens=2))
    except ValueError as error:
        assert "axis 'data' of size 2 does not divide 3 requests" in str(error)
    else:
        raise AssertionError("3 requests on 2 devices")


def check_experts():
    """LLaDA2's logits with experts over 4 devices and channels over 2 equal those of one."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from sparda_jax.checkpoints.safetensors import load_safetensors
    from sparda_jax.sharding import distribute, make_mesh

    model = load_safetensors(ROOT / "tests/data/block_diffusion/llada2_tiny")
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 256, (2, 24)), jnp.int32)
    forward = jax.jit(lambda model, tokens: model(tokens))
    expected = np.asarray(forward(model, tokens))
    mesh = make_mesh(expert=4, model=2)
    distribute(model, mesh)
    with jax.set_mesh(mesh):
        text = forward.lower(model, tokens).compile().as_text()
        got = np.asarray(forward(model, tokens))
    np.testing.assert_allclose(got, expected, atol=2e-5)
    # No device holds all experts of a layer: [16, 48, 24] is 4 times 2 of them.
    assert "f32[16,48,24]" not in text and "f32[4,48,12]" in text


def check_loading():
    """Every device gets its own part of the file and nothing else; a bad mesh is refused."""
    import jax
    import numpy as np

    import sparda_jax
    from sparda_jax.sharding import make_mesh

    folder = ROOT / "tests/data/sparda/nosa_tiny/b1_S560"
    one = sparda_jax.from_pretrained(folder, dtype="float32", progress=False)
    mesh = make_mesh(data=2, model=2)
    two = sparda_jax.from_pretrained(folder, mesh=mesh, dtype="float32", progress=False)
    for module in ("model", "forecast"):
        pairs = zip(*(jax.tree.leaves(getattr(m, module)) for m in (one, two)), strict=True)
        for whole, parts in pairs:
            assert len(parts.sharding.device_set) == 4
            np.testing.assert_array_equal(whole, parts)
    q = two.model.layers[0].q.kernel[...]
    assert q.sharding.shard_shape(q.shape) == (q.shape[0], q.shape[1] // 2)
    assert two.report.bytes_read == one.report.bytes_read
    for axes, message in (
        ({"model": 4}, "'model' of size 4 does not divide the KV heads: 2"),
        ({"expert": 2}, "'expert' of size 2: no experts to split"),
    ):
        try:
            sparda_jax.from_pretrained(folder, mesh=make_mesh(**axes))
        except ValueError as error:
            assert message in str(error)
        else:
            raise AssertionError(axes)


def test_more_devices_than_there_are():
    from sparda_jax.sharding import make_mesh

    with pytest.raises(ValueError, match="needs 4096 devices, found"):
        make_mesh(model=4096)
