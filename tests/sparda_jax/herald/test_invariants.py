"""What must hold whatever the model says: equal to dense, isolated, exact, deterministic."""

from __future__ import annotations

import dataclasses
import random
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from host_offload.cpu_selection import CpuSelector, SelectionRule
from host_offload.retrieval import Retrieval, Span, Staging
from sparda_jax.config import DiffusionConfig, MoeConfig
from sparda_jax.diffusion.config import DenoiseParams
from sparda_jax.diffusion.generate import BlockEngine
from sparda_jax.diffusion.masks import block_causal_mask
from sparda_jax.diffusion.plan import BlockEngineConfig
from sparda_jax.engine.scheduler import Scheduler
from sparda_jax.engine.service import SchedulerConfig
from sparda_jax.herald import forward
from sparda_jax.herald.config import MODES, Budget
from sparda_jax.herald.engine import HeraldEngine
from sparda_jax.herald.requests import Request
from sparda_jax.herald.session import HeraldSession
from sparda_jax.models.attention import masked_attention
from sparda_jax.models.moe import MoE
from sparda_jax.models.rope import rope_at

from .conftest import (
    LAYERS,
    LENGTHS,
    RULE,
    SAMPLING,
    VOCABULARY,
    WIDTH,
    cache_rows,
    make_model,
    make_prompts,
    run,
    settings,
)


@pytest.fixture(scope="module", autouse=True)
def exact_products():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts()


@pytest.fixture(scope="module")
def dense_tokens(base, prompts) -> list[list[int]]:
    """By the block engine, which knows nothing of pools."""
    config = BlockEngineConfig(kv_block=WIDTH, prefill_chunk=32)
    results, _ = BlockEngine(base.model, config=config).generate(prompts, SAMPLING, RULE)
    return [result.tokens for result in results]


@pytest.fixture(scope="module")
def herald(base, prompts):
    """A small budget, where what is chosen matters."""
    return run(base, prompts)


@pytest.mark.parametrize("mode", MODES)
def test_all_rows_give_dense_tokens(base, prompts, dense_tokens, mode):
    engine = base.with_config(settings(mode=mode))
    found = run(engine, prompts)
    assert found.tokens == dense_tokens
    assert found.report.effective_share == pytest.approx(1.0)
    assert (found.report.host_kv_bytes > 0) == MODES[mode].offload


def test_few_rows_change_the_tokens(dense_tokens, herald):
    """Or the tests below would prove nothing."""
    assert herald.tokens != dense_tokens
    assert [len(tokens) for tokens in herald.tokens] == [SAMPLING.max_new_tokens] * 3
    assert 0.2 < herald.report.effective_share < 0.9


def test_host_rows_are_the_exact_commit_kv(base, prompts):
    """At every committed position, in both pools' layers: those of dense decoding."""
    caches: dict[int, Any] = {}

    def remember(session):
        caches.update(enumerate(session.state.caches))

    run(base.with_config(settings(mode="dense")), prompts, each_turn=remember)
    found = run(base.with_config(settings()), prompts)
    for row, rows in enumerate(found.rows):
        count = rows.shape[3]
        assert count >= LENGTHS[row] + SAMPLING.max_new_tokens - WIDTH
        for layer in range(LAYERS):
            wanted = cache_rows(caches[layer], row, count)
            error = np.linalg.norm(rows[:, layer] - wanted) / np.linalg.norm(wanted)
            assert error < 1e-5


@pytest.fixture(scope="module")
def opened(base, prompts):
    """A session after its prompts were prefilled."""
    plan = base.plan(prompts, [SAMPLING] * 3)
    with HeraldSession(base, 3, plan) as session:
        for number, prompt in enumerate(prompts):
            session.admit(Request(number, prompt, SAMPLING, RULE, base.model.config))
        yield session


