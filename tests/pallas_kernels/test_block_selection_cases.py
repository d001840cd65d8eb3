"""Selection against the reference cases, with the original's visibility rule and quirks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import BlockGeometry
from pallas_kernels.block_selection import select_blocks_forecast, select_blocks_multi_head
from pallas_kernels.block_selection.reference import (
    choose_blocks,
    forecast_scores,
    multi_head_scores,
    pool_scores,
)

CASES = [
    "real_S31", "real_S32", "real_S47", "real_S79", "real_S95", "real_S300", "real_S1000",
    "small_S7", "small_S8", "small_S11", "small_S19", "small_S31", "small_S100",
    "small_batch2_mqa_S63", "real_gqa16_S300_bf16",
]  # fmt: skip
RUNS = [(name, phase) for name in CASES for phase in ("prefill", "decode")]
RUNS.append(("full_params_decode_S7001", "decode"))
SELECT = {"multi_head": select_blocks_multi_head, "forecast": select_blocks_forecast}
# Selections are equal wherever no other one is closer than this (stated with the cases).
MARGIN = {"multi_head": 1e-5, "forecast": 1e-4}
# Sums of 16 probabilities, and dot products, of bfloat16 numbers, rounded to bfloat16.
BF16 = {"rtol": 2**-7, "atol": 2**-7}


def original_visible(t, params):
    """Compressed keys that the original's multi-head selector shows to prefill token t."""
    stride, c, s = params["kernel_stride"], params["num_compressed_keys"], params["seq_len"]

    def truncated(x):
        return np.trunc((x - stride + 1) / stride).astype(np.int64)

    return np.clip(truncated(t) + c - truncated(s), 0, c)


