"""The engine's promise: the same tokens whichever way they are computed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_sparse_attention import block_sparse_attention
from pallas_kernels.compressed_keys import compress_keys
from sparda_jax.config import SamplingParams
from sparda_jax.engine import decode, prefill
from sparda_jax.engine.choosers import forecast_choosers
from sparda_jax.engine.state import SparseCache
from sparda_jax.forecast.forward import sparda_logits
from sparda_jax.models.rope import rope_at
from sparda_jax.sparse.infinigen import partial_keys, select_infinigen, speculate
from sparda_jax.sparse.infllm_v2 import select_prefill, to_blocks
from tests.faults import poison_row

NEW_TOKENS = 40
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS)


def tokens_of(engine, prompts, sampling=GREEDY):
    results, report = engine.generate(prompts, sampling)
    return [result.tokens for result in results], report


@pytest.mark.smoke
def infinigen_logits(model, infinigen, tokens, lengths, starts, sparse):
    """A whole-sequence forward: the prompt as in sparse mode, then tokens as decode steps."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    cos, sin = rope_at(model.config.rope, positions, model.config.max_position_embeddings)
    x, before = model.embed(tokens), None
    for index, layer in enumerate(model.layers):
        q, k, v = layer.qkv(x, cos, sin)
        kv = to_blocks(k, v, sparse.geometry.block_size)
        keys = kv[:, :, :, 0].reshape(*kv.shape[:2], -1, k.shape[-1])
        compressed = compress_keys(keys, sparse.geometry)
        ids = select_prefill(q, compressed, positions, lengths, sparse, kv.shape[2]).ids
        if before is not None:
            skew = infinigen.layers[index]
            guess = speculate(layer, skew, before, cos, sin)
            few = partial_keys(keys, skew)
            ahead = select_infinigen(guess, few, positions, positions, sparse, kv.shape[2]).ids
            ids = jnp.where((positions < starts[:, None])[:, None, :, None], ids, ahead)
        before = layer.attention_norm(x)
        x = layer.finish(x, block_sparse_attention(q, kv, ids, positions))
    return model.logits(x)


@pytest.mark.parametrize("mode", ["dense", "sparse", "sparda", "infinigen"])
def test_decode_follows_the_whole_sequence_forward(
    make_engine, model, sparse, forecast, infinigen, prompts, mode
):
    """Teacher forcing: every token is the argmax of one forward over all that came before it."""
    generated, _ = tokens_of(make_engine(mode=mode), prompts)
    sequences = [prompt + tokens for prompt, tokens in zip(prompts, generated, strict=True)]
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    padded = np.zeros((len(sequences), max(lengths)), np.int32)
    for row, sequence in enumerate(sequences):
        padded[row, : len(sequence)] = sequence
    rules = sparse if mode == "sparse" else None

    def forward(model, forecast, tokens, lengths):
        starts = np.array([len(prompt) for prompt in prompts], np.int32)
        if mode == "infinigen":
            return infinigen_logits(model, infinigen, tokens, lengths, starts, sparse)
        if mode != "sparda":
            return model(tokens, lengths=lengths, sparse=rules)
        return sparda_logits(
            model, forecast, tokens, lengths=lengths, prompt_lengths=starts, sparse=sparse
        )

    with jax.transfer_guard("allow"):
        drawn = np.asarray(jax.jit(forward)(model, forecast, padded, lengths)).argmax(-1)
    for row, (prompt, tokens) in enumerate(zip(prompts, generated, strict=True)):
        expected = drawn[row, len(prompt) - 1 : len(prompt) + len(tokens) - 1]
        np.testing.assert_array_equal(expected, tokens)


