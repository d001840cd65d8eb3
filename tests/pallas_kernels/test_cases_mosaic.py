"""The reference cases through the kernels: on a GPU all, else some, simulated with race detection.

The cases are float32 with heads of 8 or 16 numbers; the kernels get them as bfloat16, zeros up to
64.  Attention is held against the case itself; selection against the reference on the same
rounded data, since rounding decides near ties (the reference is held against the cases).
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import BlockGeometry, interpret
from pallas_kernels.block_selection import select_blocks_forecast, select_blocks_multi_head
from pallas_kernels.block_sparse_attention import block_sparse_attention
from pallas_kernels.pool_attention import pool_attention

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < interpret.MINIMUM_JAX, reason="Mosaic kernels need jax >= 0.11"
)

TOKENS = 8


def kernels():
    """Where the kernels run."""
    on_gpu = jax.default_backend() == "gpu"
    return contextlib.nullcontext() if on_gpu else interpret.simulated()


def on_gpu(*values):
    """Arguments of a test that is slow to simulate and shows no branch that others do not."""
    return pytest.param(*values, marks=pytest.mark.gpu)


def widened(x):
    """bfloat16, the last axis filled up to 64."""
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 64 - x.shape[-1])])
    return jnp.asarray(x, jnp.bfloat16)


def close(out, expected):
    """Inputs rounded to bfloat16 move the result by so much."""
    out = np.asarray(out[..., : expected.shape[-1]], np.float64)
    return np.linalg.norm(out - expected) < 1e-2 * np.linalg.norm(expected)


def in_blocks(keys, values, p):
    """[K, M, 2, P, H] of tokens [S, K, H]."""
    tokens = np.pad(np.stack([keys, values], 2), [(0, -len(keys) % p)] + [(0, 0)] * 3)
    return tokens.reshape(-1, p, *tokens.shape[1:]).transpose(2, 0, 3, 1, 4)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("prefill_b16_S77_bias", TOKENS),
        on_gpu("prefill_b16_S50_mqa_empty_row", 50),
        on_gpu("prefill_b64_S300", 300),
        on_gpu("prefill_b16_S77_bias", 77),
        on_gpu("prefill_b16_S100", 100),
    ],
)
def test_prefill_attention(load_case, name, tokens):
    params, a = load_case(f"sparse_attention/{name}")
    p, s = params["block_size"], params["seq_len"]
    kv = in_blocks(a["k"], a["v"], p)
    bias, expected, expected_lse = None, a["out"], a["lse"]
    if "bias" in a:
        bias = np.pad(a["bias"], [(0, kv.shape[1] * p - s), (0, 0)])
        bias = jnp.asarray(bias.reshape(-1, p, bias.shape[1]).transpose(2, 0, 1))[None]
        expected, expected_lse = a["out_biased"], None
    with kernels():
        out, lse = block_sparse_attention(
            widened(a["q"][None, -tokens:]), widened(kv[None]),
            jnp.asarray(a["selected"][None, :, -tokens:]),
            jnp.arange(s - tokens, s, dtype=jnp.int32)[None],
            scale=params["scale"], key_bias=bias, return_lse=True, implementation="mosaic",
        )  # fmt: skip
        jax.block_until_ready(out)
    assert close(out[0], expected[-tokens:])
    if expected_lse is not None:
        np.testing.assert_allclose(lse[0], expected_lse[-tokens:], atol=3e-2)


@pytest.mark.parametrize("name", [on_gpu("decode_b16"), "decode_b64_gqa16"])
def test_decode_attention(load_case, name):
    """Whole blocks in slots, the last block as the tail."""
    params, a = load_case(f"sparse_attention/{name}")
    p, lens, starts = params["block_size"], params["lens"], a["cu_seqlens_k"]
    m = max(-(-n // p) for n in lens)
    parts = [slice(start, start + n) for start, n in zip(starts, lens, strict=False)]
    kv = [in_blocks(a["k"][part], a["v"][part], p) for part in parts]
    kv = np.stack([np.pad(x, [(0, 0), (0, m - x.shape[1])] + [(0, 0)] * 3) for x in kv])
    last = (np.asarray(lens) - 1) // p
    selected = a["selected"].swapaxes(0, 1)
    slot_ids = np.where(selected != last[:, None, None], selected, -1)
    mask = np.arange(p) <= (np.asarray(lens) - 1 - last * p)[:, None, None]
    with kernels():
        out, lse = pool_attention(
            widened(a["q"][:, None]), widened(kv), jnp.asarray(slot_ids, jnp.int32),
            widened(kv[np.arange(len(lens)), :, last]), jnp.asarray(mask),
            scale=params["scale"], return_lse=True, implementation="mosaic",
        )  # fmt: skip
        jax.block_until_ready(out)
    assert close(out[:, 0], a["out"])
    np.testing.assert_allclose(lse[:, 0], a["lse"], atol=3e-2)


@pytest.mark.parametrize(
    ("name", "selector", "tokens"),
    [
        on_gpu("full_params_decode_S7001", "multi_head", 1),
        on_gpu("full_params_decode_S7001", "forecast", 1),
        ("small_S100", "forecast", 1),
        ("real_S32", "multi_head", 1),  # a single compressed key
        *(
            on_gpu(name, selector, tokens)
            for name, tokens in (
                [("real_S1000", 1000), ("real_gqa16_S300_bf16", 300), ("small_batch2_mqa_S63", 63)]
                + [(f"real_S{s}", s) for s in (31, 32, 47, 79, 95, 300)]
                + [(f"small_S{s}", s) for s in (7, 8, 11, 19, 31, 100)]
            )
            for selector in ("forecast", "multi_head")
        ),
    ],
)
def test_selection(load_case, name, selector, tokens):
    params, a = load_case(f"selection/{name}")
    b, s, c, k, h = (
        params[n] for n in ("batch", "seq_len", "num_compressed_keys", "num_kv_heads", "head_dim")
    )
    geometry = BlockGeometry(*(params[n] for n in ("block_size", "kernel_size", "kernel_stride")))
    queries = a["q"].reshape(b, -1, params["num_heads"], h)
    queries = queries if selector == "multi_head" else a["forecast_q"]
    positions = np.broadcast_to(np.arange(s - tokens, s), (b, tokens))
    windows = geometry.complete_windows if selector == "multi_head" else geometry.started_windows
    compressed = a["compressed_k"].reshape(b, c, k, h).transpose(0, 2, 1, 3)
    arguments = (
        widened(queries[:, -tokens:]),
        widened(compressed),
        jnp.asarray(positions // geometry.block_size, jnp.int32),
        jnp.asarray(np.minimum(windows(positions), c), jnp.int32),
    )
    rules = {
        "num_blocks": params["n_blocks"],
        "geometry": geometry,
        "init_blocks": params["init_blocks"],
        "local_blocks": params["local_blocks"],
        "budget": params["topk"],
    }
    select = select_blocks_forecast
    if selector == "multi_head":
        select, rules["scale"] = select_blocks_multi_head, h**-0.5
    expected = select(*arguments, **rules, implementation="xla")
    with kernels():
        got = jax.block_until_ready(select(*arguments, **rules, implementation="mosaic"))
    np.testing.assert_array_equal(got.ids, expected.ids)
    np.testing.assert_array_equal(got.count, expected.count)
