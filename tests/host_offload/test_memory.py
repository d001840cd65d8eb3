"""Byte accounting and the messages of budget checks."""

import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from host_offload import memory

GPU = types.SimpleNamespace(platform="gpu", memory_stats=lambda: None)


def full_gpu(limit, used):
    stats = {"bytes_limit": limit, "bytes_in_use": used}
    return types.SimpleNamespace(platform="gpu", memory_stats=lambda: stats)


@pytest.fixture
def device():
    return jax.devices("cpu")[0]


def test_memory_kinds_exist_on_the_cpu(device):
    values = np.arange(12, dtype=np.float32)
    host = jax.device_put(values, memory.host_sharding(device))
    assert host.sharding.memory_kind == "pinned_host"
    back = jax.device_put(host, memory.device_sharding(device))
    assert back.sharding.memory_kind == "device"
    np.testing.assert_array_equal(back, values)


def test_tree_bytes_counts_arrays_and_shapes():
    tree = {"a": jnp.zeros((3, 5), jnp.bfloat16), "b": (np.zeros(7, np.int32), None)}
    assert memory.tree_bytes(tree) == 3 * 5 * 2 + 7 * 4
    assert memory.tree_bytes(jax.eval_shape(lambda: tree["a"])) == 30
    assert memory.tree_bytes(()) == 0


@pytest.mark.parametrize(
    "count,text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (-(2**21), "-2.0 MiB"),
        (2**30, "1.00 GiB"),
        (2**41, "2048.00 GiB"),
    ],
)
def test_format_bytes(count, text):
    assert memory.format_bytes(count) == text


def test_check_budget():
    memory.check_budget("KV", 100, 100, "the test")
    memory.check_budget("KV", 2**60, None, "the test")
    with pytest.raises(ValueError, match=r"^KV needs 2.0 KiB but the test allows 1.0 KiB$"):
        memory.check_budget("KV", 2048, 1024, "the test")


def test_check_budget_tells_near_values_apart():
    message = "^KV needs 1048577 B but the test allows 1048576 B$"
    with pytest.raises(ValueError, match=message):
        memory.check_budget("KV", 2**20 + 1, 2**20, "the test")


def test_host_budget_of_the_user(device):
    memory.check_host_budget("KV", 1024, 1024, device)
    message = r"KV needs 1.0 KiB but the host KV budget \(host_kv_bytes\) allows 1000 B"
    with pytest.raises(ValueError, match=message):
        memory.check_host_budget("KV", 1024, 1000, device)


def test_free_host_memory(device, monkeypatch):
    available = memory.available_host_bytes()
    assert 2**20 < available < 2**50
    with pytest.raises(ValueError, match="GiB but free host memory allows"):
        memory.check_host_budget("KV", 2**50, None, device)
    monkeypatch.setattr(memory, "available_host_bytes", lambda: None)
    memory.check_host_budget("KV", 2**50, None, device)


def test_host_memory_where_there_is_no_meminfo(monkeypatch):
    def unreadable(path, **_):
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", unreadable)
    assert memory.available_host_bytes() is None
    monkeypatch.setattr(Path, "read_text", lambda path, **_: "MemTotal: 5 kB\n")
    assert memory.available_host_bytes() is None
    monkeypatch.setattr(Path, "read_text", lambda path, **_: "MemTotal: 5 kB\nMemAvailable: 3 kB\n")
    assert memory.available_host_bytes() == 3 * 1024


def test_pinned_limit(device, monkeypatch):
    monkeypatch.setattr(memory, "available_host_bytes", lambda: None)
    monkeypatch.delenv(memory.PINNED_LIMIT_VARIABLE, raising=False)
    assert memory.pinned_limit_bytes(device) is None
    assert memory.pinned_limit_bytes(GPU) == 64 * 2**30
    monkeypatch.setenv(memory.PINNED_LIMIT_VARIABLE, "0.5")
    memory.check_host_budget("KV", 2**29, None, GPU)
    message = rf"needs 1.00 GiB but .* \({memory.PINNED_LIMIT_VARIABLE}\) allows 512.0 MiB"
    with pytest.raises(ValueError, match=message):
        memory.check_host_budget("KV", 2**30, None, GPU)
    monkeypatch.setenv(memory.PINNED_LIMIT_VARIABLE, "plenty")
    with pytest.raises(ValueError, match=f"{memory.PINNED_LIMIT_VARIABLE} .* number.* 'plenty'"):
        memory.pinned_limit_bytes(GPU)


def test_device_budget(device):
    memory.check_device_budget("KV", 1024, 1024, device)
    message = r"KV needs 1.0 KiB but the device KV budget \(device_kv_bytes\) allows 1 B"
    with pytest.raises(ValueError, match=message):
        memory.check_device_budget("KV", 1024, 1, device)
    memory.check_device_budget("KV", 2**50, None, GPU)  # a back end that does not say
    gpu = full_gpu(4096, 1024)
    memory.check_device_budget("KV", 3072, None, gpu)
    with pytest.raises(ValueError, match=r"KV needs 3.5 KiB but free memory of .* allows 3.0 KiB"):
        memory.check_device_budget("KV", 3584, None, gpu)


def test_the_cpu_as_device_has_what_the_host_has(device, monkeypatch):
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 1024)
    assert memory.free_device_bytes(device) == 1024
    with pytest.raises(ValueError, match=r"KV needs 2.0 KiB but free host memory allows 1.0 KiB"):
        memory.check_device_budget("KV", 2048, None, device)
