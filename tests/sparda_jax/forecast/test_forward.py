"""SparDA mode on whole sequences: equal to the published model, and to itself in other phases."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.config import SparseConfig
from sparda_jax.forecast.forward import sparda_forward, sparda_logits
from sparda_jax.forecast.projection import Forecast
from sparda_jax.models import Decoder
from sparda_jax.models.rope import rope_at

LOGITS = {"atol": 2e-4, "rtol": 1e-4}  # stated with the cases


@partial(jax.jit, static_argnames=("sparse", "forecast_prompt", "mask_future"))
def forward(model, forecast, tokens, **options):
    with jax.default_matmul_precision("highest"):
        return sparda_forward(model, forecast, tokens, **options)


@pytest.mark.parametrize(
    ("name", "mode"),
    [("small_b2", "sparda"), ("real_grid_b1", "sparda"), ("small_b2", "sparda_decode_only")],
)
def test_equals_published_model(load_case, name, mode):
    case = load_case(f"forecast/{name}")
    tokens = jnp.asarray(case.arrays["input_ids"])
    batch, prompt = len(tokens), case.params["prefill_len"]
    logits, ids = forward(
        *(case.model, case.forecast, tokens),
        sparse=case.sparse,
        prompt_lengths=jnp.full((batch,), prompt, jnp.int32),
        forecast_prompt=mode == "sparda",
        mask_future=mode != "sparda",
    )
    prefill = "sparse" if mode == "sparda_decode_only" else mode
    # Published rows are packed: [layer, KV head, batch * token, R].
    packed = np.asarray(ids[:, :, :, :prompt].transpose(0, 2, 1, 3, 4))
    packed = packed.reshape(*packed.shape[:2], batch * prompt, -1)
    chosen = case.arrays[f"{prefill}_prefill_selected"]
    assert case.arrays[f"{prefill}_prefill_margin"].min() > 1e-5  # so all ids must be equal
    np.testing.assert_array_equal(packed, chosen)
    np.testing.assert_allclose(
        logits[:, :prompt], case.arrays[f"{prefill}_prefill_logits"], **LOGITS
    )
    decoded = np.asarray(ids[:, :, :, prompt:]).transpose(3, 0, 2, 1, 4)
    chosen = case.arrays[f"{mode}_decode_selected"]  # [step, layer, KV head, batch, R]
    np.testing.assert_array_equal(decoded[..., : chosen.shape[-1]], chosen)
    expected = case.arrays[f"{mode}_decode_logits"].transpose(1, 0, 2)
    np.testing.assert_allclose(logits[:, prompt:], expected, **LOGITS)


@pytest.mark.parametrize("name", ["small_b2", "real_grid_b1"])
def test_our_rule_never_loses_a_block_to_the_future(load_case, name):
    case = load_case(f"forecast/{name}")
    tokens = jnp.asarray(case.arrays["input_ids"])
    theirs, ours = (
        np.asarray(forward(*(case.model, case.forecast, tokens), sparse=case.sparse,
                           mask_future=mask)[1])
        for mask in (False, True)
    )  # fmt: skip
    budget, size = case.sparse.budget_blocks, case.sparse.geometry.block_size
    full = np.minimum(np.arange(tokens.shape[1]) // size + 1, budget)
    np.testing.assert_array_equal((ours >= 0).sum(-1), np.broadcast_to(full, ours.shape[:4]))
    lost = (theirs >= 0).sum(-1) < full
    assert lost[0].any()  # the quirk is in the data
    # Layer 0 sees the same keys in both: there, ours is theirs and perhaps one block more.
    kept = (theirs[0][..., :, None] == ours[0][..., None, :]) | (theirs[0] < 0)[..., None]
    assert kept.any(-1).all()


def test_queries_equal_published_ones(load_case):
    case = load_case("forecast/small_b2")
    tokens = jnp.asarray(case.arrays["input_ids"])[:, : case.params["prefill_len"]]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    limit = case.model.config.max_position_embeddings
    with jax.default_matmul_precision("highest"):
        rope = rope_at(case.model.config.rope, positions, limit)
        normed = case.model.layers[0].attention_norm(case.model.embed(tokens))
        first, future = case.forecast.first(normed, *rope), case.forecast.layers[0](normed, *rope)
    np.testing.assert_allclose(first, case.arrays["sparda_curr_q"], **LOGITS)
    np.testing.assert_allclose(future, case.arrays["sparda_forecast_q"][0], **LOGITS)
    assert case.forecast.for_layer(0) is case.forecast.first
    assert case.forecast.for_layer(2) is case.forecast.layers[1]


def tokens_of(count, batch=2):
    return jnp.asarray(np.random.default_rng(3).integers(0, 40, (batch, count)), jnp.int32)


def test_where_the_prompt_ends_changes_nothing(tiny_config, tiny_sparse):
    """Windows that a decode step does not see yet lie in blocks that are forced."""
    model, forecast = Decoder.random(tiny_config), Forecast.random(tiny_config)
    tokens = tokens_of(150)
    whole = forward(model, forecast, tokens, sparse=tiny_sparse)
    for ends in ([1, 150], [97, 60], [128, 127]):
        ends = jnp.array(ends, jnp.int32)
        other = forward(model, forecast, tokens, sparse=tiny_sparse, prompt_lengths=ends)
        np.testing.assert_array_equal(other[1], whole[1])
        np.testing.assert_array_equal(other[0], whole[0])


def test_all_blocks_selected_is_dense(tiny_config, tiny_sparse):
    model, forecast = Decoder.random(tiny_config), Forecast.random(tiny_config)
    tokens, lengths = tokens_of(100), jnp.array([100, 61], jnp.int32)
    valid = np.arange(100) < np.asarray(lengths)[:, None]
    dense = jax.jit(lambda m, t, lengths: m(t, lengths=lengths))(model, tokens, lengths)
    call = partial(forward, model, forecast, tokens, lengths=lengths)
    everything, _ = call(sparse=tiny_sparse.with_all_blocks(100))
    np.testing.assert_allclose(everything[valid], dense[valid], atol=2e-5)
    short, _ = call(sparse=dataclasses.replace(tiny_sparse, dense_len=80))
    np.testing.assert_allclose(short[1, :61], dense[1, :61], atol=2e-5)
    chosen, _ = call(sparse=tiny_sparse)
    assert np.abs(np.asarray(chosen - dense)[valid]).max() > 1e-3
    np.testing.assert_allclose(short[0], chosen[0], atol=2e-5)


def test_values_past_the_length_do_not_leak(tiny_config, tiny_sparse):
    model, forecast = Decoder.random(tiny_config), Forecast.random(tiny_config)
    tokens, lengths = tokens_of(100), jnp.array([100, 61], jnp.int32)
    other = tokens.at[1, 61:].set(39 - tokens[1, 61:])
    ours, theirs = (
        forward(model, forecast, t, sparse=tiny_sparse, lengths=lengths)[0][1, :61]
        for t in (tokens, other)
    )
    np.testing.assert_array_equal(ours, theirs)


def test_refusals(tiny_config, tiny_sparse):
    model, forecast = Decoder.random(tiny_config), Forecast.random(tiny_config)
    call = partial(sparda_logits, model, forecast, tokens_of(20))
    with pytest.raises(ValueError, match=r"needs local_blocks >= 1 .* got 0"):
        call(sparse=dataclasses.replace(tiny_sparse, local_blocks=0))
    with pytest.raises(ValueError, match="20 tokens exceed the maximum length of 10"):
        call(sparse=tiny_sparse, max_length=10)
    late = dataclasses.replace(tiny_sparse, dense_len=50)
    with pytest.raises(NotImplementedError, match="dense_len 50"):
        call(sparse=late, prompt_lengths=jnp.array([5, 5]))


def test_wide_windows_need_more_local_blocks(tiny_config):
    from pallas_kernels.geometry import BlockGeometry
    from sparda_jax.sparse.forecast import check_lookahead

    wide = SparseConfig(BlockGeometry(16, 48, 8), local_blocks=2)
    with pytest.raises(ValueError, match="local_blocks >= 3 with windows of 48 tokens, got 2"):
        check_lookahead(wide)
    check_lookahead(dataclasses.replace(wide, local_blocks=3))
