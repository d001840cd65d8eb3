"""Every operation in one jitted step, with implicit transfers and rank promotion forbidden."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from host_offload.slot_cache import assign_slots, compact_misses
from pallas_kernels import BlockGeometry
from pallas_kernels.block_fetch import fetch_blocks, write_blocks
from pallas_kernels.block_selection import select_blocks_forecast, select_blocks_multi_head
from pallas_kernels.block_sparse_attention import block_sparse_attention
from pallas_kernels.compressed_keys import compress_keys, compress_latest
from pallas_kernels.pool_attention import pool_attention

GEOMETRY = BlockGeometry(16, 8, 4)
RULES = {"geometry": GEOMETRY, "init_blocks": 1, "local_blocks": 1, "budget": 3}


@functools.partial(jax.jit, donate_argnames=("slots",))
def step(q, forecast, kv, pool, slots, slot_blocks, position, dense):
    """Decode of one token: selection by both selectors, misses, fetch, attention; every op."""
    b, k, m, _, p, h = kv.shape
    keys = kv[:, :, :, 0].reshape(b, k, m * p, h)
    compressed = compress_keys(keys, GEOMETRY)
    latest = compress_latest(keys[:, :, -GEOMETRY.kernel_size :])
    visible = GEOMETRY.complete_windows(position)
    own = position // p
    rules = {**RULES, "num_blocks": m, "width": m, "dense": dense}
    exact = select_blocks_multi_head(q, compressed, own, visible, **rules)
    ahead = select_blocks_forecast(forecast, compressed, own, visible, **rules)
    wanted = ahead.ids[:, :, 0]
    plan = assign_slots(slot_blocks, wanted, retention="spare", last_used=slot_blocks)
    source, target, count = compact_misses(plan, wanted, num_blocks=m)
    slots = fetch_blocks(pool, slots, source, target, count)
    ready = slots.reshape(b, k, -1, 2, p, h)
    tail = jnp.stack([latest, latest], 2)[:, :, :, None]
    pooled = pool_attention(q, ready, plan.slot_ids, tail, jnp.ones((b, 1, 1), bool))
    sparse = block_sparse_attention(q, kv, exact.ids, position)
    written = write_blocks(kv.reshape(-1, 2, p, h), slots[:2], target[:2])
    return pooled, sparse, slots, plan, written


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_implicit_transfer_and_no_rank_promotion(rng, dtype):
    b, k, m, p, h, z = 2, 2, 6, 16, 8, 8
    kv = jnp.asarray(rng.normal(size=(b, k, m, 2, p, h)), dtype)
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    arguments = (
        jnp.asarray(rng.normal(size=(b, 1, 6, h)), dtype),
        jnp.asarray(rng.normal(size=(b, 1, k, h)), dtype),
        kv,
        jax.device_put(kv.reshape(-1, 2, p, h), host),
    )
    rest = (
        jnp.full((b, k, z), -1, jnp.int32),
        jnp.array([[50], [95]], jnp.int32),
        jnp.array([True, False]),
    )

    def run():
        return step(*arguments, slots, *rest)

    with jax.numpy_rank_promotion("raise"):
        slots = jnp.zeros((b * k * z, 2, p, h), dtype)
        first = run()
        slots = jnp.zeros((b * k * z, 2, p, h), dtype)
        with jax.transfer_guard("disallow"):
            second = jax.block_until_ready(run())
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert first[0].dtype == first[1].dtype == jnp.dtype(dtype)
