"""The grouped matmul of a mixture of experts on a GPU, at LLaDA2.0-mini's shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.models.moe import grouped_matmul

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows", [40, 2560])
@pytest.mark.parametrize(("size", "out"), [(2048, 512), (512, 2048)])
def test_grouped_matmul_equals_one_matmul_per_expert(rows, size, out):
    rng, experts = np.random.default_rng(0), 256
    used = rows - 7  # rows past the last group mean nothing
    expert = np.sort(np.concatenate([rng.integers(0, experts, used - used // 3),
                                     np.full(used // 3, 5)]))  # fmt: skip
    counts = np.bincount(expert, minlength=experts).astype(np.int32)
    assert counts.min() == 0 and counts.max() >= used // 3
    keys = jax.random.split(jax.random.key(1), 2)
    x = jax.random.normal(keys[0], (rows, size), jnp.bfloat16)
    kernel = jax.random.normal(keys[1], (experts, size, out), jnp.bfloat16) * size**-0.5
    got = np.asarray(jax.jit(grouped_matmul)(x, kernel, counts))[:used].astype(np.float32)
    wide = np.asarray(x[:used], np.float32)
    expected = np.empty((used, out), np.float32)
    for number in np.unique(expert):
        mine = expert == number
        expected[mine] = wide[mine] @ np.asarray(kernel[number], np.float32)
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 5e-3