class Case:
    """One case and phase in our layouts; every array has batch first."""

    def __init__(self, params, a, phase):
        self.params, self.phase = params, phase
        self.geometry = BlockGeometry(
            params["block_size"], params["kernel_size"], params["kernel_stride"]
        )
        b, s, c = params["batch"], params["seq_len"], params["num_compressed_keys"]
        heads, head_dim = params["num_heads"], params["head_dim"]
        self.kv_heads = k = params["num_kv_heads"]
        self.dtype = jnp.dtype(params["compute_dtype"])
        q = a["q"].reshape(b, -1, heads, head_dim)
        forecast = a["forecast_q"]
        compressed = a["compressed_k"].reshape(b, c, k, head_dim).transpose(0, 2, 1, 3)
        position = np.broadcast_to(np.arange(s), (b, s))
        if phase == "decode":
            q, forecast, position = q[:, -1:], forecast[:, -1:], position[:, -1:]
            visible = {"multi_head": np.full((b, 1), c), "forecast": np.full((b, 1), c)}
        else:
            visible = {
                "multi_head": original_visible(position, params),
                "forecast": np.minimum(position // params["kernel_stride"] + 1, c),
            }
        self.query = {
            "multi_head": jnp.asarray(q, self.dtype),
            "forecast": jnp.asarray(forecast, self.dtype),
        }
        self.compressed = jnp.asarray(compressed, self.dtype)
        self.visible = {name: jnp.asarray(x, jnp.int32) for name, x in visible.items()}
        self.query_block = jnp.asarray(position // params["block_size"], jnp.int32)
        self.rules = {
            "init_blocks": params["init_blocks"],
            "local_blocks": params["local_blocks"],
            "budget": params["topk"],
            "mask_future": False,
        }
        self.arrays = a

    def query_shape(self, selector):
        """[B, K, T]."""
        b, t = self.query[selector].shape[:2]
        return b, self.kv_heads, t

    def expected(self, selector, name):
        """An array [G, B*T, X] of the case as [B, K, T, X]; None if the case has none."""
        middle = "_forecast_" if selector == "forecast" else "_"
        if selector == "multi_head" and name == "scores":
            name = "probs"
        x = self.arrays.get(f"{self.phase}{middle}{name}")
        if x is None:
            return None
        b, k, t = self.query_shape(selector)
        return x.reshape(k, b, t, *x.shape[2:]).swapaxes(0, 1)


@pytest.fixture(params=RUNS, ids=lambda run: "-".join(run), scope="module")
def case(request, load_case):
    name, phase = request.param
    return Case(*load_case(f"selection/{name}"), phase)


def padded(ids, width):
    return np.pad(ids, [(0, 0)] * 3 + [(0, width - ids.shape[3])], constant_values=-1)


@pytest.mark.parametrize("selector", ["multi_head", "forecast"])
def test_case(case, selector):
    expected = {
        name: case.expected(selector, name)
        for name in ("scores", "block_scores", "selected", "margin")
    }
    m = case.params["n_blocks"]
    if expected["selected"] is None:
        # Without any compressed key the case has no Forecast: there is one block, so take it.
        assert case.params["num_compressed_keys"] == 0
        expected["selected"] = np.zeros((*case.query_shape(selector), 1), np.int32)
        assert m == 1

    @jax.jit
    def compute(query, compressed, query_block, visible, given):
        scale = case.params["head_dim"] ** -0.5
        if selector == "multi_head":
            scores = multi_head_scores(query, compressed, visible, scale=scale)
        else:
            scores = forecast_scores(query, compressed, visible)
        select = SELECT[selector]
        selection = select(
            *(query, compressed, query_block, visible),
            num_blocks=m,
            geometry=case.geometry,
            **case.rules,
        )
        if given is None:
            return scores, selection, None, None
        pooled = pool_scores(given, num_blocks=m, geometry=case.geometry)
        return scores, selection, pooled, choose_blocks(pooled, query_block, **case.rules)

    with jax.default_matmul_precision("highest"):
        scores, selection, pooled, chosen = compute(
            case.query[selector],
            case.compressed,
            case.query_block,
            case.visible[selector],
            expected["scores"],
        )
    ids = padded(expected["selected"], case.params["topk"])
    bfloat16 = case.dtype == jnp.bfloat16
    if expected["scores"] is not None:  # real_S1000 keeps its selections only
        tolerance = BF16 if bfloat16 else {"rtol": 1e-5, "atol": 2e-5}
        np.testing.assert_allclose(scores, expected["scores"], **tolerance)
        # Pooling of the case's own scores and the choice from them are exact.
        free = np.isfinite(expected["block_scores"])
        np.testing.assert_allclose(pooled[free], expected["block_scores"][free], rtol=0, atol=1e-6)
        assert (pooled[expected["block_scores"] == -np.inf] == -np.inf).all()
        np.testing.assert_array_equal(chosen.ids, ids)

    same = (np.asarray(selection.ids) == ids).all(-1)
    if bfloat16:
        # Ties of bfloat16 scores are none of ours: most rows agree, no more can be asked for.
        assert same.mean() > 0.9
        return
    # No row of these cases is closer than the margin, so all must agree.
    assert expected["margin"] is None or (expected["margin"] > MARGIN[selector]).all()
    assert same.all()
    np.testing.assert_array_equal(selection.count, (ids >= 0).sum(-1))


def test_production_rule_only_adds_the_lost_block(load_case):
    """Where the original lost a slot to a future block, ours holds one block more."""
    case = Case(*load_case("selection/real_S1000"), "prefill")
    rules = {**case.rules, "mask_future": True}
    ours = jax.jit(
        lambda *args: select_blocks_forecast(
            *args, num_blocks=case.params["n_blocks"], geometry=case.geometry, **rules
        )
    )(case.query["forecast"], case.compressed, case.query_block, case.visible["forecast"])
    ids, theirs = np.asarray(ours.ids), case.expected("forecast", "selected")
    own = np.asarray(case.query_block)[:, None, :]
    np.testing.assert_array_equal(ours.count, np.minimum(own + 1, rules["budget"]) + 0 * ours.count)
    lost = np.asarray(ours.count) - (theirs >= 0).sum(-1)
    assert set(np.unique(lost)) == {0, 1}
    equal = (ids == theirs).all(-1)
    assert equal[lost == 0].all()
    for mine, other in zip(ids[lost == 1], theirs[lost == 1], strict=True):
        assert set(other[other >= 0]) < set(mine)