@pytest.mark.parametrize("poison", [0.0, 1e30, np.nan])
def test_live_rows_do_not_see_the_draft(base, opened, poison):
    """Draft rows absent, huge or NaN: the same live bits, in the same program."""
    state = opened.state
    turn = base.run_plain(forward.new_turn, batch=3, width=WIDTH)
    begun = base.run(forward.begin, base.rope, state.block, turn, lookahead=True)
    commit = base.put(np.array([False, True, True]))

    def layers(x):
        x, tables, _, centre = x, *begun[1:]
        told = []
        for number in range(LAYERS):
            qkv, queries = base.run_layer(forward.project, number, x, tables, centre, width=WIDTH)
            kept = None, state.init[number], state.previous[number]
            rest = kept, opened.pools[number], state.block.start, commit
            x, kept = base.run_layer(
                forward.attend_layer,
                number,
                *jax.tree.map(jnp.copy, (x, qkv, *rest)),
                donate=(1, 3),
                width=WIDTH,
                causal=False,
            )
            told.append((x[:, :WIDTH], kept))
        return jax.device_get(told), np.asarray(queries)

    plain, wanted = layers(jnp.copy(begun[0]))
    other, changed = layers(begun[0].at[:, WIDTH:].set(poison))
    jax.tree.map(np.testing.assert_array_equal, other, plain)
    assert not np.array_equal(changed, wanted)  # the next block does see the draft


