"""Every way a checkpoint folder can be wrong, and the dtypes it may hold."""

import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from sparda_jax.checkpoints.safetensors import load_safetensors, read_folder
from sparda_jax.sharding import make_mesh

CASE = "block_diffusion/qwen2_tiny"
Q = "model.layers.1.self_attn.q_proj.weight"
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path, data_dir):
    shutil.copy(data_dir / CASE / "config.json", tmp_path)
    shutil.copy(data_dir / CASE / "model.safetensors", tmp_path)
    return tmp_path


def edit(folder, change):
    """Rewrites the weights after `change(tensors)`."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {name: value for name, value in config.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))


def shard(folder, count=3):
    """Splits the single file into `count` shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    weight_map = {name: names[i % count] for i, name in enumerate(sorted(tensors))}
    for file in names:
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return names


def flat(model):
    return {path: np.asarray(p[...]) for path, p in nnx.to_flat_state(nnx.state(model))}


def assert_same(left, right):
    left, right = flat(left), flat(right)
    assert left.keys() == right.keys()
    for path, value in left.items():
        np.testing.assert_array_equal(value, right[path], err_msg=str(path))


def fails(folder, error, *messages, **options):
    with pytest.raises(error) as info:
        load_safetensors(folder, **options)
    text = str(info.value)
    assert "\n" not in text
    for message in messages:
        assert message in text, text


def test_kernels_are_stored_transposed(folder):
    stored = load_file(folder / "model.safetensors")
    loaded = flat(load_safetensors(folder))
    np.testing.assert_array_equal(loaded["layers", 1, "q", "kernel"], stored[Q].T)
    np.testing.assert_array_equal(loaded["embedding",], stored["model.embed_tokens.weight"])


def test_shards_equal_the_single_file(folder, data_dir):
    shard(folder)
    assert_same(load_safetensors(folder), load_safetensors(data_dir / CASE))


def test_a_lone_file_of_another_name(folder, data_dir):
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert_same(load_safetensors(folder), load_safetensors(data_dir / CASE))


@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("target", [jnp.bfloat16, jnp.float32])
def test_every_source_dtype_is_converted(folder, source, target):
    kinds = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}

    def convert(tensors):
        for name, value in tensors.items():
            tensors[name] = value.astype(kinds[source])

    edit(folder, convert)
    stored = load_file(folder / "model.safetensors")
    loaded = flat(load_safetensors(folder, dtype=target))
    assert {value.dtype for value in loaded.values()} == {jnp.dtype(target)}
    expected = stored[Q].T.astype(jnp.dtype(target))
    np.testing.assert_array_equal(loaded["layers", 1, "q", "kernel"], expected)


def test_all_misfits_are_named_at_once(folder):
    def change(tensors):
        del tensors[Q], tensors["model.norm.weight"]
        tensors["model.layers.2.input_layernorm.weight"] = np.ones(48, np.float32)
        tensors["extra"] = np.ones(3, np.float32)
        tensors[UP] = tensors[UP].T.copy()
        bias = "model.layers.0.self_attn.k_proj.bias"
        tensors[bias] = tensors[bias].astype(np.int8)

    edit(folder, change)
    fails(
        folder,
        ValueError,
        f"missing {Q}",
        "missing model.norm.weight",
        "unexpected extra",
        "unexpected model.layers.2.input_layernorm.weight",
        f"{UP} has shape [48, 96], expected [96, 48]",
        "model.layers.0.self_attn.k_proj.bias has dtype I8",
    )


def test_bias_the_config_does_not_speak_of(folder):
    edit(folder, lambda t: t.update({"model.layers.0.mlp.up_proj.bias": np.ones(96, np.float32)}))
    fails(folder, ValueError, "unexpected model.layers.0.mlp.up_proj.bias")


def test_old_rotary_buffers_are_passed_over(folder, data_dir):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(folder, lambda t: t.update({name: np.ones(4, np.float32)}))
    assert_same(load_safetensors(folder), load_safetensors(data_dir / CASE))


def test_head_decides_where_the_config_is_silent(folder):
    edit_config(folder, tie_word_embeddings="absent")
    assert load_safetensors(folder).config.tie_word_embeddings is False
    edit(folder, lambda t: t.pop("lm_head.weight"))
    model = load_safetensors(folder)
    assert model.config.tie_word_embeddings is True and model.head is None


def test_untied_without_a_head(folder):
    edit(folder, lambda t: t.pop("lm_head.weight"))
    fails(folder, ValueError, "missing lm_head.weight")


