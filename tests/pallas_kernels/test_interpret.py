"""The simulator wrapper itself, on two minimal kernels: one right, one with a race."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import interpret

needs_simulator = pytest.mark.skipif(
    jax.__version_info__ < interpret.MINIMUM_JAX or len(jax.devices("cpu")) != 1,
    reason="the simulator needs jax >= 0.11 and exactly one CPU device",
)


def copy_kernel(x, *, wait: bool):
    """Copies x through shared memory; without the wait the read races with the copy."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(x_ref, out_ref, smem, barrier):
        plgpu.copy_gmem_to_smem(x_ref, smem, barrier)
        if wait:
            plgpu.barrier_wait(barrier)
        out_ref[...] = smem[...]
        if not wait:
            plgpu.barrier_wait(barrier)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()],
    )(x)


@needs_simulator
def test_a_right_kernel_passes():
    x = jnp.arange(128, dtype=jnp.float32)
    with interpret.simulated():
        assert interpret.is_active()
        np.testing.assert_array_equal(copy_kernel(x, wait=True), x)
    assert not interpret.is_active()


@needs_simulator
def test_a_race_is_an_error_even_if_a_right_kernel_follows(capfd):
    x = jnp.arange(128, dtype=jnp.float32)
    with pytest.raises(RuntimeError, match="data race"), interpret.simulated():
        jax.block_until_ready(copy_kernel(x, wait=False))
        jax.block_until_ready(copy_kernel(x, wait=True))
    with interpret.simulated():
        np.testing.assert_array_equal(copy_kernel(x, wait=True), x)


@pytest.mark.skipif(jax.__version_info__ >= interpret.MINIMUM_JAX, reason="only for older jax")
def test_older_jax_is_refused():
    with pytest.raises(NotImplementedError, match=r"need jax >= 0\.11"), interpret.simulated():
        pass
