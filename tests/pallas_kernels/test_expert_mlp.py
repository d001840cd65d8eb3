"""The experts of a mixture: the kernel, simulated, against one MLP for each expert."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import interpret
from pallas_kernels.expert_mlp import expert_mlp

SIZE, INNER = 128, 128
# Few, none, more than a tile, a few more; five rows belong to no expert.
COUNTS = np.array([3, 0, 70, 9, 0], np.int32)
ROWS = int(COUNTS.sum()) + 5


def _operands():
    dtype = jnp.bfloat16
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((SIZE, INNER), (SIZE, INNER), (INNER, SIZE))
    x = jax.random.normal(keys[0], (ROWS, SIZE), dtype).at[-5:].set(jnp.nan)
    kernels = [
        jax.random.normal(key, (len(COUNTS), *shape), dtype) * shape[0] ** -0.5
        for key, shape in zip(keys[1:], shapes, strict=True)
    ]
    # Experts without rows: nothing of theirs may be used.
    poisoned = [jnp.where(COUNTS[:, None, None] > 0, kernel, jnp.nan) for kernel in kernels]
    return x, poisoned


def test_the_kernel_equals_one_mlp_per_expert():
    x, kernels = _operands()
    with interpret.simulated():
        run = jax.jit(lambda *operands: expert_mlp(*operands, implementation="mosaic"))
        got = jax.block_until_ready(run(x, *kernels, COUNTS))
    got, wide = np.asarray(got, np.float64), np.asarray(x, np.float64)
    expert = np.repeat(np.arange(len(COUNTS)), COUNTS)
    for number in np.unique(expert):
        mine = np.flatnonzero(expert == number)
        gate, up, down = (np.asarray(kernel[number], np.float64) for kernel in kernels)
        inside = wide[mine] @ gate
        expected = (inside / (1 + np.exp(-inside)) * (wide[mine] @ up)) @ down
        assert np.linalg.norm(got[mine] - expected) < 5e-3 * np.linalg.norm(expected)


def test_lowers_for_cuda_and_says_what_it_does_not_serve():
    from pallas_kernels.expert_mlp import mosaic

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    def lowered(rows, size, inner, dtype=jnp.bfloat16):
        wide, narrow = shape(9, size, inner, dtype=dtype), shape(9, inner, size, dtype=dtype)
        operands = shape(rows, size, dtype=dtype), wide, wide, narrow, shape(9, dtype=jnp.int32)
        return jax.export.export(jax.jit(mosaic.expert_mlp), platforms=["cuda"])(*operands)

    lowered(5, 2048, 512)
    with pytest.raises(NotImplementedError, match="F=96 is no multiple of 128"):
        lowered(5, 128, 96)
    with pytest.raises(NotImplementedError, match="float32"):
        lowered(5, 128, 128, jnp.float32)


def test_shapes_that_do_not_fit_raise():
    wide, counts = np.zeros((2, 4, 6), np.float32), np.ones(2, np.int32)
    with pytest.raises(ValueError, match="down"):
        expert_mlp(wide[0, :, :4], wide, wide, wide, counts)