def test_queries_a_block_ahead_are_those_of_a_naive_forward(base, prompts, monkeypatch):
    """Prompt, draft and a block of masks as one sequence under the block-causal mask."""
    asked = []
    request = Retrieval.request

    def remember(self, layer, queries, spans):
        asked.append(np.asarray(queries))
        return request(self, layer, queries, spans)

    monkeypatch.setattr(Retrieval, "request", remember)
    run(base.with_config(settings()), prompts)
    mask, start = base.model.config.diffusion.mask_token_id, LENGTHS[0]
    allowed = jnp.asarray(block_causal_mask(start + 2 * WIDTH, WIDTH))

    @jax.jit
    def naive(tokens):
        place = jnp.arange(tokens.shape[1])[None]
        tables = rope_at(base.model.config.rope, place, 128)
        x, queries = base.model.embed(tokens), []
        for layer in base.model.layers:
            q, k, v = layer.qkv(x, *tables)
            queries.append(q[0, start + WIDTH + WIDTH // 2])
            x = layer.finish(x, masked_attention(q, k, v, allowed))
        return base.model.logits(x).at[..., mask].set(-jnp.inf), queries

    tokens = np.array([[*prompts[0], *[mask] * 2 * WIDTH]])
    logits, _ = naive(tokens)
    tokens[0, start : start + WIDTH] = np.argmax(logits[0, start : start + WIDTH], axis=-1)
    _, queries = naive(tokens)
    for layer, query in enumerate(queries):
        wanted = np.asarray(query).reshape(2, 2, 16)  # [K, G, H]
        error = np.linalg.norm(asked[layer][0] - wanted) / np.linalg.norm(wanted)
        assert error < 1e-5


def test_int8_keys_choose_nearly_the_same(base, prompts, herald):
    rule = dataclasses.replace(base.config.rule, shortlist=3.0)
    found = run(base.with_config(settings(quantised_keys=True, rule=rule)), prompts)
    report, exact = found.report, herald.report
    assert report.scanned_bytes * 4 == exact.scanned_bytes  # float32 here
    assert report.effective_share == pytest.approx(exact.effective_share, rel=0.1)
    assert np.mean(np.array(found.tokens) == np.array(herald.tokens)) > 0.5


def equal(one, other) -> None:
    """Tokens, and every committed row bit for bit."""
    assert one.tokens == other.tokens
    for rows, same in zip(one.rows, other.rows, strict=True):
        np.testing.assert_array_equal(rows, same)


def test_used_buffers_filled_with_nan_change_nothing(base, prompts, herald, monkeypatch):
    """Staging is poisoned before it is filled again: what is stale in it never counts."""
    take = Staging.take

    def poisoned(self):
        number, view = take(self)
        view[:] = np.nan
        return number, view

    monkeypatch.setattr(Staging, "take", poisoned)
    equal(run(base, prompts), herald)


def test_random_delays_change_nothing(base, prompts, herald, monkeypatch):
    rng = random.Random(1)
    for name in ("_fill", "_write", "_retrieve", "_send"):
        whole = getattr(Retrieval, name)

        def late(self, *args, whole=whole):
            time.sleep(rng.choice([0, 0, 0.02]))
            return whole(self, *args)

        monkeypatch.setattr(Retrieval, name, late)
    equal(run(base, prompts), herald)


def test_rows_can_be_permuted(base, prompts, herald):
    order = [2, 0, 1]
    found = run(base, [prompts[row] for row in order])
    for place, row in enumerate(order):
        assert found.tokens[place] == herald.tokens[row]
        np.testing.assert_array_equal(found.rows[place], herald.rows[row])


def test_requests_join_and_leave_at_block_boundaries(base, prompts, herald):
    """Three rows for five requests; each says what it says beside others."""
    found = run(base, [*prompts, prompts[2], prompts[0]], batch=3)
    wanted = [*range(3), 2, 0]
    assert found.tokens == [herald.tokens[row] for row in wanted]
    for rows, row in zip(found.rows, wanted, strict=True):
        np.testing.assert_array_equal(rows, herald.rows[row])


def test_the_scheduler_serves_blocks(base, prompts, dense_tokens):
    """Requests join and leave, one is cancelled, one fails: each says what it says alone.

    Prefill of one goes on between the blocks of others; all rows are chosen, so tokens are dense.
    """
    scheduler = Scheduler(
        base.with_config(settings()), SchedulerConfig(rows=2, max_length=96, prefill_seconds=1e-6)
    )
    slow = DenoiseParams("sequential", steps=WIDTH)
    alone = scheduler.submit(prompts[0], SAMPLING, denoise=slow).result()
    assert alone.steps[0] == WIDTH and alone.tokens != dense_tokens[0]
    pieces = []
    first = scheduler.submit(prompts[0], SAMPLING, denoise=RULE, on_piece=pieces.append)
    others = [scheduler.submit(prompts[row], SAMPLING, denoise=RULE) for row in (1, 2, 1)]
    other = scheduler.submit(prompts[0], SAMPLING, denoise=slow)
    while others[0].phase != "decode":
        scheduler.step()
    assert first.phase == "decode"
    others[2].cancel()
    with pytest.raises(ValueError, match="one for each step"):
        scheduler.submit([1], dataclasses.replace(SAMPLING, logprobs=1))
    with pytest.raises(ValueError, match=r"80 tokens and asks for 27 more: 107 exceed .* 96"):
        scheduler.submit([1] * 80, SAMPLING)
    assert [handle.result().tokens for handle in (first, *others[:2])] == dense_tokens
    assert [len(piece.tokens) for piece in pieces] == [8, 8, 8, 3]
    assert first.result().steps == [piece.steps for piece in pieces]
    assert other.result().tokens == alone.tokens and other.result().steps == alone.steps
    assert others[2].result().finish_reason == "cancelled"
    assert scheduler.running == scheduler.waiting == scheduler.blocks_used == 0
    assert scheduler.free_rows == 2
    assert scheduler.counters.finished == {"length": 5, "cancelled": 1}
    scheduler.drain()


def test_bytes_to_the_device_are_exact_and_go_once(herald):
    """A pool a turn, in every turn after which a block follows; every committed row once."""
    heads, head_dim, itemsize = 2, 16, 4
    row = LAYERS * heads * 2 * head_dim * itemsize
    capacity = 80  # of the longest request, in whole KV blocks, all of which a pool can hold
    assert herald.report.turns == 5
    assert herald.report.h2d_bytes == 4 * 3 * capacity * row
    assert herald.report.d2h_bytes == row * (3 * capacity + herald.report.blocks * WIDTH)


def test_share_of_the_prefix_is_scanned_between_init_rows_and_previous_block(base, prompts):
    engine = base.with_config(settings(budget=Budget(share=0.25)))
    with HeraldSession(engine, 3, engine.plan(prompts, [SAMPLING] * 3)) as session:
        for row, prompt in enumerate(prompts):
            session.requests[row] = Request(row, prompt, SAMPLING, RULE, engine.model.config)
        # Blocks at 48, 32 and 0: for the block after, all before them is scanned but 4 init rows.
        assert session._spans(ahead=1) == [
            Span(0, 4, 48, 11), Span(1, 4, 32, 7), Span(2, 4, 4, 0)
        ]  # fmt: skip
        assert session._spans(ahead=0) == [
            Span(0, 4, 40, 9), Span(1, 4, 24, 5), Span(2, 4, 4, 0)
        ]  # fmt: skip


def test_failing_worker_ends_its_request_and_no_other(base, prompts, herald, monkeypatch):
    select = Retrieval._select

    def fails(self, layer, span, queries):
        if (span.row, span.end) == (0, 56):
            raise OSError("the worker died")
        return select(self, layer, span, queries)

    monkeypatch.setattr(Retrieval, "_select", fails)
    found = run(base, prompts)
    assert [request.reason for request in found.requests] == ["failed", "length", "length"]
    assert found.requests[0].error == "OSError: the worker died"
    assert found.tokens[0] == herald.tokens[0][: len(found.tokens[0])]
    assert found.tokens[1:] == herald.tokens[1:]


def test_late_selection_is_given_up_in_the_open(base, prompts, monkeypatch):
    monkeypatch.setattr(CpuSelector, "select", lambda *_: time.sleep(1.5))
    engine = base.with_config(settings(patience=0.5, rule=base.config.rule))
    begun = time.monotonic()
    generation = engine.prepare(prompts, SAMPLING, RULE)
    assert not any(block.tokens for block in generation)
    assert [result.finish_reason for result in generation.results()] == ["failed"] * 3
    assert "took over 0.5 s" in generation.errors[0]
    assert time.monotonic() - begun < 300


def test_runs_of_rows(base, prompts, dense_tokens):
    found = run(base.with_config(settings(rule=SelectionRule(run=4))), prompts)
    assert found.tokens == dense_tokens


def test_block_that_begins_with_a_token_handed_over(prompts):
    """Fast-dLLM v2's shift, and the model that ships; one layer is enough."""
    facts = DiffusionConfig(WIDTH, VOCABULARY - 1, logit_shift=True)
    model = make_model(num_layers=1, diffusion=facts)
    config = BlockEngineConfig(kv_block=WIDTH, prefill_chunk=32)
    dense, _ = BlockEngine(model, config=config).generate(prompts, SAMPLING, RULE)
    found, report = HeraldEngine(model, config=settings()).generate(prompts, SAMPLING, RULE)
    assert found == dense
    assert report.decode_tokens == 3 * SAMPLING.max_new_tokens


def test_experts_do_not_mix_rows():
    """Draft rows route too: live rows keep their bits whatever the others are."""
    experts = MoE(16, MoeConfig(4, 2, 8, shared_intermediate_size=8), dtype=jnp.dtype("float32"),
                  rngs=nnx.Rngs(0))  # fmt: skip
    graph, weights = nnx.split(experts)
    run_rows = jax.jit(lambda x: nnx.merge(graph, weights)(x))
    x = np.random.default_rng(4).standard_normal((1, 12, 16)).astype(np.float32)
    other = x.copy()
    other[:, 4:] = np.random.default_rng(5).standard_normal((1, 8, 16)) * 100
    np.testing.assert_array_equal(run_rows(other)[:, :4], run_rows(x)[:, :4])
