"""The engine on a GPU: where the KV lies, who copies and what overlaps change no token.

Most of the time goes to compiling; XLA_FLAGS=--xla_gpu_autotune_level=0 makes it a third.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.config import EngineConfig, SamplingParams, SparseConfig
from sparda_jax.engine.generate import Engine
from sparda_jax.forecast.forward import sparda_logits
from sparda_jax.forecast.projection import Forecast
from sparda_jax.models.decoder import Decoder
from sparda_jax.sparse.infinigen import calibrate
from tests.delays import Delays
from tests.faults import poison_row
from tests.gpu.models import small_model

pytestmark = pytest.mark.gpu

VOCABULARY, NEW_TOKENS = 997, 500
SPARSE = SparseConfig(local_blocks=2, budget_blocks=8)
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS)
CONFIG = small_model(VOCABULARY)
PROMPTS = [
    np.random.default_rng(size).integers(0, VOCABULARY, size).tolist() for size in (1700, 64, 1023)
]


@pytest.fixture(scope="module")
def run():
    """Tokens and report of an engine, by dtype and settings; each is run once."""
    done = {}

    def run_once(dtype="float32", idle=(), delays=None, **settings):
        key = (dtype, idle, delays, *sorted(settings.items()))
        if key not in done:
            model = Decoder.random(CONFIG, seed=3, dtype=dtype)
            selector = {}
            if settings["mode"] == "sparda":
                selector["forecast"] = Forecast.random(CONFIG, seed=4, dtype=dtype)
            if settings["mode"] == "infinigen":
                text = np.random.default_rng(5).integers(0, VOCABULARY, (1, 2048))
                selector["infinigen"] = calibrate(model, jnp.asarray(text, jnp.int32))
            engine = Engine(model, sparse=SPARSE, config=EngineConfig(**settings), **selector)
            with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
                generation = engine.prepare(PROMPTS, GREEDY)
                generation.prefill()
                for row in idle:
                    generation.cancel(row)
                list(generation)
            tokens = [result.tokens for result in generation.results()]
            done[key] = tokens, generation.report
        return done[key]

    return run_once


@pytest.mark.parametrize(
    "mode,how",
    [
        ("sparda", {}),
        ("sparda", {"prefetch": False}),
        ("sparda", {"fetch": "eager"}),
        # One layer more than all offloaded, 12 MB; all three resident take 45.
        ("sparda", {"offload": "auto", "device_kv_bytes": 24_000_000}),
        ("sparse", {}),
        ("infinigen", {}),
    ],
)
def test_offloaded_equals_resident(run, mode, how):
    """500 greedy tokens of three requests of different lengths in one program."""
    resident, _ = run(mode=mode)
    offloaded, report = run(mode=mode, **({"offload": "host"} | how))
    assert [len(tokens) for tokens in offloaded] == [NEW_TOKENS] * 3
    assert offloaded == resident
    assert report.fetched_runs > 0 and report.written_back_runs > 0
    assert 0 < report.hit_rate < 1


@pytest.mark.parametrize(
    "mode,fetch,seed",
    [("sparda", "program", 0), ("sparda", "program", 1), ("sparse", "program", 2)]
    + [("sparda", "eager", 3)],
)
def test_random_delays_change_no_token(run, monkeypatch, mode, fetch, seed):
    """Copies and what they run beside are late by turns, and so is the host."""
    resident, _ = run(mode=mode)
    delays = Delays(monkeypatch, seed, seconds=5e-3, size=512)
    tokens, report = run(mode=mode, offload="host", fetch=fetch, delays=seed)
    assert tokens == resident
    assert report.fetched_runs > 0
    assert delays.sleeps > 100 and (delays.traced > 0) == (fetch == "program")


@pytest.mark.parametrize("mode", ["sparse", "sparda"])
def test_a_row_gives_the_same_tokens_with_the_others_idle(run, mode):
    live, _ = run(mode=mode, offload="host")
    alone, _ = run(mode=mode, offload="host", idle=(1, 2))
    assert alone[0] == live[0]
    assert [len(tokens) for tokens in alone[1:]] == [1, 1]


@pytest.fixture(scope="module")
def offloaded():
    """Makes batches of one engine that offloads, by one program."""
    model = Decoder.random(CONFIG, seed=3, dtype="float32")
    config = EngineConfig(mode="sparda", offload="host", host_kv_bytes=2**30)
    forecast = Forecast.random(CONFIG, seed=4, dtype="float32")
    engine = Engine(model, sparse=SPARSE, config=config, forecast=forecast)
    with jax.default_matmul_precision("highest"):
        yield engine


def test_faults_leave_the_others_alone(run, offloaded):
    """NaN ends one request, an interrupt keeps what there is, too large a batch is refused."""
    plain, _ = run(mode="sparda", offload="host")
    with pytest.raises(ValueError, match=r"on the host needs .* host KV budget"):
        offloaded.prepare(PROMPTS * 100, GREEDY)
    generation = offloaded.prepare(PROMPTS, GREEDY)
    generation.prefill()
    poison_row(offloaded, generation, 1)
    list(generation)
    results = generation.results()
    assert [result.finish_reason for result in results] == ["length", "failed", "length"]
    assert results[1].tokens == plain[1][:1]
    assert [results[0].tokens, results[2].tokens] == [plain[0], plain[2]]

    generation = offloaded.prepare(PROMPTS, GREEDY)
    generation.prefill()
    tokens = iter(generation)
    for _ in range(100):
        next(tokens)
    results = generation.results()
    assert [result.finish_reason for result in results] == ["interrupted"] * 3
    for result, whole in zip(results, plain, strict=True):
        assert 0 < len(result.tokens) < NEW_TOKENS
        assert result.tokens == whole[: len(result.tokens)]
    assert generation.report.decode_tokens >= 99


def test_a_batch_larger_than_the_device_is_refused():
    engine = Engine(Decoder.random(CONFIG, dtype="float32"), config=EngineConfig(mode="dense"))
    memory = (jax.local_devices()[0].memory_stats() or {})["bytes_limit"]
    sequence = 2 * 4 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim * 3500
    with pytest.raises(ValueError, match=r"on the device needs .* free memory of .* allows"):
        engine.prepare([[1] * 3000] * (memory // sequence + 1), GREEDY)


@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn"])
def test_quantised_host_kv_is_the_same_by_both_fetchers(run, stored):
    exact, plain = run(mode="sparda", offload="host")
    tokens, report = run(mode="sparda", offload="host", host_kv_dtype=stored)
    eager, _ = run(mode="sparda", offload="host", host_kv_dtype=stored, fetch="eager")
    assert tokens == eager
    assert report.host_kv_bytes * 4 == plain.host_kv_bytes
    assert np.mean(np.array(tokens)[:, :20] == np.array(exact)[:, :20]) > 0.5


@pytest.mark.parametrize(
    "mode,offload", [("dense", "none"), ("sparse", "host"), ("sparda", "host")]
)
def test_bfloat16_kernels_follow_a_float32_forward(run, mode, offload):
    """Teacher forcing: what the kernels draw is (nearly) the likeliest token in float32."""
    tokens, _ = run("bfloat16", mode=mode, offload=offload)
    rounded = Decoder.random(CONFIG, seed=3, dtype="bfloat16")
    model = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), rounded)
    forecast = jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32), Forecast.random(CONFIG, seed=4, dtype="bfloat16")
    )

    def forward(model, forecast, tokens, prompt_lengths):
        if mode == "sparda":
            return sparda_logits(
                model, forecast, tokens, prompt_lengths=prompt_lengths, sparse=SPARSE
            )
        return model(tokens, sparse=SPARSE if mode == "sparse" else None)

    equal = []
    for prompt, drawn in zip(PROMPTS, tokens, strict=True):
        sequence = jnp.asarray([prompt + drawn], jnp.int32)
        starts = jnp.asarray([len(prompt)], jnp.int32)
        with jax.default_matmul_precision("highest"):
            logits = np.asarray(jax.jit(forward)(model, forecast, sequence, starts))[0]
        logits = logits[len(prompt) - 1 : -1]
        behind = logits.max(1) - logits[np.arange(len(drawn)), drawn]
        # Rounding moves logits by about 1 % of their spread, and now and then a block.
        assert np.quantile(behind / logits.std(1), 0.98) < 0.1
        equal.append(np.mean(logits.argmax(1) == drawn))
    assert min(equal) > 0.8
