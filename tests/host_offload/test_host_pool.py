"""The host pool: where it lies, what write-back changes, what a view shows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from host_offload import memory
from host_offload.host_pool import HostPool, tail_block_runs
from host_offload.quantise import dequantise

LAYERS, B, K, M, P, H = 2, 3, 2, 5, 4, 8
DTYPES = [jnp.float32, jnp.bfloat16]


@pytest.fixture
def device():
    return jax.devices()[0]


def random_blocks(shape, seed, dtype=jnp.float32):
    values = np.random.default_rng(seed).standard_normal(shape)
    return np.asarray(values).astype(dtype)


def make_pool(device, dtype=jnp.float32):
    pool = HostPool(LAYERS, device)
    content = [random_blocks((B, K, M, 2, P, H), seed, dtype) for seed in range(LAYERS)]
    for index, kv in enumerate(content):
        pool.store_layer(index, jax.device_put(kv, memory.device_sharding(device)))
    return pool, content


def make_tails(seed, dtype=jnp.float32):
    tails = [random_blocks((B, K, 2, 2, P, H), seed + layer, dtype) for layer in range(LAYERS)]
    return tails, tuple(map(jnp.asarray, tails))


@pytest.mark.smoke
def test_layers_lie_in_pinned_host_memory_and_are_counted(device):
    pool = HostPool(LAYERS, device)
    assert pool.nbytes == 0
    kv = random_blocks((B, K, M, 2, P, H), 0)
    pool.store_layer(1, jax.device_put(kv, memory.device_sharding(device)))
    assert pool.nbytes == kv.nbytes
    with pytest.raises(RuntimeError, match="layer 0 was never stored"):
        _ = pool.layers
    pool, content = make_pool(device)
    assert [layer.values.sharding.memory_kind for layer in pool.layers] == ["pinned_host"] * LAYERS
    assert pool.nbytes == sum(kv.nbytes for kv in content)
    for layer, kv in zip(pool.layers, content, strict=True):
        np.testing.assert_array_equal(layer.values, kv)


def test_run_indices():
    runs = tail_block_runs(jnp.array([3, -1, 0]), K, M)
    np.testing.assert_array_equal(runs, [3, M + 3, -1, -1, 4 * M, 5 * M])


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("targets", [[0, 3, 4], [2, -1, 1], [-1, -1, 0], [4, 4, 4]])
def test_write_back_replaces_only_the_named_blocks(device, dtype, targets):
    pool, content = make_pool(device, dtype)
    tails, on_device = make_tails(10, dtype)
    pool.write_back(on_device, jnp.array(targets, jnp.int32))
    for index, (expected, tail) in enumerate(zip(content, tails, strict=True)):
        for row, block in enumerate(targets):
            if block >= 0:
                expected[row, :, block] = tail[row, :, block % 2]
        assert pool.layers[index].values.sharding.memory_kind == "pinned_host"
        np.testing.assert_array_equal(pool.view(index), expected)


@pytest.mark.smoke
def test_write_back_of_nothing_changes_nothing(device):
    pool, content = make_pool(device)
    _, tails = make_tails(20)
    pool.write_back(tails, jnp.full(B, -1, jnp.int32))
    for index, kv in enumerate(content):
        np.testing.assert_array_equal(pool.view(index), kv)


@pytest.mark.parametrize("dtype", [*DTYPES, jnp.int8])
def test_view_is_the_memory_itself(device, dtype):
    pool, content = make_pool(device, dtype)
    view = pool.view(1)
    assert (view.shape, view.dtype) == (content[1].shape, jnp.dtype(dtype))
    assert view.ctypes.data == pool.layers[1].values.unsafe_buffer_pointer()
    np.testing.assert_array_equal(view, content[1])


def test_a_view_does_not_block_donation(device):
    """A pool that were copied for every write-back would take twice its memory, and the time."""
    pool, _ = make_pool(device)
    _, tails = make_tails(30)
    for step in range(6):
        old = pool.view(0)
        address, array = old.ctypes.data, pool.layers[0].values
        pool.write_back(tails, jnp.array([step % M, -1, -1], jnp.int32))
        assert array.is_deleted()
        view = pool.view(0)
        assert view.ctypes.data == address
        np.testing.assert_array_equal(view[0, :, step % M], tails[0][0, :, (step % M) % 2])


def test_write_back_compiles_once(device):
    pool, _ = make_pool(device)
    sizes = []
    for step in range(4):
        _, tails = make_tails(step)
        pool.write_back(tails, jnp.full(B, step, jnp.int32))
        sizes.append(pool._write_back._cache_size())
    assert sizes == sizes[:1] * 4


def test_pool_is_current_for_a_program_that_follows(device):
    """Reads see the write-back that was dispatched before them, without waiting in between."""
    pool, content = make_pool(device)
    read = jax.jit(lambda layer: jax.device_put(layer, jax.memory.Space.Device) * 1)
    for step in range(20):
        tails, on_device = make_tails(100 + step)
        block = step % M
        pool.write_back(on_device, jnp.full(B, block, jnp.int32))
        content[0][:, :, block] = tails[0][:, :, block % 2]
        np.testing.assert_array_equal(read(pool.layers[0].values), content[0])


@pytest.mark.parametrize("dtype,tolerance", [("int8", 0.5 / 127), ("float8_e4m3fn", 1 / 16)])
def test_a_quantised_pool_stays_close(device, dtype, tolerance):
    """int8 errs by half a scale, the largest of a block over 127; e4m3 by half of a 1/8 step."""
    pool = HostPool(2, device, resident=1, dtype=dtype)
    kv = random_blocks((B, K, M, 2, P, H), 1) * 10.0 ** np.arange(M)[:, None, None, None]
    kv[0, 0, 1, 0] = 0
    place = memory.device_sharding(device)
    pool.store_layer(1, jax.device_put(kv.astype(np.float32), place))
    tails, on_device = make_tails(50)
    pool.write_back(on_device, jnp.array([2, -1, 0], jnp.int32))
    kv[0, :, 2], kv[2, :, 0] = tails[1][0, :, 0], tails[1][2, :, 0]
    assert pool.layers[0] is None
    assert pool.layers[1].values.dtype == dtype
    assert pool.layers[1].values.sharding.memory_kind == "pinned_host"
    assert pool.nbytes == kv.size
    layer = pool.layers[1]
    read = dequantise(np.asarray(layer.values), layer.scales, "float32")
    largest = np.abs(kv).max((-2, -1), keepdims=True)
    scale = largest if dtype == "int8" else np.abs(kv) + largest / 448
    assert np.all(np.abs(read - kv) <= 1.01 * tolerance * scale)
    with pytest.raises(ValueError, match="layer 0 stays on the device"):
        pool.view(0)