def test_modes_differ_when_the_budget_binds(make_engine, prompts):
    """Guards the equalities below: they would hold trivially if all modes attended the same."""
    sparse, _ = tokens_of(make_engine(), prompts)
    dense, _ = tokens_of(make_engine(mode="dense"), prompts)
    sparda, _ = tokens_of(make_engine(mode="sparda"), prompts)
    infinigen, _ = tokens_of(make_engine(mode="infinigen"), prompts)
    assert sparse != dense
    assert sparda not in (sparse, dense)
    assert infinigen not in (sparse, dense, sparda)


@pytest.mark.parametrize(
    "mode,offload", [("sparse", "none"), ("sparda", "host"), ("infinigen", "host")]
)
def test_all_blocks_selected_equals_dense(make_engine, sparse, prompts, mode, offload):
    dense, _ = tokens_of(make_engine(mode="dense"), prompts)
    engine = make_engine(sparse=sparse.with_all_blocks(256), mode=mode, offload=offload)
    assert tokens_of(engine, prompts)[0] == dense


@pytest.mark.parametrize("mode", ["sparse", "sparda"])
def test_dense_len_switches_in_mid_generation(make_engine, sparse, prompts, mode):
    """Rows below dense_len attend everything, then the budget: offloaded equals resident."""
    mixed = dataclasses.replace(sparse, dense_len=60)
    dense, _ = tokens_of(make_engine(mode="dense"), prompts)
    resident, _ = tokens_of(make_engine(sparse=mixed, mode=mode), prompts)
    offloaded, _ = tokens_of(make_engine(sparse=mixed, mode=mode, offload="host"), prompts)
    assert resident == offloaded
    short = 60 - len(prompts[1])
    assert resident[1][:short] == dense[1][:short]
    assert resident[0] != dense[0]


@pytest.mark.smoke
@pytest.mark.parametrize("fetch", ["program", "eager"])
@pytest.mark.parametrize("mode,local_blocks", [("sparse", 0), ("sparda", 1), ("infinigen", 0)])
def test_offloaded_equals_resident(make_engine, sparse, prompts, fetch, mode, local_blocks):
    rules = dataclasses.replace(sparse, local_blocks=local_blocks)
    resident, _ = tokens_of(make_engine(sparse=rules, mode=mode), prompts)
    engine = make_engine(sparse=rules, mode=mode, offload="host", fetch=fetch)
    offloaded, report = tokens_of(engine, prompts)
    assert resident == offloaded
    assert report.fetched_runs > 0
    assert 0 < report.hit_rate < 1
    assert report.written_back_runs > 0


def test_spare_slots_save_copies_and_change_no_token(make_engine, prompts):
    """Blocks that were dropped and come back are still there."""
    resident, _ = tokens_of(make_engine(mode="sparda"), prompts)
    reports = []
    for spare in (0, 3, 99):
        engine = make_engine(mode="sparda", offload="host", spare_slots=spare)
        tokens, report = tokens_of(engine, prompts)
        assert tokens == resident
        reports.append(report)
    none, some, all_blocks = reports
    assert none.hit_rate < some.hit_rate < all_blocks.hit_rate
    assert none.fetched_runs > some.fetched_runs > all_blocks.fetched_runs
    assert none.device_kv_bytes < some.device_kv_bytes < all_blocks.device_kv_bytes


@pytest.mark.parametrize("mode", ["sparse", "sparda"])
def test_n_step_program_equals_single_steps(make_engine, prompts, mode):
    several = make_engine(mode=mode, offload="host")
    assert several.config.steps_per_call > 1
    single, _ = tokens_of(make_engine(mode=mode, offload="host", steps_per_call=1), prompts)
    assert tokens_of(several, prompts)[0] == single


@pytest.mark.parametrize("mode", ["dense", "sparse", "sparda"])
def test_chunked_prefill_equals_one_shot(make_engine, prompts, mode):
    whole, _ = tokens_of(make_engine(mode=mode, prefill_chunk=128), prompts)
    chunked, _ = tokens_of(make_engine(mode=mode, prefill_chunk=7), prompts)
    assert chunked == whole


