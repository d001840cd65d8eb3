"""The engine's equalities on the real model: 200 greedy tokens after some 1,500 of real text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.assets import load_excerpt
from sparda_jax.checkpoints.load import load_pretrained
from sparda_jax.config import EngineConfig, SamplingParams, SparseConfig
from sparda_jax.engine.generate import Engine
from sparda_jax.forecast.files import load_forecast

pytestmark = pytest.mark.slow

TOKENS = 200
GREEDY = SamplingParams(max_new_tokens=TOKENS)
# Of 27 blocks at the end; 10 are forced.
SPARSE = SparseConfig(budget_blocks=14)


@pytest.fixture(scope="module")
def pretrained(default_model_path):
    with jax.transfer_guard("allow"):
        return load_pretrained(str(default_model_path), dtype=jnp.dtype("float32"))


@pytest.fixture(scope="module")
def texts(pretrained):
    ids = pretrained[1].encode(load_excerpt())
    return [ids[:1536], ids[13_000:14_400]]


@pytest.fixture(scope="module")
def run(pretrained, texts):
    """Tokens of an engine with these settings; each is run once."""
    done = {}

    def go(sparse=SPARSE, **settings):
        key = (sparse, *sorted(settings.items()))
        if key not in done:
            model, config = pretrained[0], EngineConfig(**settings)
            forecast = None
            if config.mode == "sparda":
                with jax.transfer_guard("allow"):
                    forecast, _ = load_forecast("default", model)
            engine = Engine(model, sparse=sparse, config=config, forecast=forecast)
            results, report = engine.generate(texts, GREEDY)
            done[key] = engine, [result.tokens for result in results], report
        return done[key]

    return go


def test_all_blocks_selected_equals_dense(run):
    _, dense, _ = run(mode="dense")
    _, blocks, _ = run(sparse=SPARSE.with_all_blocks(1536 + TOKENS))
    assert [len(tokens) for tokens in dense] == [TOKENS, TOKENS]
    assert blocks == dense


@pytest.mark.parametrize(
    "mode,how",
    [
        # Token by token and the prompt in one piece, against eight tokens a program and chunks.
        ("sparse", {"fetch": "eager", "prefill_chunk": 1536}),
        ("sparda", {"fetch": "program"}),
    ],
)
def test_offloaded_equals_resident(run, mode, how):
    settings = {} if mode == "sparse" else {"mode": mode}
    _, resident, _ = run(**settings)
    _, offloaded, report = run(offload="host", **how, **settings)
    assert offloaded == resident
    assert report.fetched_runs > 0
    assert report.written_back_runs >= 2 * 3 * 30 * 3  # rows x blocks x layers x KV heads


def test_the_budget_binds(run):
    """Guards the equality of resident and offloaded sparse runs against being that of dense."""
    sparse, sparda, dense = run()[1], run(mode="sparda")[1], run(mode="dense")[1]
    assert sparse != dense
    assert sparda not in (sparse, dense)


def test_a_request_alone_equals_the_batch(run, texts):
    """In the same fixed-shape program, the other row idle and its cache poisoned."""
    engine, batched, _ = run()
    generation = engine.prepare(texts, GREEDY)
    generation.prefill()
    generation.cancel(1)

    def poison(leaf):
        if not np.issubdtype(leaf.dtype, np.floating):
            return leaf
        return leaf.at[1].set(jnp.nan)

    with jax.transfer_guard("allow"):
        state = generation.batch.state
        generation.batch.state = dataclasses.replace(
            state, layers=jax.tree.map(poison, state.layers)
        )
        list(generation)
    alone, other = generation.results()
    assert alone.tokens == batched[0]
    assert (len(other.tokens), other.finish_reason) == (1, "cancelled")
