import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import BlockGeometry
from pallas_kernels.compressed_keys import compress_keys, compress_latest

CASES = [
    "real_S31", "real_S32", "real_S47", "real_S79", "real_S95", "real_S300", "real_S1000",
    "small_S7", "small_S8", "small_S11", "small_S19", "small_S31", "small_S100",
    "small_batch2_mqa_S63", "real_gqa16_S300_bf16",
]  # fmt: skip


def geometry_of(params: dict) -> BlockGeometry:
    return BlockGeometry(
        params.get("block_size", params["kernel_stride"]),
        params["kernel_size"],
        params["kernel_stride"],
    )


@pytest.mark.parametrize("name", CASES)
def test_cases(load_case, name):
    params, a = load_case(f"selection/{name}")
    b, s = params["batch"], params["seq_len"]
    dtype = jnp.dtype(params["compute_dtype"])
    keys = a["k"].reshape(b, s, *a["k"].shape[1:]).transpose(0, 2, 1, 3)
    c = params["num_compressed_keys"]
    expected = a["compressed_k"].reshape(b, c, *a["k"].shape[1:]).transpose(0, 2, 1, 3)
    out = compress_keys(jnp.asarray(keys, dtype), geometry_of(params))
    assert out.shape == expected.shape
    assert out.dtype == dtype
    # bfloat16: float32 sums in another order may round to the neighbouring value.
    rtol = 2**-7 if dtype == jnp.bfloat16 else 0
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("name", ["incremental_small_S10", "incremental_real_S31"])
def test_incremental_cases(load_case, name):
    """A ring of the last kernel_size keys gives every compressed key in the step that ends it."""
    params, a = load_case(f"selection/{name}")
    geometry = geometry_of(params)
    kernel = geometry.kernel_size
    keys = jnp.asarray(a["k"])[None].transpose(0, 2, 1, 3)
    length = params["prefill_len"]
    compressed = [compress_keys(keys[:, :, :length], geometry)]
    ring = jnp.zeros((1, keys.shape[1], kernel, keys.shape[3]))
    for s in range(length):
        ring = ring.at[:, :, s % kernel].set(keys[:, :, s])
    for step in range(params["steps"]):
        position = length + step
        ring = ring.at[:, :, position % kernel].set(keys[:, :, position])
        if geometry.num_compressed(position + 1) > geometry.num_compressed(position):
            compressed.append(compress_latest(ring)[:, :, None])
        count = sum(x.shape[2] for x in compressed)
        assert count == a["num_ckeys"][step]
        assert position + 1 - geometry.kernel_stride * count == a["tail_len"][step]
    out = np.concatenate(compressed, axis=2)[0].transpose(1, 0, 2)
    np.testing.assert_allclose(out, a["compressed_k_final"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [(64, 32, 16), (16, 16, 16), (8, 12, 4)])
def test_against_float64(rng, dtype, sizes):
    geometry = BlockGeometry(*sizes)
    kernel, stride = sizes[1:]
    for length in (1, kernel - 1, kernel, kernel + stride - 1, kernel + stride, 100):
        x = jnp.asarray(rng.normal(size=(2, 3, length, 8)), dtype)
        out = jax.jit(compress_keys, static_argnums=1)(x, geometry)
        exact = np.asarray(x, np.float64)
        starts = [j for j in range(0, length, stride) if j + kernel <= length]
        means = [exact[:, :, j : j + kernel].mean(2) for j in starts]
        expected = np.stack(means, 2) if means else np.zeros((2, 3, 0, 8))
        assert out.shape == expected.shape
        tolerance = 2**-8 if dtype == "bfloat16" else 1e-6
        np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=tolerance, atol=1e-6)
        if starts:
            last = compress_latest(jnp.roll(x[:, :, starts[-1] : starts[-1] + kernel], 3, axis=2))
            np.testing.assert_allclose(
                np.asarray(last, np.float64), expected[:, :, -1], rtol=tolerance, atol=1e-6
            )


def test_bad_rank():
    with pytest.raises(ValueError, match=r"keys has shape \(3, 4\), expected \[B, K, S, H\]"):
        compress_keys(jnp.ones((3, 4)), BlockGeometry())
