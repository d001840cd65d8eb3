"""Teacher scores on a GPU, against the reference in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.geometry import BlockGeometry
from pallas_kernels.teacher_scores import teacher_scores

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("tokens", "kv_heads", "group", "head_dim", "length", "kernel", "stride"),
    [(300, 2, 16, 128, 5000, 2, 1), (70, 3, 3, 64, 1000, 8, 4), (1, 1, 1, 64, 40, 2, 1)],
)
def test_equals_reference(tokens, kv_heads, group, head_dim, length, kernel, stride):
    rng = np.random.default_rng(tokens)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    arguments = (
        normal(2, tokens, kv_heads * group, head_dim),
        normal(2, kv_heads, length, head_dim),
        jnp.asarray(np.sort(rng.integers(0, length, (2, tokens))), jnp.int32),
    )
    options = {"geometry": BlockGeometry(), "fine_kernel": kernel, "fine_stride": stride}
    run = jax.jit(lambda *a: teacher_scores(*a, **options, implementation="mosaic"))
    jax.block_until_ready(jnp.full((64, 2**20), jnp.nan)).delete()
    got = np.asarray(run(*arguments), np.float64)
    with jax.default_matmul_precision("highest"):
        reference = jax.jit(lambda *a: teacher_scores(*a, **options, implementation="xla"))
        expected = np.asarray(reference(*arguments), np.float64)
    # XLA may leave out the rounding of the reference's fine keys to bfloat16 (2e-3 each).
    assert np.linalg.norm(got - expected) < 3e-3 * np.linalg.norm(expected)
    assert (np.asarray(run(*arguments)) == got).all()
