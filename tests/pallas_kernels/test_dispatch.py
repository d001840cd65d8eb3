import logging
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch
from pallas_kernels.block_fetch import write_blocks
from pallas_kernels.compressed_keys import compress_latest

OP = "compressed_keys"


def double(x):
    return 2 * x


@pytest.fixture
def kernel(monkeypatch):
    """A stand-in for the Mosaic module of OP, on a machine that pretends to have a GPU."""
    module = types.ModuleType(f"pallas_kernels.{OP}.mosaic")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(dispatch, "unavailable", lambda: None)
    dispatch._kernel.cache_clear()
    dispatch._log_choice.cache_clear()
    yield module
    dispatch._kernel.cache_clear()
    dispatch._log_choice.cache_clear()


def test_unknown_implementation():
    with pytest.raises(ValueError, match=r"implementation must be one of .* got 'triton'"):
        compress_latest(jnp.ones((1, 1, 4, 2)), implementation="triton")


def test_mosaic_never_falls_back_on_the_cpu():
    if jax.default_backend() != "cpu":
        pytest.skip("this machine may serve it")
    with pytest.raises(NotImplementedError, match=r"block_fetch.write_blocks .*(cpu|older than)"):
        write_blocks(
            jnp.ones((1, 2, 4, 2)),
            jnp.ones((1, 2, 4, 2)),
            jnp.zeros(1, jnp.int32),
            implementation="mosaic",
        )


def test_mosaic_names_a_missing_kernel(kernel):
    with pytest.raises(NotImplementedError, match="there is no Mosaic kernel for double"):
        dispatch.run(OP, "mosaic", double, 3)


def test_auto_takes_the_kernel_and_says_so_once(kernel, caplog):
    kernel.double = lambda x: -x
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        assert [dispatch.run(OP, "auto", double, 3) for _ in range(3)] == [-3, -3, -3]
    assert caplog.messages == ["compressed_keys.double uses mosaic"]
    assert dispatch.run(OP, "xla", double, 3) == 6


def test_auto_falls_back_aloud_when_the_kernel_refuses(kernel, caplog):
    def refuse(x):
        raise NotImplementedError("head dim 3 is not a multiple of 8")

    kernel.double = refuse
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        assert dispatch.run(OP, "auto", double, 3) == 6
    assert caplog.messages == ["compressed_keys.double uses xla: head dim 3 is not a multiple of 8"]
    with pytest.raises(NotImplementedError, match="head dim 3"):
        dispatch.run(OP, "mosaic", double, 3)


def test_an_error_inside_the_kernel_is_not_hidden(kernel):
    def broken(x):
        raise TypeError("bug")

    kernel.double = broken
    with pytest.raises(TypeError, match="bug"):
        dispatch.run(OP, "auto", double, 3)


def test_no_kernel_on_old_gpus(monkeypatch):
    ampere = types.SimpleNamespace(platform="gpu", compute_capability="8.0")
    hopper = types.SimpleNamespace(platform="gpu", compute_capability="9.0")
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    for device, reason in ((ampere, "compute capability 8.0 is below 9.0"), (hopper, None)):
        monkeypatch.setattr(dispatch, "_default_device", lambda device=device: device)
        assert dispatch.unavailable() == reason
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert "older than 0.11" in dispatch.unavailable()


def test_the_default_device_decides():
    with jax.default_device(jax.devices("cpu")[0]):
        assert dispatch.unavailable() is not None
