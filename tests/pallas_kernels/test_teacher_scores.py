"""Teacher scores: reference against a loop in float64, kernel against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import interpret
from pallas_kernels.geometry import BlockGeometry
from pallas_kernels.teacher_scores import teacher_scores

needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < interpret.MINIMUM_JAX, reason="Mosaic kernels need jax >= 0.11"
)


def _case(seed, *, tokens=6, kv_heads=1, group=2, head_dim=64, length=200, dtype=jnp.bfloat16):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    positions = np.sort(rng.integers(0, length, (1, tokens)))
    positions[0, 0] = 0
    return (
        normal(1, tokens, kv_heads * group, head_dim),
        normal(1, kv_heads, length, head_dim),
        jnp.asarray(positions, jnp.int32),
    )


@pytest.mark.parametrize(("fine_kernel", "fine_stride"), [(2, 1), (16, 8)])
def test_reference_against_a_loop(fine_kernel, fine_stride):
    q, keys, positions = _case(0, dtype=jnp.float32)
    with jax.default_matmul_precision("highest"):
        got = teacher_scores(
            q, keys, positions, geometry=BlockGeometry(), fine_kernel=fine_kernel,
            fine_stride=fine_stride, implementation="xla",
        )  # fmt: skip
    keys = np.asarray(keys, np.float64)[0, 0]
    count = (len(keys) - fine_kernel) // fine_stride + 1
    starts = np.arange(count) * fine_stride
    fine = np.stack([keys[s : s + fine_kernel].mean(0) for s in starts])
    ratio = 16 // fine_stride
    assert got.shape == (1, 1, 6, BlockGeometry().num_compressed(200))
    for t, position in enumerate(np.asarray(positions)[0]):
        visible = starts <= position
        s = np.asarray(q, np.float64)[0, t] @ fine.T / 8.0
        e = np.where(visible, np.exp(s), 0.0)
        mass = (e / e.sum(-1, keepdims=True)).sum(0)
        expected = [
            mass[max(0, ratio * i - 1) : ratio * i + ratio].max() for i in range(got.shape[3])
        ]
        np.testing.assert_allclose(got[0, 0, t], expected, atol=1e-5)


def test_a_grid_that_is_not_finer_is_refused():
    with pytest.raises(ValueError, match="fine_stride 16 is not below"):
        teacher_scores(*_case(0), geometry=BlockGeometry(), fine_kernel=32, fine_stride=16)


@needs_mosaic
@pytest.mark.parametrize("settings", [{"kv_heads": 2, "tokens": 4}])
def test_kernel_equals_reference(settings):
    case = _case(1, **settings)
    expected = teacher_scores(*case, geometry=BlockGeometry(), implementation="xla")
    with interpret.simulated():
        got = teacher_scores(*case, geometry=BlockGeometry(), implementation="mosaic")
        jax.block_until_ready(got)
    np.testing.assert_allclose(got, expected, atol=2e-5)


@needs_mosaic
def test_refuses_a_wide_window():
    geometry = BlockGeometry(64, 64, 32)
    with interpret.simulated(), pytest.raises(NotImplementedError, match="32 fine keys"):
        teacher_scores(*_case(1), geometry=geometry, implementation="mosaic")


@needs_mosaic
def test_lowers_for_cuda():
    from pallas_kernels.teacher_scores import mosaic

    case = _case(1, tokens=300, head_dim=128, length=600)
    call = functools.partial(
        mosaic.teacher_scores, fine=BlockGeometry(16, 2, 1), windows=36, scale=0.1
    )
    exported = jax.export.export(jax.jit(call), platforms=["cuda"])(*case)
    assert exported.mlir_module().count("mosaic_gpu") >= 2
