"""Both fetchers: the slots they leave are those of a plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from host_offload import memory
from host_offload.fetch import EagerFetcher, ProgramFetcher
from host_offload.host_pool import HostPool
from host_offload.quantise import dequantise

B, K, M, Z, P, H = 2, 3, 40, 20, 4, 8  # 240 runs in the pool, 120 in the slots
WIDTH = B * K * Z


def random_array(shape, dtype, seed):
    rng = np.random.default_rng(seed)
    if np.issubdtype(dtype, np.integer):
        return rng.integers(-100, 100, shape).astype(dtype)
    return np.asarray(rng.standard_normal(shape)).astype(dtype)


def make_pool(dtype, layers=2):
    device = jax.devices()[0]
    pool = HostPool(layers, device)
    content = [random_array((B, K, M, 2, P, H), dtype, layer) for layer in range(layers)]
    for layer, kv in enumerate(content):
        pool.store_layer(layer, jax.device_put(kv, memory.device_sharding(device)))
    return pool, content


def misses(count, seed):
    """`count` random moves; what lies past the count is poison that must not be used."""
    rng = np.random.default_rng(seed)
    source = np.full(WIDTH, 10**6, np.int32)
    target = rng.integers(0, WIDTH, WIDTH).astype(np.int32)
    source[:count] = rng.integers(0, B * K * M, count)
    target[:count] = rng.permutation(WIDTH)[:count]
    return source, target


def expected_slots(slots, kv, source, target, count):
    slots = slots.copy()
    runs, rows = slots.reshape(-1, 2, P, H), kv.reshape(-1, 2, P, H)
    for i in range(count):
        runs[target[i]] = rows[source[i]]
    return slots


class Program:
    """The in-program fetcher as decode uses it: traced, slots donated."""

    def __init__(self, pool):
        def fetch(layers, layer, *rest):
            return ProgramFetcher(layers).fetch(layer, *rest)

        self._pool, self._fetch = pool, jax.jit(fetch, static_argnums=1, donate_argnums=2)

    def fetch(self, layer, *rest):
        return self._fetch(self._pool.layers, layer, *rest)


def make_fetcher(kind, pool):
    return Program(pool) if kind == "program" else EagerFetcher(pool, jax.devices()[0])


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("kind", ["program", "eager"])
def test_slots_equal_a_plain_loop(kind, dtype):
    pool, content = make_pool(dtype)
    fetcher = make_fetcher(kind, pool)
    for seed, count in enumerate((0, 1, 31, 32, 33, 100, WIDTH)):
        layer = seed % 2
        slots = random_array((B, K, Z, 2, P, H), dtype, 50 + seed)
        source, target = misses(count, seed)
        arguments = map(jnp.asarray, (slots, source, target, np.int32(count)))
        result = fetcher.fetch(layer, *arguments)
        assert result.dtype == dtype
        assert result.sharding.memory_kind == "device"
        expected = expected_slots(slots, content[layer], source, target, count)
        np.testing.assert_array_equal(result, expected, err_msg=f"{count} misses")


@pytest.mark.parametrize("kind", ["program", "eager"])
def test_fetches_follow_write_back_without_waiting(kind):
    """Steps in a row, as decode does them: what was just written back is what comes."""
    pool, content = make_pool(jnp.float32, layers=1)
    fetcher = make_fetcher(kind, pool)
    slots = np.zeros((B, K, Z, 2, P, H), np.float32)
    on_device = jnp.asarray(slots)
    for step in range(25):
        tail = random_array((B, K, 2, 2, P, H), np.float32, 200 + step)
        block = step % M
        pool.write_back((jnp.asarray(tail),), jnp.array([block, -1], jnp.int32))
        content[0][0, :, block] = tail[0, :, block % 2]
        count = 40
        source, target = misses(count, 300 + step)
        source[:K] = np.arange(K) * M + block
        moves = map(jnp.asarray, (source, target, np.int32(count)))
        on_device = fetcher.fetch(0, on_device, *moves)
        slots = expected_slots(slots, content[0], source, target, count)
    np.testing.assert_array_equal(on_device, slots)


def test_eager_fetch_of_nothing_returns_the_same_slots():
    pool, _ = make_pool(jnp.float32)
    slots = jnp.zeros((B, K, Z, 2, P, H))
    none = jnp.zeros(WIDTH, jnp.int32)
    assert EagerFetcher(pool, jax.devices()[0]).fetch(0, slots, none, none, jnp.int32(0)) is slots


def test_eager_insert_compiles_once():
    pool, _ = make_pool(jnp.float32)
    fetcher = EagerFetcher(pool, jax.devices()[0])
    slots = jax.device_put(jnp.zeros((B, K, Z, 2, P, H)), jax.devices()[0])
    sizes = []
    for count in (3, 32, 77):
        source, target = misses(count, count)
        slots = fetcher.fetch(0, slots, *map(jnp.asarray, (source, target, np.int32(count))))
        sizes.append(fetcher._insert._cache_size())
    assert sizes == sizes[:1] * 3


def test_no_implicit_transfers():
    pool, _ = make_pool(jnp.float32)
    fetcher = EagerFetcher(pool, jax.devices()[0])
    source, target = misses(40, 1)
    arguments = [jnp.zeros((B, K, Z, 2, P, H)), *map(jnp.asarray, (source, target, np.int32(40)))]
    with jax.transfer_guard("disallow"):
        fetcher.fetch(0, *arguments)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("kind", ["program", "eager"])
def test_quantised_blocks_are_widened_on_the_way(kind, dtype):
    device = jax.devices()[0]
    pool = HostPool(1, device, dtype=dtype)
    kv = random_array((B, K, M, 2, P, H), jnp.float32, 3)
    pool.store_layer(0, jax.device_put(kv, memory.device_sharding(device)))
    stored = pool.layers[0]
    widened = np.asarray(dequantise(np.asarray(stored.values), stored.scales, "float32"))
    slots = random_array((B, K, WIDTH // (B * K), 2, P, H), jnp.float32, 4)
    source, target = misses(7, 5)
    fetcher = make_fetcher(kind, pool)
    got = fetcher.fetch(0, jnp.array(slots), *map(jnp.array, (source, target)), jnp.int32(7))
    np.testing.assert_array_equal(got, expected_slots(slots, widened, source, target, 7))
