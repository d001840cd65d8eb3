"""The experts of a mixture on a GPU, at LLaDA2.0-mini's shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.expert_mlp import expert_mlp

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows", [40, 256, 2560])
def test_expert_mlp_equals_one_mlp_per_expert(rows):
    rng, experts, size, inner = np.random.default_rng(0), 256, 2048, 512
    used = rows - 7  # rows past the last expert's mean nothing
    expert = np.sort(np.concatenate([rng.integers(0, experts, used - used // 3),
                                     np.full(used // 3, 5)]))  # fmt: skip
    counts = np.bincount(expert, minlength=experts).astype(np.int32)
    assert counts.min() == 0 and counts.max() >= used // 3
    keys = jax.random.split(jax.random.key(1), 4)
    x = jax.random.normal(keys[0], (rows, size), jnp.bfloat16).at[used:].set(jnp.nan)
    shapes = ((experts, size, inner), (experts, size, inner), (experts, inner, size))
    kernels = [
        jax.random.normal(key, shape, jnp.bfloat16) * shape[1] ** -0.5
        for key, shape in zip(keys[1:], shapes, strict=True)
    ]
    # Experts without rows: nothing of theirs may be used.
    kernels = [jnp.where(counts[:, None, None] > 0, kernel, jnp.nan) for kernel in kernels]
    run = jax.jit(lambda *operands: expert_mlp(*operands, implementation="mosaic"))
    got = np.asarray(run(x, *kernels, counts))[:used].astype(np.float32)
    wide = np.asarray(x[:used], np.float32)
    expected = np.empty((used, size), np.float32)
    for number in np.unique(expert):
        mine = expert == number
        gate, up, down = (np.asarray(kernel[number], np.float32) for kernel in kernels)
        inside = wide[mine] @ gate
        expected[mine] = (inside / (1 + np.exp(-inside)) * (wide[mine] @ up)) @ down
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 5e-3
