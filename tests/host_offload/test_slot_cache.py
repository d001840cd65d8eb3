import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from host_offload.slot_cache import assign_slots, compact_misses
from pallas_kernels.block_fetch import fetch_blocks, write_blocks


def host():
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


@jax.jit
def plan_step(slot_blocks, wanted, pool, slots):
    """One step of the original's pool: plan, list of misses, fetch."""
    b, k = wanted.shape[:2]
    plan = assign_slots(slot_blocks, wanted)
    source, target, count = compact_misses(plan, wanted, num_blocks=pool.shape[0] // (b * k))
    return plan, fetch_blocks(pool, slots, source, target, count), count


@pytest.mark.parametrize("name", ["ascending_20", "shuffled_20"])
def test_cases(data_dir, name):
    """20 decode steps: slot map, load list, contents, tail, and write-back to the host pool."""
    folder = data_dir / "sparda" / "slots" / name
    params = json.loads((folder / "case.json").read_text())["params"]
    a = load_file(folder / "data.safetensors")
    b, k, h = params["batch"], params["num_kv_heads"], params["head_dim"]
    z, p, length = params["num_slots"], params["block_size"], params["prefill_len"]
    m = -(-(length + params["steps"]) // p)
    kv = np.stack([a["k"], a["v"]], 3)  # [B, S, K, 2, H]

    pool = np.zeros((b, k, m, 2, p, h), np.float32)  # only finished blocks are in the pool
    for s in range(length // p * p):
        pool[:, :, s // p, :, s % p] = kv[:, s]
    pool = jax.device_put(pool.reshape(b * k * m, 2, p, h), host())
    slots = np.zeros((b, k, z, 2, p, h), np.float32)
    for s in range(length // p * p, length):
        slots[:, :, z - 1, :, s % p] = kv[:, s]
    slots = jnp.asarray(slots.reshape(b * k * z, 2, p, h))
    write = jax.jit(write_blocks, donate_argnums=0, out_shardings=host())
    slot_blocks = jnp.asarray(a["initial_map"].swapaxes(0, 1))

    for step in range(params["steps"]):
        wanted = jnp.asarray(a["selection"][step].swapaxes(0, 1))
        plan, slots, count = plan_step(slot_blocks, wanted, pool, slots)
        np.testing.assert_array_equal(plan.slot_blocks, a["new_map"][step].swapaxes(0, 1))
        load = np.full((b, k, z), -1)
        for i, head, r in np.argwhere(np.asarray(plan.miss)):
            load[i, head, plan.slot_ids[i, head, r]] = wanted[i, head, r]
        np.testing.assert_array_equal(load, a["load_list"][step].swapaxes(0, 1))
        assert count == (load >= 0).sum()

        position = length + step
        tail_length = position % p + 1
        assert (a["attended_len"][step] == (z - 1) * p + tail_length).all()
        whole = np.asarray(slots).reshape(b, k, z, 2, p, h).copy()
        whole[:, :, z - 1, :, position % p] = kv[:, position]
        k_pool = a["k_pool"][step].reshape(b, z, p, k, h).transpose(0, 3, 1, 2, 4)
        np.testing.assert_array_equal(whole[:, :, : z - 1, 0], k_pool[:, :, : z - 1])
        seen = slice(0, tail_length)
        np.testing.assert_array_equal(whole[:, :, -1, 0, seen], k_pool[:, :, -1, seen])
        slots = jnp.asarray(whole.reshape(b * k * z, 2, p, h))

        slot_blocks = plan.slot_blocks
        if tail_length == p:
            targets = np.arange(b * k) * m + position // p
            pool = write(pool, whole[:, :, z - 1].reshape(b * k, 2, p, h), targets)
            slot_blocks = slot_blocks.at[:, :, z - 1].add(1)
        np.testing.assert_array_equal(slot_blocks, a["map_after_step"][step].swapaxes(0, 1))
    # Every block that the run finished has gone back to the host.
    finished = (length + params["steps"]) // p
    pool = np.asarray(pool).reshape(b, k, m, 2, p, h)[:, :, :finished]
    exact = kv[:, : finished * p].reshape(b, finished, p, k, 2, h).transpose(0, 3, 1, 4, 2, 5)
    np.testing.assert_array_equal(pool, exact)


def simulate(slot_blocks, wanted, last_used=None, spare=False):
    """The rule in plain Python, one row at a time."""
    new, slot_ids, miss = slot_blocks.copy(), np.full(wanted.shape, -1), wanted >= 0
    for i, head in np.ndindex(slot_blocks.shape[:2]):
        row, want = slot_blocks[i, head], wanted[i, head]
        free = [z for z in range(len(row)) if row[z] < 0 or row[z] not in want]
        if last_used is not None:
            free.sort(key=lambda z: (row[z] >= 0, last_used[i, head, z] if row[z] >= 0 else 0, z))
        for r, block in enumerate(want):
            if block < 0:
                continue
            if block in row:
                slot_ids[i, head, r] = list(row).index(block)
                miss[i, head, r] = False
            else:
                slot_ids[i, head, r] = free.pop(0)
                new[i, head, slot_ids[i, head, r]] = block
        if not spare:
            new[i, head, free] = -1
    return new, slot_ids, miss


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("by_use", [False, True])
def test_random_steps_equal_the_rule(rng_steps, spare, by_use):
    b, k, z, r, m = 2, 3, 9, 5, 14
    retention = "spare" if spare else "none"
    plan_of = jax.jit(functools.partial(assign_slots, retention=retention))
    slot_blocks = np.full((b, k, z), -1, np.int32)
    last_used = np.zeros((b, k, z), np.int32) if by_use else None
    hits = 0
    for step in range(25):
        wanted = rng_steps.permuted(np.broadcast_to(np.arange(m), (b, k, m)), axis=2)[..., :r]
        wanted = np.where(rng_steps.random(wanted.shape) < 0.2, -1, wanted).astype(np.int32)
        expected = simulate(slot_blocks, wanted, last_used, spare)
        plan = plan_of(slot_blocks, wanted, last_used=last_used)
        for x, y in zip((plan.slot_blocks, plan.slot_ids, plan.miss), expected, strict=True):
            np.testing.assert_array_equal(x, y)
        hits += (~expected[2] & (wanted >= 0)).sum()
        slot_blocks = expected[0]
        if by_use:
            np.put_along_axis(
                last_used, np.where(wanted >= 0, expected[1], expected[1].max(2, keepdims=True)),
                step, axis=2,
            )  # fmt: skip
    assert hits > 50


@pytest.fixture
def rng_steps():
    return np.random.default_rng(7)


def test_misses_are_listed_in_order():
    wanted = jnp.array([[[5, 2, -1], [1, 0, 7]]], jnp.int32)
    slot_blocks = jnp.array([[[2, -1, -1], [3, 7, 4]]], jnp.int32)
    plan = assign_slots(slot_blocks, wanted)
    source, target, count = compact_misses(plan, wanted, num_blocks=10)
    assert plan.slot_ids.tolist() == [[[1, 0, -1], [0, 2, 1]]]
    assert plan.slot_blocks.tolist() == [[[2, 5, -1], [1, 7, 0]]]
    assert (source.tolist(), target.tolist(), int(count)) == (
        [5, 11, 10, 0, 0, 0], [1, 3, 5, 0, 0, 0], 3,
    )  # fmt: skip
    pages = jnp.arange(9, -1, -1, dtype=jnp.int32)[None]
    source, _, _ = compact_misses(plan, wanted, num_blocks=10, pages=pages)
    assert source.tolist() == [4 * 2, 8 * 2 + 1, 9 * 2 + 1, 0, 0, 0]


def test_errors():
    with pytest.raises(ValueError, match="4 wanted blocks do not fit 3 slots"):
        assign_slots(jnp.zeros((1, 1, 3), jnp.int32), jnp.zeros((1, 1, 4), jnp.int32))
    with pytest.raises(ValueError, match="retention must be 'none' or 'spare', got 'lru'"):
        assign_slots(
            jnp.zeros((1, 1, 3), jnp.int32), jnp.zeros((1, 1, 2), jnp.int32), retention="lru"
        )
