"""Torch files, written here without torch: read, converted, refused where they are not inert."""

import collections
import io
import pickle
import sys
import types
import zipfile

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from scripts.convert import main
from sparda_jax.checkpoints.forecast import checkpoint_fingerprint, model_fingerprint
from sparda_jax.checkpoints.load import load_pretrained
from sparda_jax.checkpoints.torch_pickle import read_torch_file
from sparda_jax.config import SparseConfig
from sparda_jax.pretrained import from_pretrained

STORAGES = {"float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage"}


class Names(pickle.Pickler):
    """Writes references to torch's names, which are not there, and storages as torch does."""

    def persistent_id(self, value):
        return value.pid if isinstance(value, Storage) else None


class Storage:
    def __init__(self, pid):
        self.pid = pid


class Reduced:
    """An object whose pickle is a call."""

    def __init__(self, function, *arguments, state=None):
        self.parts = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self):
        return self.parts


@pytest.fixture
def torch(monkeypatch):
    """Stand-ins that pickle by reference as torch's own names."""
    names, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    for name in STORAGES.values():
        setattr(names, name, type(name, (), {"__module__": "torch", "__qualname__": name}))
    for name in ("_rebuild_tensor_v2", "_rebuild_parameter"):
        function = types.FunctionType(compile("0", "", "eval"), {}, name)
        function.__module__, function.__qualname__ = "torch._utils", name
        setattr(utils, name, function)
    names._utils = utils
    monkeypatch.setitem(sys.modules, "torch", names)
    monkeypatch.setitem(sys.modules, "torch._utils", utils)
    return names


def write(path, torch, content, storages, order=b"little"):
    """A zip archive as `torch.save` writes it."""
    buffer = io.BytesIO()
    Names(buffer, protocol=2).dump(content)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", buffer.getvalue())
        archive.writestr("archive/byteorder", order)
        for key, data in storages.items():
            archive.writestr(f"archive/data/{key}", data)


def tensor(torch, key, array, *, offset=0, strides=None, count=None):
    kind = getattr(torch, STORAGES[array.dtype.name])
    pid = ("storage", kind, key, "cpu", array.size if count is None else count)
    if strides is None:
        strides = tuple(step // array.itemsize for step in array.strides)
    arguments = (Storage(pid), offset, array.shape, strides, False, collections.OrderedDict())
    return Reduced(torch._utils._rebuild_tensor_v2, *arguments)


def test_reads_what_torch_writes(tmp_path, torch):
    rng = np.random.default_rng(0)
    plain = rng.standard_normal((3, 4)).astype(np.float32)
    half = rng.standard_normal((2, 3)).astype(np.float16)
    brain = rng.standard_normal(5).astype(ml_dtypes.bfloat16)
    parameter = Reduced(
        torch._utils._rebuild_parameter, tensor(torch, "1", half), True, collections.OrderedDict()
    )
    content = collections.OrderedDict(
        plain=tensor(torch, "0", plain),
        transposed=tensor(torch, "0", plain.T),
        part=tensor(torch, "0", plain[1], offset=4, count=12),
        nested={"parameter": parameter, "step": 7, "note": "text"},
        brain=tensor(torch, "2", brain),
    )
    storages = {"0": plain.tobytes(), "1": half.tobytes(), "2": brain.tobytes()}
    write(tmp_path / "file.pt", torch, content, storages)
    read = read_torch_file(tmp_path / "file.pt")
    expected = {
        "plain": plain,
        "transposed": plain.T,
        "part": plain[1],
        "nested.parameter": half,
        "brain": brain,
    }
    assert read.keys() == expected.keys()
    for name, array in expected.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)


def touch(path):
    """What a malicious pickle would run."""
    open(path, "w").close()