@pytest.mark.parametrize("offload", ["none", "host"])
def test_batched_equals_one_by_one(make_engine, prompts, offload):
    """Other shapes, hence float32 and tokens; the same program is compared bit by bit below."""
    engine = make_engine(offload=offload)
    batched, _ = tokens_of(engine, prompts)
    assert tokens_of(engine, prompts[1:2])[0] == batched[1:2]


@pytest.mark.parametrize(
    "mode,offload", [("dense", "none"), ("sparse", "none"), ("sparse", "host"), ("sparda", "host")]
)
def test_a_row_is_bit_identical_with_its_neighbours_idle_or_poisoned(
    make_engine, prompts, mode, offload
):
    def run(others: str):
        engine = make_engine(mode=mode, offload=offload)
        generation = engine.prepare(prompts, GREEDY)
        generation.prefill()
        mine = np.arange(len(prompts)) == 0
        if others != "live":
            for row in np.flatnonzero(~mine):
                generation.cancel(row)
        state = generation.batch.state

        def poison(leaf):
            if not np.issubdtype(leaf.dtype, np.floating):
                return leaf
            keep = mine.reshape(-1, *[1] * (leaf.ndim - 1))
            return engine.put(np.where(keep, np.asarray(leaf), np.nan).astype(leaf.dtype))

        if others == "poisoned":
            state = dataclasses.replace(state, layers=jax.tree.map(poison, state.layers))
        step = generation.batch.compile()
        for _ in range(6):
            state, outputs = step(state)
        caches = [
            cache.tail if isinstance(cache, SparseCache) else cache.k for cache in state.layers
        ]
        return [np.asarray(cache)[0] for cache in caches], np.asarray(outputs.tokens)[:, 0]

    with jax.transfer_guard("allow"):
        live, idle, poisoned = (run(others) for others in ("live", "idle", "poisoned"))
    for other in (idle, poisoned):
        np.testing.assert_array_equal(live[1], other[1])
        for mine, theirs in zip(live[0], other[0], strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_host_pool_holds_the_exact_blocks(make_engine, prompts):
    """Every full block on the host equals the resident cache's, after many write-backs."""
    runs = {}
    for offload in ("none", "host"):
        engine = make_engine(offload=offload)
        generation = engine.prepare(prompts, GREEDY)
        generation.prefill()
        list(generation)
        runs[offload] = generation
    lengths = [len(prompt) + NEW_TOKENS - 1 for prompt in prompts]
    size = 8
    for index, cache in enumerate(runs["none"].state.layers):
        host = runs["host"].pool.view(index)
        resident = jax.device_get(cache.blocks)
        for row, length in enumerate(lengths):
            # The block before the tail block joins the resident cache when the next one begins.
            full = (length - 1) // size
            np.testing.assert_array_equal(host[row, :, :full], resident[row, :, :full])


def test_no_recompilation_after_the_second_step(make_engine, prompts):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, _, **__: compiled.append(name) if "backend_compile" in name else None
    )
    for settings in (
        {"mode": "dense"},
        {"mode": "sparse"},
        {"mode": "sparda", "offload": "host"},
        {"mode": "sparda", "offload": "host", "fetch": "eager"},
    ):
        engine = make_engine(fresh=True, steps_per_call=1, **settings)
        generation = engine.prepare(prompts, GREEDY)
        generation.prefill()
        tokens = iter(generation)
        for _ in range(3 * len(prompts)):
            next(tokens)
        compiled.clear()
        assert len(list(tokens)) == (NEW_TOKENS - 3) * len(prompts)
        assert compiled == [], settings
        if settings.get("offload") == "host":
            assert generation.report.written_back_runs > 0


