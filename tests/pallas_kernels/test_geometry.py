import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import BlockGeometry


@pytest.mark.parametrize(
    ("length", "count"),
    [(0, 0), (1, 0), (15, 0), (31, 0), (32, 1), (47, 1), (48, 2), (79, 3), (80, 4), (95, 4)],
)
def test_num_compressed_of_the_published_sizes(length, count):
    assert BlockGeometry().num_compressed(length) == count


@pytest.mark.parametrize("sizes", [(64, 32, 16), (16, 8, 4), (32, 16, 16), (16, 32, 8)])
def test_counts_equal_enumeration(sizes):
    geometry = BlockGeometry(*sizes)
    block, kernel, stride = sizes
    for length in range(3 * kernel + 2 * block):
        windows = [j for j in range(length) if j * stride + kernel <= length]
        assert geometry.num_compressed(length) == len(windows)
        assert geometry.num_blocks(length) == len({s // block for s in range(length)})
        complete = [j for j in range(length) if j * stride + kernel - 1 <= length]
        assert geometry.complete_windows(length) == len(complete)
        assert geometry.started_windows(length) == len(
            [j for j in range(length + 1) if j * stride <= length]
        )


def test_arrays_give_the_same_as_ints():
    geometry = BlockGeometry(16, 8, 4)
    lengths = np.arange(60, dtype=np.int32)
    for array in (lengths, jnp.asarray(lengths)):
        for name in ("num_blocks", "num_compressed", "complete_windows", "started_windows"):
            function = getattr(geometry, name)
            result = function(array)
            assert isinstance(result, type(array))
            np.testing.assert_array_equal(result, [function(int(n)) for n in lengths])


def test_pool_range_covers_the_keys_that_touch_the_block():
    geometry = BlockGeometry(64, 32, 16)
    assert geometry.pool_range(0, 100) == (0, 4)
    assert geometry.pool_range(3, 100) == (11, 16)
    assert geometry.pool_range(3, 13) == (11, 13)
    first, last = geometry.pool_range(3, 5)
    assert last <= first


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((60, 32, 16), "block_size 60 is not a multiple of kernel_stride 16"),
        ((64, 24, 16), "kernel_size 24 is not a multiple of kernel_stride 16"),
        ((0, 32, 16), "block_size must be at least 1, got 0"),
        ((64, 32, -1), "kernel_stride must be at least 1, got -1"),
    ],
)
def test_bad_sizes(sizes, message):
    with pytest.raises(ValueError, match=message):
        BlockGeometry(*sizes)