@pytest.mark.parametrize("attack", ["call", "system", "getattr", "attributes", "numpy"])
def test_a_pickle_that_wants_more_is_refused_and_runs_nothing(tmp_path, torch, attack):
    import os

    proof, array = tmp_path / "ran", np.zeros(2, np.float32)
    content = {
        "call": lambda: Reduced(touch, str(proof)),
        "system": lambda: Reduced(os.system, f"touch {proof}"),
        "getattr": lambda: Reduced(getattr, array, "tofile"),
        # BUILD writes attributes: here it would move a checked tensor's window.
        "attributes": lambda: Reduced(
            torch._utils._rebuild_tensor_v2,
            *tensor(torch, "0", array).parts[1],
            state={"offset": -1000},
        ),
        "numpy": lambda: np.arange(3),
    }[attack]()
    write(tmp_path / "bad.pt", torch, {"x": content}, {"0": array.tobytes()})
    with pytest.raises(ValueError, match=r"bad\.pt is refused: ") as info:
        read_torch_file(tmp_path / "bad.pt")
    assert "\n" not in str(info.value)
    assert not proof.exists()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"count": 3}, "storage of x has 8 bytes, expected 12"),
        ({"strides": (2,)}, "x reaches past its storage of 2 values"),
        ({"strides": (-1,)}, "impossible sizes"),
        ({"offset": 1}, "x reaches past"),
        ({"strides": (1, 1)}, "unknown form"),
    ],
)
def test_sizes_are_checked_before_an_array_is_made(tmp_path, torch, change, message):
    array = np.zeros(2, np.float32)
    write(tmp_path / "bad.pt", torch, {"x": tensor(torch, "0", array, **change)}, {"0": bytes(8)})
    with pytest.raises(ValueError, match=message):
        read_torch_file(tmp_path / "bad.pt")


def test_other_files(tmp_path, torch):
    (tmp_path / "old.pt").write_bytes(pickle.dumps(1, protocol=2))
    with pytest.raises(NotImplementedError, match="torch before"):
        read_torch_file(tmp_path / "old.pt")
    write(tmp_path / "big.pt", torch, {}, {}, order=b"big")
    with pytest.raises(ValueError, match="byte order b'big', expected little"):
        read_torch_file(tmp_path / "big.pt")
    with pytest.raises(FileNotFoundError):
        read_torch_file(tmp_path / "none.pt")


def test_forecast_weights_convert(tmp_path, torch, data_dir, capsys):
    case = data_dir / "sparda" / "forecast" / "small_b2"
    stored = load_file(case / "model.safetensors")
    base = tmp_path / "base"
    base.mkdir()
    save_file({n: t for n, t in stored.items() if "q_" not in n or "q_proj" in n},
              base / "model.safetensors")  # fmt: skip
    (base / "config.json").write_text((case / "config.json").read_text())
    forecast = {n: t for n, t in stored.items() if "q_future" in n or "q_curr" in n}
    content = {
        "step": 3,
        "indexer": {f"module.{n}": tensor(torch, n, t) for n, t in forecast.items()},
    }
    write(tmp_path / "f.pt", torch, content, {n: t.tobytes() for n, t in forecast.items()})
    out = tmp_path / "forecast.safetensors"
    options = ["--init-blocks", "1", "--local-blocks", "2", "--budget-blocks", "7"]
    assert main([str(tmp_path / "f.pt"), "--model", str(base), "--out", str(out), *options]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    written = load_file(out)
    assert written.keys() == forecast.keys()
    for name, array in forecast.items():
        np.testing.assert_array_equal(written[name], array)
    model, _ = load_pretrained(base, dtype=jnp.bfloat16)
    assert checkpoint_fingerprint(base) == model_fingerprint(model)
    loaded = from_pretrained(base, forecast=out)
    assert loaded.sparse == SparseConfig(loaded.sparse.geometry, 1, 2, 7)
    # One tensor of the wrong shape.
    name, array = next(iter(forecast.items()))
    content["indexer"][f"module.{name}"] = tensor(torch, name, array[:-1], count=array.size)
    write(tmp_path / "f.pt", torch, content, {n: t.tobytes() for n, t in forecast.items()})
    assert main([str(tmp_path / "f.pt"), "--model", str(base), "--out", str(out)]) == 1
    assert f"{name} has shape" in capsys.readouterr().err
