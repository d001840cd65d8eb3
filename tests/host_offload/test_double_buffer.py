"""Staging buffers are reused only when nobody needs what they held."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from host_offload import memory
from host_offload.double_buffer import DoubleBuffer

ROWS, WIDTH = 16, 4096


@pytest.fixture
def sharding():
    return memory.device_sharding(jax.devices()[0])


def random_source(dtype, rows=64):
    rng = np.random.default_rng(7)
    return np.asarray(rng.integers(-128, 128, (rows, WIDTH))).astype(dtype)


def aligned(buffer):
    raw = np.zeros(buffer.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + buffer.nbytes].view(buffer.dtype).reshape(buffer.shape)


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int8, np.int32])
def test_rapid_reuse_never_corrupts_what_was_sent(sharding, dtype):
    """50 sends, nothing waited for, everything checked at the end."""
    source, rng = random_source(dtype), np.random.default_rng(1)
    staging = DoubleBuffer((ROWS, WIDTH), source.dtype, sharding)
    # XLA:CPU adopts a numpy buffer only where it is aligned to 64 bytes; numpy's often are not.
    staging._buffers = [aligned(buffer) for buffer in staging._buffers]
    chosen = [rng.integers(0, len(source), ROWS).astype(np.int32) for _ in range(50)]
    sent = [staging.send(source, indices) for indices in chosen]
    for indices, rows in zip(chosen, sent, strict=True):
        assert rows.dtype == source.dtype
        assert rows.sharding.memory_kind == "device"
        np.testing.assert_array_equal(rows, source[indices])


def test_programs_that_read_it_finish_on_the_right_rows(sharding):
    """A slow reader of one transfer still runs while both buffers are filled again."""
    source, rng = random_source(np.float32), np.random.default_rng(2)
    staging = DoubleBuffer((ROWS, WIDTH), source.dtype, sharding)
    slow = jax.jit(lambda rows: jax.lax.fori_loop(0, 50, lambda _, r: r[::-1] + 1, rows))
    chosen = [rng.integers(0, len(source), ROWS) for _ in range(20)]
    results = [slow(staging.send(source, indices)) for indices in chosen]
    for indices, result in zip(chosen, results, strict=True):
        np.testing.assert_array_equal(result, source[indices] + 50)


def test_short_and_empty_sends(sharding):
    source = random_source(np.float32)
    staging = DoubleBuffer((ROWS, WIDTH), source.dtype, sharding)
    assert staging.rows == ROWS
    for count in (5, 0, ROWS, 1):
        indices = np.arange(count, dtype=np.int32)[::-1]
        rows = staging.send(source, indices)
        assert rows.shape == (ROWS, WIDTH)
        np.testing.assert_array_equal(rows[:count], source[indices])


def test_more_rows_than_the_buffer_are_refused(sharding):
    source = random_source(np.float32)
    staging = DoubleBuffer((ROWS, WIDTH), source.dtype, sharding)
    with pytest.raises(ValueError, match="17 rows exceed the 16 of a transfer"):
        staging.send(source, np.zeros(17, np.int32))


def test_source_may_change_once_a_send_has_returned(sharding):
    """The rows were gathered by then: the pool may be written to."""
    source = random_source(np.float32)
    kept = source.copy()
    staging = DoubleBuffer((ROWS, WIDTH), source.dtype, sharding)
    rows = staging.send(source, np.arange(ROWS, dtype=np.int32))
    source[:] = -1
    np.testing.assert_array_equal(rows, kept[:ROWS])