def test_tied_with_a_second_copy_of_the_embedding(folder):
    edit_config(folder, tie_word_embeddings=True)
    fails(folder, ValueError, "unexpected lm_head.weight")
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    assert load_safetensors(folder).head is None


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite(folder, value):
    def change(tensors):
        tensors[Q][3, 5] = value
        tensors["model.norm.weight"][0] = value

    edit(folder, change)
    fails(folder, ValueError, f"{Q} has values that are not finite", "model.norm.weight has")
    loaded = flat(load_safetensors(folder, check_finite=False))
    np.testing.assert_array_equal(loaded["layers", 1, "q", "kernel"][5, 3], np.float32(value))


def test_overflow_in_the_conversion(folder):
    edit(folder, lambda t: t[Q].fill(1e6))
    fails(folder, ValueError, f"{Q} has values that are not finite in float16", dtype=jnp.float16)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_file(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    fails(folder, ValueError, f"{path} ({path.stat().st_size} bytes) is truncated or damaged")


def test_missing_shard(folder):
    names = shard(folder)
    (folder / names[1]).unlink()
    fails(folder, FileNotFoundError, "names missing shards: ", names[1])


def test_tensor_not_in_the_shard_it_is_said_to_be_in(folder):
    names = shard(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][Q] = next(n for n in names if n != index["weight_map"][Q])
    path.write_text(json.dumps(index))
    fails(folder, ValueError, f"not in the shard it names: {Q}")


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"weight_map": ', "is not valid JSON"),
        ("[]", "must hold a JSON object, got list"),
        ("{}", "has no weight_map"),
    ],
)
def test_broken_index(folder, text, message):
    shard(folder)
    (folder / "model.safetensors.index.json").write_text(text)
    fails(folder, ValueError, "model.safetensors.index.json", message)


def test_broken_or_missing_config(folder):
    (folder / "config.json").write_text("{,}")
    fails(folder, ValueError, "config.json is not valid JSON")
    (folder / "config.json").unlink()
    fails(folder, FileNotFoundError, "no config.json in")


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    fails(folder, FileNotFoundError, "no safetensors file in")


def test_several_files_without_an_index(folder):
    shard(folder)
    (folder / "model.safetensors.index.json").unlink()
    fails(folder, ValueError, "3 safetensors files in", "no model.safetensors.index.json")


def test_weights_are_arguments_not_constants(folder):
    model = load_safetensors(folder)
    compiled = jax.jit(lambda m, t: m(t)).lower(model, jnp.zeros((1, 4), jnp.int32))
    assert f"tensor<{model.config.vocab_size}x48xf32>" in compiled.as_text().split("\n")[1]


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_stacked_experts_equal_single_ones(tmp_path, data_dir, suffix):
    case = data_dir / "block_diffusion" / "llada2_tiny"
    stored = load_file(case / "model.safetensors")
    stacked = {name: value for name, value in stored.items() if ".experts." not in name}
    for layer in (1, 2):
        for name in ("gate_proj", "up_proj", "down_proj"):
            prefix = f"model.layers.{layer}.mlp.experts"
            parts = [stored[f"{prefix}.{i}.{name}.weight"] for i in range(16)]
            stacked[f"{prefix}.{name}{suffix}"] = np.stack(parts)
    save_file(stacked, tmp_path / "model.safetensors")
    config = json.loads((case / "config.json").read_text())
    config["model_type"] = "llada2_moe_veomni"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_same(load_safetensors(tmp_path), load_safetensors(case))


def test_a_tensor_in_two_shards(folder):
    names = shard(folder)
    tensors, first = load_file(folder / names[1]), load_file(folder / names[0])
    other = next(iter(first))
    tensors[other] = first[other]
    save_file(tensors, folder / names[1])
    fails(folder, ValueError, f"not in the shard it names: {other} (expected {names[0]}, found")


def test_what_is_cut_off_is_named(folder):
    path = folder / "model.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size - 8])
    fails(folder, ValueError, f" ends at byte {size}, found {size - 8} (1 tensors cut)")


@pytest.mark.parametrize("place", [0, 1])
def test_the_model_keeps_nothing_of_the_file(folder, place):
    """Until on the device, tensors are views of the mapped file, aligned for XLA or not."""
    path = folder / "model.safetensors"
    edit(folder, lambda t: t.update({n: a.astype(np.float32) for n, a in t.items()}))
    expected, data = load_safetensors(folder), path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = data[8:start].rstrip()
    header += b" " * ((place - 8 - len(header)) % 64)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[start:])
    model, _ = read_folder(folder, dtype=jnp.float32, mesh=make_mesh())
    with path.open("r+b") as file:
        file.seek(8 + len(header))
        file.write(bytes(len(data) - start))
    assert_same(model, expected)
