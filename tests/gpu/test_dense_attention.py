"""The fused (cuDNN) branch of the dense attention, which only exists on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.models.attention import dense_attention

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("lengths", [None, [200, 1, 137]])
def test_fused_equals_float32(head_dim, lengths):
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal((3, 200, heads, head_dim)), jnp.bfloat16)
        for heads in (8, 2, 2)
    )
    count = None if lengths is None else jnp.array(lengths, jnp.int32)
    fused = jax.jit(dense_attention)
    assert "cudnn" in fused.lower(q, k, v, count).as_text()
    ours = np.asarray(fused(q, k, v, count), np.float32)
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    with jax.default_matmul_precision("highest"):
        expected = np.asarray(jax.jit(dense_attention)(*wide, count))
    for row, length in enumerate(lengths or [200] * 3):
        error = np.linalg.norm(ours[row, :length] - expected[row, :length])
        assert error < 1e-2 * np.linalg.norm(expected[row, :length])
