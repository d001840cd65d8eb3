"""The distillation loss: equal to the published training code, whatever the chunks."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from pallas_kernels.compressed_keys import compress_keys
from sparda_jax.config import SparseConfig
from sparda_jax.forecast import loss as loss_module
from sparda_jax.forecast.divergence import (
    EPSILON,
    candidates,
    divergence,
    members,
    partition,
)
from sparda_jax.forecast.loss import LossConfig, forecast_loss
from sparda_jax.forecast.projection import Forecast
from sparda_jax.models import Decoder
from sparda_jax.models.rope import rope_at

CASES = ["fine_teacher_small", "fine_teacher_real_grid", "same_grid_teacher_small_b2"]
FUTURE = "grad.model.layers.{}.self_attn.q_future_proj.weight"
FIRST = "grad.model.layers.0.self_attn.q_curr_proj.weight"
# Stated with the cases.
GRADIENT = {"rtol": 1e-3, "atol": 1e-6}
SHARE = {"rtol": 1e-5, "atol": 2e-5}


@partial(jax.jit, static_argnames="config")
def value_and_grad(model, forecast, tokens, config):
    with jax.default_matmul_precision("highest"):
        loss = lambda forecast: forecast_loss(model, forecast, tokens, config)
        return jax.value_and_grad(loss, has_aux=True)(forecast)


def config_of(case, **changes):
    return LossConfig(
        case.sparse,
        teacher_kernel=case.params["training_kernel_size"],
        teacher_stride=case.params["training_kernel_stride"],
        mask_future=False,
        **changes,
    )


# In chunks that do not divide the tokens, and all tokens at once.
@pytest.mark.parametrize(
    ("name", "chunk_bytes"), [*((name, 15_000) for name in CASES), (CASES[0], 64 << 20)]
)
def test_equals_published_loss_and_gradients(load_case, name, chunk_bytes):
    case = load_case(f"training/{name}")
    tokens, a = jnp.asarray(case.arrays["input_ids"]), case.arrays
    config = config_of(case, chunk_bytes=chunk_bytes)
    (loss, output), gradient = value_and_grad(case.model, case.forecast, tokens, config)
    np.testing.assert_allclose(loss, a["loss_total"][0], rtol=1e-5)
    np.testing.assert_allclose(output.per_layer, a["loss_per_layer"], rtol=1e-5)
    np.testing.assert_allclose(gradient.first.kernel[...].T, a[FIRST], **GRADIENT)
    for index, layer in enumerate(gradient.layers):
        np.testing.assert_allclose(layer.kernel[...].T, a[FUTURE.format(index)], **GRADIENT)
    assert not np.any(gradient.layers[-1].kernel[...])
    assert np.abs(a[FIRST]).max() > 1e-3  # far above the tolerance


@pytest.mark.parametrize("name", CASES)
def test_equals_published_parts(load_case, name):
    """Teacher, routing set, prediction and both distributions of the first layer with data."""
    case = load_case(f"training/{name}")
    a, config, sparse = case.arrays, config_of(case), case.sparse
    index = 0 if "layer0.query_pred" in a else 1
    tokens = jnp.asarray(a["input_ids"])
    with jax.default_matmul_precision("highest"):
        q, keys, compressed, positions = layer_inputs(case, tokens, index, config)
        target = loss_module.teacher(config, q, keys, compressed, positions)
        pooled = loss_module.by_block(config, target, tokens.shape[1])
        ids = loss_module.routing(config, pooled, positions)
        queries = jnp.asarray(a[f"layer{index}.query_pred"])
        visible = sparse.geometry.started_windows(positions)
        scores = loss_module.predict(queries, compressed, visible)
        share = jax.nn.softmax(scores / np.sqrt(q.shape[-1]), axis=-1)
        blocks = -(-tokens.shape[1] // sparse.geometry.block_size)
        chosen = members(ids, blocks)
        free = candidates(sparse, chosen, positions)
        per_block = sparse.geometry.strides_per_block
        windows = jnp.repeat(free, per_block, axis=-1)[..., : share.shape[-1]]
        slots = ids.shape[-1] * per_block
        parts = [partition(x, windows, slots) for x in (target, share)]
        kl = divergence(target, share, windows, slots).sum((1, 2))
    aligned = a.get(f"layer{index}.teacher_aligned")
    aligned = a[f"layer{index}.teacher_fine"] if aligned is None else aligned
    np.testing.assert_allclose(target, aligned, **SHARE)
    if f"layer{index}.pred_probs" in a:
        np.testing.assert_allclose(share, a[f"layer{index}.pred_probs"], **SHARE)
    assert a[f"layer{index}.routing_margin"].min() > 1e-5
    chosen = a[f"layer{index}.selected"]  # [KV head, batch * token, R]
    batch, count = tokens.shape
    chosen = chosen.reshape(-1, batch, count, chosen.shape[-1]).swapaxes(0, 1)
    np.testing.assert_array_equal(ids, chosen)
    for part, name in zip(parts, ("target_dist", "pred_dist"), strict=True):
        ours = in_slots(ids, sparse, *map(np.asarray, part))
        np.testing.assert_allclose(ours, a[f"layer{index}.{name}"], **SHARE)
    np.testing.assert_allclose(kl, a[f"layer{index}.kl_sum"], rtol=1e-5)


def in_slots(ids, sparse, kept, rest, total):
    """The windows of the selected blocks one after the other, then the rest, as the case has it."""
    per_block = sparse.geometry.strides_per_block
    window = np.repeat(np.asarray(ids) * per_block, per_block, axis=-1)
    window = window + np.tile(np.arange(per_block), ids.shape[-1])
    inside = np.take_along_axis(kept, np.clip(window, 0, kept.shape[-1] - 1), axis=-1)
    inside = np.maximum(np.where(window < 0, 0, inside), EPSILON)
    return np.concatenate([inside, rest], axis=-1) / total


def layer_inputs(case, tokens, index, config):
    """Queries and keys of one layer, the layers before it attending what the teacher selects."""
    from pallas_kernels.block_sparse_attention import block_sparse_attention
    from sparda_jax.sparse.infllm_v2 import to_blocks

    model, geometry = case.model, case.sparse.geometry
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    rope = rope_at(model.config.rope, positions, model.config.max_position_embeddings)
    x = model.embed(tokens)
    for number, layer in enumerate(model.layers):
        q, k, v = layer.qkv(x, *rope)
        keys = k.transpose(0, 2, 1, 3)
        compressed = compress_keys(keys, geometry)
        if number == index:
            return q, keys, compressed, positions
        target = loss_module.teacher(config, q, keys, compressed, positions)
        pooled = loss_module.by_block(config, target, tokens.shape[1])
        ids = loss_module.routing(config, pooled, positions)
        kv = to_blocks(k, v, geometry.block_size)
        x = layer.finish(x, block_sparse_attention(q, kv, ids, positions))
    raise AssertionError(index)


def tokens_of(count, batch=2):
    return jnp.asarray(np.random.default_rng(3).integers(0, 40, (batch, count)), jnp.int32)


def test_gradient_equals_differences(tiny_config, tiny_sparse):
    """Blocks, of which no reference case tells; along the gradient, since maxima have kinks."""
    model, forecast, tokens = (
        Decoder.random(tiny_config),
        Forecast.random(tiny_config),
        tokens_of(120),
    )
    config = LossConfig(tiny_sparse, target="blocks", chunk_bytes=1 << 15)
    (loss, _), gradient = value_and_grad(model, forecast, tokens, config)
    size, step = float(optax.tree.norm(gradient)), 5e-2
    moved = lambda s: jax.tree.map(lambda p, g: p + s * g / size, forecast, gradient)
    ahead, back = (value_and_grad(model, moved(s), tokens, config)[0][0] for s in (step, -step))
    assert loss > 0 and size > 0
    np.testing.assert_allclose((ahead - back) / (2 * step), size, rtol=0.03)


def test_blocks_target_of_some_tokens_is_its_formula(tiny_config, tiny_sparse):
    """Layer 0 in float64; every fifth token, in chunks that do not divide them."""
    model, forecast, tokens = (
        Decoder.random(tiny_config),
        Forecast.random(tiny_config),
        tokens_of(131),
    )
    sparse = dataclasses.replace(tiny_sparse, local_blocks=2, budget_blocks=6)
    config = LossConfig(sparse, target="blocks", query_every=5, chunk_bytes=1 << 15)
    (loss, output), gradient = value_and_grad(model, forecast, tokens, config)
    np.testing.assert_allclose(loss, output.per_layer.sum(), rtol=1e-6)
    total, picked = 0.0, range(4, 131, 5)
    positions = jnp.broadcast_to(jnp.arange(131), (2, 131))
    with jax.default_matmul_precision("highest"):
        x, layer = model.embed(tokens), model.layers[0]
        cos, sin = rope_at(model.config.rope, positions, 256)
        q, k, _ = layer.qkv(x, cos, sin)
        means = compress_keys(k.transpose(0, 2, 1, 3), tiny_sparse.geometry)
        f = forecast.first(layer.attention_norm(x), cos, sin)
    q, k, means, f = (np.asarray(a, np.float64) for a in (q, k, means, f))
    for b, t, h in np.ndindex(2, len(picked), 2):
        at = picked[t]
        weights = np.exp(q[b, at, 2 * h : 2 * h + 2] @ k[b, : at + 1, h].T / np.sqrt(8))
        mass = (weights / weights.sum(1, keepdims=True)).mean(0)
        free = range(1, at // 16 - 1 - t % 2)  # a leading block, one or two local, and the own
        if not free:
            continue
        m = np.array([mass[16 * j : 16 * j + 16].sum() for j in free])
        windows = means[b, h] @ f[b, at, h] / np.sqrt(8)
        s = np.array([windows[4 * j - 1 : 4 * j + 4].max() for j in free])
        share = np.exp(s) / np.exp(s).sum()
        total += (m * np.log(m / m.sum() / share)).sum()
    np.testing.assert_allclose(output.per_layer[0], total / (2 * 2 * len(picked)), rtol=1e-4)
    assert total > 0.1 and np.any(gradient.first.kernel[...])


def test_lookahead_is_the_layer_whose_state_is_read(tiny_config, tiny_sparse):
    """Layer 1's norm at zero: no keys to score there, and nothing to learn for who reads it."""
    model, forecast, tokens = (
        Decoder.random(tiny_config),
        Forecast.random(tiny_config),
        tokens_of(90),
    )
    blind = jax.tree.map(lambda p: p, model)
    blind.layers[1].attention_norm.scale[...] *= 0
    for lookahead, idle in ((1, [1, 2]), (2, [1])):
        config = LossConfig(tiny_sparse, lookahead=lookahead)
        _, gradient = value_and_grad(blind, forecast, tokens, config)
        zero = [i for i in range(3) if not np.any(gradient.for_layer(i).kernel[...])]
        assert zero == idle


