"""Forecast files: what is saved is loaded, next to the right model only, whole or not at all."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from sparda_jax.checkpoints import forecast as format_
from sparda_jax.checkpoints.forecast import model_fingerprint
from sparda_jax.forecast.files import load_forecast, save_forecast
from sparda_jax.forecast.projection import Forecast
from sparda_jax.models import Decoder

FIRST = "model.layers.0.self_attn.q_curr_proj.weight"


@pytest.fixture(scope="module")
def model(tiny_config):
    return Decoder.random(tiny_config)


@pytest.fixture
def saved(tmp_path, model, tiny_config, tiny_sparse):
    forecast = Forecast.random(tiny_config, seed=1)
    path = tmp_path / "forecast.safetensors"
    save_forecast(path, forecast, model, tiny_sparse)
    return path, forecast


def leaves(module):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(module))]


def test_round_trip(saved, model, tiny_sparse):
    path, forecast = saved
    loaded, sparse = load_forecast(path, model)
    assert sparse == tiny_sparse
    for ours, theirs in zip(leaves(loaded), leaves(forecast), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    tensors = load_file(path)
    assert tensors[FIRST].shape == (16, 24)  # [out, in], as published
    np.testing.assert_array_equal(tensors[FIRST], np.asarray(forecast.first.kernel[...]).T)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    save_forecast(path.parent / "again", forecast, model, tiny_sparse)
    assert (path.parent / "again").read_bytes() == path.read_bytes()


def test_bfloat16_on_disk_and_in_memory(tmp_path, model, tiny_config, tiny_sparse):
    forecast, path = Forecast.random(tiny_config), tmp_path / "half.safetensors"
    save_forecast(path, forecast, model, tiny_sparse, dtype=jnp.bfloat16)
    low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), model)
    loaded, _ = load_forecast(path, low)  # the same base, loaded as bfloat16
    assert loaded.first.kernel.dtype == jnp.bfloat16
    expected = forecast.first.kernel[...].astype(jnp.bfloat16)
    np.testing.assert_array_equal(loaded.first.kernel[...], expected)
    assert load_forecast(path, low, dtype=jnp.float32)[0].first.kernel.dtype == jnp.float32


def test_another_base_is_refused(saved, tiny_config, model):
    path, _ = saved
    with pytest.raises(
        ValueError, match=r"^\S+ was trained for another model: base \w{12}, th"
    ) as e:
        load_forecast(path, Decoder.random(tiny_config, seed=1))
    assert "\n" not in str(e.value)
    load_forecast(path, Decoder.random(tiny_config, seed=1), verify_base=False)
    # Any weight counts, and so do the head counts, which no shape tells.
    one = jax.tree.map(lambda p: p, model)
    one.layers[2].mlp_norm.scale[...] = one.layers[2].mlp_norm.scale[...].at[3].set(1.5)
    rope = dataclasses.replace(tiny_config.rope, head_dim=4)
    heads = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 4, "rope": rope}
    other_heads = dataclasses.replace(tiny_config, **heads)
    marks = {model_fingerprint(m) for m in (model, one, Decoder.random(other_heads))}
    assert len(marks) == 3
    assert model_fingerprint(Decoder.random(tiny_config)) == model_fingerprint(model)


def test_weights_of_other_origin(tmp_path, saved, model):
    path, forecast = saved
    plain = tmp_path / "published.safetensors"
    save_file(load_file(path), plain)
    with pytest.raises(ValueError, match="does not say which model it belongs to"):
        load_forecast(plain, model)
    loaded, sparse = load_forecast(plain, model, verify_base=False)
    assert sparse is None
    np.testing.assert_array_equal(loaded.first.kernel[...], forecast.first.kernel[...])


def test_everything_that_does_not_fit_is_said_at_once(tmp_path, saved, model):
    tensors = load_file(saved[0])
    tensors["extra"] = tensors.pop(FIRST)
    name = "model.layers.1.self_attn.q_future_proj.weight"
    tensors[name] = tensors[name].T.copy()
    bad = tmp_path / "bad.safetensors"
    save_file(tensors, bad)
    with pytest.raises(ValueError) as error:
        load_forecast(bad, model, verify_base=False)
    for part in (f"missing {FIRST}", "unexpected extra", f"{name} has shape [24, 16], expected ["):
        assert part in str(error.value)


def test_damage(tmp_path, saved, model):
    path, _ = saved
    with pytest.raises(FileNotFoundError, match="no Forecast weights at"):
        load_forecast(tmp_path / "none.safetensors", model)
    tensors = load_file(path)
    tensors[FIRST][0, 0] = np.nan
    save_file(tensors, tmp_path / "nan.safetensors")
    with pytest.raises(ValueError, match=f"not finite in {FIRST}"):
        load_forecast(tmp_path / "nan.safetensors", model, verify_base=False)
    for header, error, match in (
        ('{"version": 1, "sparse": {}}', ValueError, "damaged sparse configuration"),
        ("{", ValueError, "damaged metadata"),
        ('{"version": 2}', NotImplementedError, "format version 2, only 1 is known"),
    ):
        save_file(load_file(path), tmp_path / "header", metadata={format_.KEY: header})
        with pytest.raises(error, match=match):
            load_forecast(tmp_path / "header", model, verify_base=False)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="truncated or damaged"):
        load_forecast(path, model)


def test_a_failed_write_leaves_the_old_file(saved, model, tiny_config, tiny_sparse, monkeypatch):
    path, _ = saved
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("sparda_jax.checkpoints.whole.os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save_forecast(path, Forecast.random(tiny_config, seed=9), model, tiny_sparse)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]
