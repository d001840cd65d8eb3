"""The pool-attention kernels, simulated with race detection, and lowered for CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import interpret
from pallas_kernels.pool_attention import pool_attention
from pallas_kernels.pool_attention.tuning import RowsConfig, rows_config

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < interpret.MINIMUM_JAX, reason="Mosaic kernels need jax >= 0.11"
)

# bfloat16 softmax weights and output: 2^-9 relative, on average less.
TOLERANCE = 4e-3


def _operands(seed, *, t, g, h, p, z, r, e, b=1, k=1, bias=False, quantised=None, missing=False):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    ids = np.stack([rng.permutation(z)[:r] for _ in range(b * k)]).reshape(b, k, r)
    mask = rng.random((b, t, e)) < 0.6
    if missing:  # places without a slot, a KV head without any, a request that sees nothing
        ids[:, :, 1:4] = -1
        ids[:, 1:] = -1
        ids[1:], mask[1:] = -1, False
    slots, tail = normal(b, k, z, 2, p, h), normal(b, k, 2, e, h)
    # What is not named, or seen by no row, must not matter.
    for i, j in np.ndindex(b, k):
        slots[i, j, np.setdiff1d(np.arange(z), ids[i, j])] = np.nan
    if e:
        hidden = np.broadcast_to(~mask.any(1)[:, None, None], tail.shape[:4])
        tail[hidden] = np.nan
    biases = {"slot_bias": None, "tail_bias": None, "slot_scales": None}
    if bias:
        biases |= {
            "slot_bias": jnp.asarray(normal(b, k, z, p)),
            "tail_bias": jnp.asarray(normal(b, k, e)),
        }
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (normal(b, t, k * g, h), slots, tail)]
    if quantised:
        arrays[1], biases["slot_scales"] = _quantised(slots, quantised)
    return [arrays[0], arrays[1], jnp.asarray(ids, jnp.int32), arrays[2], jnp.asarray(mask)], biases


def _quantised(slots, dtype):
    """Slots of the dtype and their scales; what is not named holds garbage."""
    slots = np.nan_to_num(slots, nan=1e3)
    most = {"int8": 127, "float8_e4m3fn": 448}[dtype]
    scales = np.abs(slots).max(axis=(4, 5)) / most
    scaled = slots / scales[..., None, None]
    scaled = np.rint(scaled) if dtype == "int8" else scaled
    return jnp.asarray(scaled).astype(dtype), jnp.asarray(scales)


def _compare(operands, biases, config=None):
    from pallas_kernels.pool_attention import mosaic

    exact = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in operands]
    # The reference multiplies hidden values by 0.
    exact[3] = jnp.nan_to_num(exact[3])
    finite = dict(biases)
    if biases["slot_scales"] is None:
        exact[1] = jnp.nan_to_num(exact[1])
    else:
        finite["slot_scales"] = jnp.nan_to_num(biases["slot_scales"])
    expected, expected_lse = pool_attention(*exact, **finite, return_lse=True, implementation="xla")
    scale = operands[0].shape[3] ** -0.5

    def call(*args):
        return mosaic.pool_attention(*args, **biases, scale=scale, return_lse=True, config=config)

    with interpret.simulated():
        out, lse = jax.block_until_ready(jax.jit(call)(*operands))
    out, expected = np.asarray(out, np.float64), np.asarray(expected, np.float64)
    assert np.linalg.norm(out - expected) <= TOLERANCE * np.linalg.norm(expected)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-3)
    assert not out[np.isneginf(expected_lse)].any()


@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        (
            {"t": 1, "g": 8, "h": 64, "p": 64, "z": 7, "r": 5, "e": 64, "b": 2, "missing": True},
            None,
        ),
        # Several slots a tile, the last tile not full; a tail that is no whole tile; biases.
        ({"t": 1, "g": 3, "h": 64, "p": 16, "z": 12, "r": 9, "e": 37, "bias": True}, None),
        # Merged over two thread blocks.
        (
            {"t": 1, "g": 2, "h": 64, "p": 32, "z": 9, "r": 8, "e": 20, "missing": True},
            RowsConfig(splits=2, stages=2, warpgroups=2),
        ),
        ({"t": 1, "g": 1, "h": 128, "p": 128, "z": 4, "r": 3, "e": 0}, None),
        # Rows with masks of their own: few, merged in turns, and more than one wgmma holds.
        (
            {"t": 5, "g": 4, "h": 64, "p": 64, "z": 3, "r": 2, "e": 33},
            RowsConfig(splits=2, stages=1, warpgroups=2),
        ),
        # Quantised: one slot a tile and several, with the tail behind them in the same tile.
        (
            {"t": 1, "g": 3, "h": 64, "p": 64, "z": 7, "r": 5, "e": 70, "quantised": "int8"},
            RowsConfig(splits=2, stages=2, warpgroups=3),
        ),
        (
            {"t": 2, "g": 4, "h": 128, "p": 32, "z": 9, "r": 5, "e": 9, "k": 2, "bias": True}
            | {"quantised": "float8_e4m3fn", "missing": True},
            None,
        ),
        (
            {"t": 33, "g": 2, "h": 64, "p": 64, "z": 6, "r": 5, "e": 64, "k": 2, "bias": True}
            | {"missing": True},
            None,
        ),
        (
            {"t": 33, "g": 2, "h": 64, "p": 64, "z": 6, "r": 5, "e": 64, "missing": True},
            RowsConfig(splits=2, stages=2, warpgroups=2),
        ),
        (
            {"t": 33, "g": 2, "h": 64, "p": 32, "z": 9, "r": 7, "e": 65, "quantised": "int8"}
            | {"missing": True},
            None,
        ),
    ],
)
def test_equals_reference(sizes, config):
    operands, biases = _operands(len(sizes), **sizes)
    _compare(operands, biases, config)


@pytest.mark.parametrize(
    ("t", "p", "h", "g", "slots"),
    [
        (1, 16, 64, 1, "bfloat16"),
        (1, 64, 128, 16, "bfloat16"),
        (1, 128, 64, 7, "bfloat16"),
        (1, 64, 128, 16, "int8"),
        (1, 32, 64, 16, "float8_e4m3fn"),
        (32, 64, 128, 16, "bfloat16"),
        (32, 64, 128, 16, "float8_e4m3fn"),
        (32, 128, 128, 4, "bfloat16"),
    ],
)
def test_lowers_for_cuda(t, p, h, g, slots):
    from pallas_kernels.pool_attention import mosaic

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    operands = (
        shape(8, t, 2 * g, h),
        shape(8, 2, 104, 2, p, h, dtype=slots),
        shape(8, 2, 96, dtype=jnp.int32),
        shape(8, 2, 2, 64, h),
        shape(8, t, 64, dtype=jnp.bool_),
        None if slots == "bfloat16" else shape(8, 2, 104, 2, dtype=jnp.float32),
    )

    def call(*args):
        *args, scales = args
        return mosaic.pool_attention(
            *args, slot_bias=None, tail_bias=None, slot_scales=scales, scale=0.1, return_lse=True
        )

    jax.export.export(jax.jit(call), platforms=["cuda"])(*operands)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"p": 48}, "48 tokens"), ({"h": 96}, "head dim 96")],
)
def test_unsupported_shapes_raise(changes, message):
    sizes = {"t": 1, "g": 2, "h": 64, "p": 64, "z": 2, "r": 1, "e": 8} | changes
    operands, biases = _operands(1, **sizes)
    with interpret.simulated(), pytest.raises(NotImplementedError, match=message):
        pool_attention(*operands, **biases, implementation="mosaic")


def test_unsupported_dtype_raises():
    operands, biases = _operands(1, t=1, g=2, h=64, p=64, z=2, r=1, e=8)
    operands[1] = operands[1].astype(jnp.float32)
    with interpret.simulated(), pytest.raises(NotImplementedError, match="float32"):
        pool_attention(*operands, **biases, implementation="mosaic")


def test_quantised_slots_with_float16_queries_raise():
    operands, biases = _operands(1, t=1, g=2, h=64, p=64, z=2, r=1, e=8, quantised="int8")
    operands[0], operands[3] = operands[0].astype(jnp.float16), operands[3].astype(jnp.float16)
    with interpret.simulated(), pytest.raises(NotImplementedError, match="queries of float16"):
        pool_attention(*operands, **biases, implementation="mosaic")


def test_launches_saturate_the_memory():
    launches = {pairs: rows_config(pairs, 96, 64) for pairs in (2, 16, 64, 128)}
    assert [launch.splits for launch in launches.values()] == [8, 4, 1, 1]
    assert {launch.warpgroups for launch in launches.values()} == {3}
    assert rows_config(2, 8, 128) == RowsConfig(splits=2, stages=4, warpgroups=2)