def test_only_the_projections_get_a_gradient(tiny_config, tiny_sparse):
    model, forecast = Decoder.random(tiny_config), Forecast.random(tiny_config)
    loss = lambda model: forecast_loss(model, forecast, tokens_of(40), LossConfig(tiny_sparse))[0]
    gradient = jax.jit(nnx.grad(loss))(model)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradient))


def test_recall_is_one_where_everything_is_selected(tiny_config, tiny_sparse):
    model, forecast = Decoder.random(tiny_config), Forecast.random(tiny_config)
    tokens = tokens_of(120)
    loss = partial(jax.jit(forecast_loss, static_argnums=3), model, forecast, tokens)
    _, everything = loss(LossConfig(tiny_sparse.with_all_blocks(120)))
    assert everything.free.min() > 0 and float(everything.recall) == 1.0
    _, untrained = loss(LossConfig(tiny_sparse))
    # By chance: one free block (budget 4, 3 forced) of at most 5.
    assert 0.1 < float(untrained.recall) < 0.9


def test_memory_has_no_square_of_the_length(tiny_config, tiny_sparse):
    """Temporaries of the compiled gradient grow with the length, not with its square."""
    model, forecast = (
        jax.eval_shape(lambda c=c: c.random(tiny_config)) for c in (Decoder, Forecast)
    )
    config = LossConfig(tiny_sparse, chunk_bytes=1 << 18)

    def temporaries(count):
        step = lambda f, m, t: jax.grad(
            lambda f: forecast_loss(m, f, t, config, max_length=count)[0]
        )(f)
        tokens = jax.ShapeDtypeStruct((1, count), jnp.int32)
        return (
            jax.jit(step)
            .lower(forecast, model, tokens)
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
        )

    short, long = temporaries(4096), temporaries(16384)
    assert long < 5 * short
    assert long < 16384 * 16384  # a byte per pair would be more


def test_refusals(tiny_config, tiny_sparse):
    model, forecast = Decoder.random(tiny_config), Forecast.random(tiny_config)
    with pytest.raises(ValueError, match="windows of 7 tokens: at least 8"):
        forecast_loss(model, forecast, tokens_of(7), LossConfig(tiny_sparse))
    with pytest.raises(ValueError, match=r"windows of 300 tokens: .* at most 256"):
        forecast_loss(model, forecast, tokens_of(300), LossConfig(tiny_sparse))
    with pytest.raises(ValueError, match="lookahead must be at least 1, got 0"):
        LossConfig(tiny_sparse, lookahead=0)
    with pytest.raises(ValueError, match="query_every must be at least 1, got 0"):
        LossConfig(tiny_sparse, query_every=0)
    with pytest.raises(ValueError, match="target must be 'windows' or 'blocks', got 'words'"):
        LossConfig(tiny_sparse, target="words")
    for grid in ((8, 3), (16, 8), (4, 4), (2, 0)):
        with pytest.raises(ValueError, match="teacher grid"):
            LossConfig(tiny_sparse, *grid)
    LossConfig(SparseConfig(), 32, 16)
