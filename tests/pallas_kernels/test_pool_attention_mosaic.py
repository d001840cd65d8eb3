"""The pool-attention kernels, simulated with race detection, and lowered for CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import interpret
from pallas_kernels.pool_attention import pool_attention
from pallas_kernels.pool_attention.tuning import RowsConfig, splits_for

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < interpret.MINIMUM_JAX, reason="Mosaic kernels need jax >= 0.11"
)

# bfloat16 softmax weights and output: 2^-9 relative, on average less.
TOLERANCE = 4e-3


def _operands(seed, *, t, g, h, p, z, r, e, b=1, k=1, bias=False, quantised=None):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    ids = np.stack([rng.permutation(z)[:r] for _ in range(b * k)]).reshape(b, k, r)
    mask = rng.random((b, t, e)) < 0.6
    slots, tail = normal(b, k, z, 2, p, h), normal(b, k, 2, e, h)
    # What is not named, or seen by no row, must not matter.
    unnamed = np.setdiff1d(np.arange(z), ids)
    slots[:, :, unnamed] = np.nan
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


@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        ({"t": 1, "g": 8, "h": 64, "p": 64, "z": 7, "r": 5, "e": 64}, None),
        # Several slots a tile, the last tile not full; a tail that is no whole tile; biases.
        ({"t": 1, "g": 3, "h": 64, "p": 16, "z": 12, "r": 9, "e": 37, "bias": True}, None),
        # Merged over two thread blocks.
        (
            {"t": 1, "g": 2, "h": 64, "p": 32, "z": 9, "r": 8, "e": 20},
            RowsConfig(splits=2, stages=2),
        ),
        ({"t": 1, "g": 1, "h": 128, "p": 128, "z": 4, "r": 3, "e": 0}, None),
        # Rows with masks of their own: few, merged in turns, and more than one wgmma holds.
        (
            {"t": 5, "g": 4, "h": 64, "p": 64, "z": 3, "r": 2, "e": 33},
            RowsConfig(splits=2, stages=1),
        ),
        # Quantised: one slot a tile and several, with the tail behind them in the same tile.
        (
            {"t": 1, "g": 3, "h": 64, "p": 64, "z": 7, "r": 5, "e": 70, "quantised": "int8"},
            RowsConfig(splits=2, stages=2, warpgroups=3),
        ),
        (
            {"t": 2, "g": 4, "h": 128, "p": 32, "z": 9, "r": 5, "e": 9, "k": 2, "bias": True}
            | {"quantised": "float8_e4m3fn"},
            None,
        ),
        ({"t": 33, "g": 2, "h": 64, "p": 64, "z": 4, "r": 2, "e": 64, "k": 2, "bias": True}, None),
        ({"t": 33, "g": 2, "h": 64, "p": 32, "z": 9, "r": 7, "e": 65, "quantised": "int8"}, None),
    ],
)
def test_equals_reference(sizes, config):
    operands, biases = _operands(len(sizes), **sizes)
    _compare(operands, biases, config)


@pytest.mark.parametrize(
    ("t", "p", "quantised"), [(1, 64, None), (1, 32, None), (20, 64, None), (20, 64, "int8")]
)
def test_missing_slots(t, p, quantised):
    operands, biases = _operands(
        t + p, t=t, g=4, h=64, p=p, z=8, r=6, e=64, b=2, quantised=quantised
    )
    ids = np.array(operands[2])
    ids[0, 0, 1] = -1
    ids[0, 0, 4:] = -1
    ids[1] = -1
    operands[2] = jnp.asarray(ids)
    # Slots without a name hold NaN, also those that lost theirs.
    lost = [(b, slice(None), np.setdiff1d(np.arange(8), ids[b])) for b in range(2)]
    if quantised:
        for where in lost:
            biases["slot_scales"] = biases["slot_scales"].at[where].set(jnp.nan)
    else:
        for where in lost:
            operands[1] = operands[1].at[where].set(jnp.nan)
    _compare(operands, biases)


def test_nothing_visible_gives_zero():
    operands, biases = _operands(9, t=1, g=8, h=64, p=64, z=3, r=2, e=64)
    operands[2] = jnp.full_like(operands[2], -1)
    operands[4] = jnp.zeros_like(operands[4])
    with interpret.simulated():
        out, lse = jax.block_until_ready(
            pool_attention(*operands, **biases, return_lse=True, implementation="mosaic")
        )
    assert (np.asarray(out, np.float32) == 0).all()
    assert (np.asarray(lse) == -np.inf).all()


@pytest.mark.parametrize(
    ("t", "p", "h", "g", "slots"),
    [
        (1, 16, 64, 1, "bfloat16"),
        (1, 32, 128, 4, "bfloat16"),
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


def test_splits_fill_the_machine_once():
    assert splits_for(2, 96) == 8
    assert splits_for(16, 96) == 5
    assert splits_for(64, 96) == 2
    assert splits_for(128, 96) == 1
    assert splits_for(2, 8) == 2