def test_a_finished_request_changes_nothing_for_the_others(make_engine, prompts):
    engine = make_engine(offload="host")
    long, _ = tokens_of(engine, prompts)
    limits = [NEW_TOKENS, 3, 11]
    sampling = [SamplingParams(max_new_tokens=limit) for limit in limits]
    results, report = engine.generate(prompts, sampling)
    for result, tokens, limit in zip(results, long, limits, strict=True):
        assert result.tokens == tokens[:limit]
        assert result.finish_reason == "length"
    assert report.decode_tokens == sum(limits) - len(limits)


def test_stop_tokens_end_only_their_request(make_engine, prompts):
    engine = make_engine()
    plain, _ = tokens_of(engine, prompts)
    at = next(i for i in range(5, NEW_TOKENS) if plain[1][i] not in plain[1][:i])
    sampling = [GREEDY, dataclasses.replace(GREEDY, stop_token_ids=(plain[1][at],)), GREEDY]
    results, _ = engine.generate(prompts, sampling)
    assert results[1].tokens == plain[1][: at + 1]
    assert results[1].finish_reason == "stop"
    assert [results[0].tokens, results[2].tokens] == [plain[0], plain[2]]


def test_a_stop_token_drawn_first_ends_before_decode(make_engine, prompts):
    engine = make_engine()
    plain, _ = tokens_of(engine, prompts[:1])
    stop = dataclasses.replace(GREEDY, stop_token_ids=(plain[0][0],))
    results, report = engine.generate(prompts[:1], stop)
    assert (results[0].tokens, results[0].finish_reason) == (plain[0][:1], "stop")
    assert report.steps == 0


def test_each_request_has_its_own_sampling_and_seed(make_engine, prompts):
    engine = make_engine()
    hot = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=1.0, seed=5, top_k=20, top_p=0.9)
    mixed, _ = tokens_of(engine, prompts, [hot, GREEDY, dataclasses.replace(hot, seed=6)])
    again, _ = tokens_of(engine, prompts, [hot, GREEDY, dataclasses.replace(hot, seed=7)])
    greedy, _ = tokens_of(engine, prompts)
    assert mixed[:2] == again[:2]
    assert mixed[2] != again[2]
    assert mixed[1] == greedy[1]
    assert mixed[0] != greedy[0]


def test_nan_logits_fail_only_their_request(make_engine, prompts):
    engine = make_engine()
    plain, _ = tokens_of(engine, prompts)
    generation = engine.prepare(prompts, GREEDY)
    generation.prefill()
    poison_row(engine, generation, 1)
    list(generation)
    results = generation.results()
    assert [result.finish_reason for result in results] == ["length", "failed", "length"]
    assert results[1].tokens == plain[1][:1]
    assert [results[0].tokens, results[2].tokens] == [plain[0], plain[2]]


def test_interrupted_generation_keeps_its_tokens_and_counters(make_engine, prompts):
    engine = make_engine(offload="host")
    plain, _ = tokens_of(engine, prompts[:1])
    generation = engine.prepare(prompts[:1], GREEDY)
    generation.prefill()
    tokens = iter(generation)
    for _ in range(10):
        next(tokens)
    result = generation.results()[0]
    assert result.finish_reason == "interrupted"
    assert result.tokens[:10] == plain[0][:10]
    assert generation.report.decode_tokens >= 9


def test_a_cancelled_request_keeps_what_it_has(make_engine, prompts):
    engine = make_engine(offload="host")
    plain, _ = tokens_of(engine, prompts)
    generation = engine.prepare(prompts, GREEDY)
    generation.prefill()
    for count, _ in enumerate(generation):
        if count == 20:
            generation.cancel(1)
    reasons = [result.finish_reason for result in generation.results()]
    assert reasons == ["length", "cancelled", "length"]
    for result, tokens in zip(generation.results(), plain, strict=True):
        assert result.tokens == tokens[: len(result.tokens)]
    assert 0 < len(generation.results()[1].tokens) < NEW_TOKENS


