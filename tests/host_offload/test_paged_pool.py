"""The paged pool: blocks go to their pages and come back, and nothing else changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from host_offload import memory
from host_offload.paged_pool import PagedPool, read_pages, write_pages

X, B, K, Q, P, H = 7, 3, 2, 4, 4, 8
READ = jax.jit(functools.partial(read_pages, dtype="float32"))


def place(array):
    return jax.device_put(array, memory.device_sharding(jax.devices()[0]))


@pytest.mark.parametrize("dtype,tolerance", [(None, 0.0), ("int8", 0.5 / 127)])
def test_blocks_go_to_their_pages_and_come_back(dtype, tolerance):
    rng = np.random.default_rng(0)
    pool = PagedPool(
        2,
        jax.devices()[0],
        pages=X,
        block=(K, P, H),
        compute_dtype=jnp.dtype("float32"),
        resident=1,
        dtype=dtype,
    )
    assert pool.layers[0] is None
    kv = rng.standard_normal((1, K, Q, 2, P, H)).astype(np.float32)
    pages = np.array([-1, 0, 3], np.int32)  # of the last three blocks
    before = pool.layers[1].values.unsafe_buffer_pointer()
    places = jax.tree.map(lambda leaf: leaf.sharding, pool.layers[1])
    write = jax.jit(write_pages, donate_argnums=0, out_shardings=places)
    pool.replace(1, write(pool.layers[1], place(kv), place(np.int32(1)), place(pages)))
    tails = rng.standard_normal((2, B, K, 2, 2, P, H)).astype(np.float32)
    targets, homes = np.array([7, -1, 4], np.int32), np.array([6, -1, 1], np.int32)
    pool.write_back_pages(tuple(map(place, tails)), place(targets), place(homes))
    assert pool.layers[1].values.unsafe_buffer_pointer() == before
    assert pool.layers[1].values.sharding.memory_kind == "pinned_host"
    expected = np.zeros((X, K, 2, P, H), np.float32)
    for block in (2, 3):
        expected[pages[block - 1]] = kv[0, :, block]
    expected[6], expected[1] = tails[1][0, :, 1], tails[1][2, :, 0]
    order = rng.permutation(X).astype(np.int32)
    read = READ(pool.layers[1], place(order), place(np.int32(X - 1)))
    expected = expected[order].swapaxes(0, 1)
    expected[:, X - 1] = 0  # beyond the count
    largest = np.abs(expected).max((-2, -1), keepdims=True)
    assert np.all(np.abs(read[0] - expected) <= 1.01 * tolerance * largest)