@pytest.mark.parametrize("offload", ["none", "host"])
@pytest.mark.parametrize("length,new", [(1, 2), (7, 1), (8, 9)])
def test_short_sequences(make_engine, prompts, offload, length, new):
    """One block, a block just filled, a single token: selection and slots may be empty."""
    sampling = SamplingParams(max_new_tokens=new)
    prompt = [prompts[0][:length]]
    dense, _ = tokens_of(make_engine(mode="dense"), prompt, sampling)
    sparse, report = tokens_of(make_engine(offload=offload), prompt, sampling)
    assert len(dense[0]) == new
    # Up to the budget of 6 blocks, sparse attends everything.
    assert sparse == dense
    assert report.context_tokens == length + new - 1


def test_a_budget_of_the_own_block_only(make_engine, sparse, prompts):
    rules = dataclasses.replace(sparse, init_blocks=0, local_blocks=0, budget_blocks=1)
    resident, _ = tokens_of(make_engine(sparse=rules), prompts)
    offloaded, report = tokens_of(make_engine(sparse=rules, offload="host"), prompts)
    assert resident == offloaded
    assert report.fetched_runs == report.cold_runs == 0


def test_callbacks_and_counters(make_engine, prompts):
    seen, units = [], []
    results, report = make_engine(offload="host").generate(
        prompts,
        GREEDY,
        on_token=lambda row, token: seen.append((row, token)),
        on_prefill=lambda done, total: units.append((done, total)),
    )
    for row, result in enumerate(results):
        assert [token for at, token in seen if at == row] == result.tokens
    assert units[-1][0] == units[-1][1] == len(units)
    assert report.prefill_tokens == sum(map(len, prompts))
    assert report.decode_tokens == sum(len(result.tokens) - 1 for result in results)
    assert report.host_kv_bytes == report.full_kv_bytes
    assert report.run_bytes == 2 * 8 * 16 * 4
    assert report.as_dict()["hit_rate"] == report.hit_rate


@pytest.mark.parametrize("mode", ["sparse", "sparda"])
def test_decode_steps_in_the_users_own_jit(make_engine, model, sparse, forecast, prompts, mode):
    """The importable path: the pure function in a plain jax.jit, the pool a host-typed argument."""
    engine = make_engine(mode=mode, offload="host")
    expected, _ = tokens_of(engine, prompts)
    choosers = forecast_choosers(forecast) if mode == "sparda" else None
    generation = engine.prepare(prompts, GREEDY)
    generation.prefill()
    blocks = generation.plan.num_blocks

    @jax.jit
    def eight(model, rope, pool, state, choosers):
        return decode.decode_steps(
            model, rope, pool, state, choosers, steps=8, sparse=sparse, num_blocks=blocks
        )

    _, outputs = eight(model, engine.rope, generation.pool.layers, generation.batch.state, choosers)
    drawn = jax.device_get(outputs.tokens)
    for row in range(len(prompts)):
        np.testing.assert_array_equal(drawn[:, row], expected[row][1:9])


def test_decode_tail_places_positions_by_remainder(model, sparse):
    """Ring rows and window rows hold the positions that decode will look for."""
    size, kernel, blocks = 8, 4, 5
    rng = np.random.default_rng(0)
    kv = rng.standard_normal((2, 2, blocks, 2, size, 3)).astype(np.float32)
    lengths = np.array([19, 32], np.int32)
    with jax.transfer_guard("allow"):
        tail, window = prefill.decode_tail(jax.numpy.array(kv), lengths, sparse=sparse)
        tail, window = np.asarray(tail), np.asarray(window)
    for row, length in enumerate(lengths):
        for block in {length // size, max(length // size - 1, 0)}:
            np.testing.assert_array_equal(tail[row, :, block % 2], kv[row, :, block])
        for position in range(length - kernel, length):
            expected = kv[row, :, position // size, 0, position % size]
            np.testing.assert_array_equal(window[row, :, position % kernel], expected)
