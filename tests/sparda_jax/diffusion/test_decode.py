"""Block decoding: cached as uncached, batched as alone, chunked as at once, and what it refuses."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.config import SamplingParams
from sparda_jax.diffusion.config import DenoiseParams
from sparda_jax.diffusion.generate import BlockEngine
from sparda_jax.diffusion.plan import BlockEngineConfig
from sparda_jax.diffusion.reference import decode_plainly
from sparda_jax.models import Decoder

from .conftest import FAMILIES, load_case_model, with_diffusion

ROOT = Path(__file__).parents[2] / "data" / "block_diffusion"
MASK = 250


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def prompt(length, seed):
    """Holds the mask token, at the start and in the tail."""
    tokens = np.random.default_rng(seed).integers(3, 240, length)
    tokens[0] = tokens[-1] = MASK
    return tokens.tolist()


def rules(width):
    """Of every kind; in wide blocks a step decides several tokens, or the test would take long."""
    steps, sure = min(width, 8), 0.05 if width <= 8 else 0.012
    return [
        DenoiseParams("low_confidence_dynamic", steps, threshold=sure),
        DenoiseParams("low_confidence_static", max(1, steps - 1)),
        DenoiseParams("sequential", max(1, steps // 2)),
        DenoiseParams("entropy_bounded", entropy_bound=max(9.0, width / 1.5)),
        DenoiseParams("threshold_or_best", threshold=sure, sub_block=width // 2, early_stop=True),
        DenoiseParams("threshold_or_first", threshold=sure, early_stop=True, early_limit=True),
    ]


def check_against_plain(model, width):
    """All rules in one batch; prompts of every kind of length; tokens that are no whole blocks."""
    lengths = [width, width + 1, 2 * width - 1, max(1, width - 1), 2 * width, width + width // 2]
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    requests = [SamplingParams(max_new_tokens=width + 2 + row) for row in range(len(prompts))]
    settings = list(zip(prompts, requests, rules(width), strict=True))
    plain = [decode_plainly(model, *each, room=6 * width) for each in settings]
    # The second half of what came becomes a stop token: inside a block, at its start or its end.
    requests[1] = dataclasses.replace(requests[1], stop_token_ids=(plain[1][0][width // 2],))
    requests[4] = dataclasses.replace(requests[4], stop_token_ids=(plain[4][0][1],))
    for row in (1, 4):
        each = prompts[row], requests[row], rules(width)[row]
        plain[row] = decode_plainly(model, *each, room=6 * width)
    engine = BlockEngine(model, config=BlockEngineConfig(blocks_per_call=2))
    results, report = engine.generate(prompts, requests, rules(width))
    assert [result.tokens for result in results] == [tokens for tokens, _ in plain]
    assert [result.finish_reason for result in results].count("stop") == 2
    # The batch runs as many forwards as its slowest request, and no request more steps than alone.
    assert sum(k * n for k, n in report.steps.items()) == sum(len(steps) for _, steps in plain)


@pytest.mark.parametrize("width", [4, 8, 16, 32, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_cached_equals_uncached(family, width):
    check_against_plain(small(width, family), width)


def test_token_causal_clean_tokens():
    """For checkpoints that were trained so: prompt and commits are causal, denoising is not."""
    model = with_diffusion(small(8), causal_clean=True)
    check_against_plain(model, 8)


def small(width, family="sdar_tiny"):
    """Two layers of random weights: what the second sees depends on whom the first attended."""
    config = load_case_model(ROOT / family, width).config
    return Decoder.random(dataclasses.replace(config, num_layers=2), seed=width)


# --- one program, several requests ----------------------------------------------------------------

ALONE = SamplingParams(max_new_tokens=21, temperature=0.8, top_p=0.9, seed=5)


def poisoned(state, row):
    """The state with NaN in the caches and nonsense in the settings of all rows but one."""
    others = np.arange(len(state.start)) != row
    spoil = lambda cache: jnp.where(others[:, None, None, None, None, None], jnp.nan, cache)
    seeds = jnp.where(others, 77, state.sampling.seed).astype(state.sampling.seed.dtype)
    return dataclasses.replace(
        state,
        layers=tuple(map(spoil, state.layers)),
        tokens=jnp.where(others[:, None], 17, state.tokens),
        sampling=dataclasses.replace(state.sampling, seed=seeds),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_batched_equals_alone_bit_for_bit(family):
    """Same program, same shapes: other rows at work, idle, or poisoned change no bit of a row."""
    model = load_case_model(ROOT / family, 8)
    dual = 4 if family == "fast_dllm_v2_tiny" else None
    engine = BlockEngine(model, config=BlockEngineConfig(dual_cache=dual))
    prompts = [prompt(19, 0), prompt(8, 1), prompt(30, 2)]
    requests = [SamplingParams(max_new_tokens=30), ALONE, SamplingParams(max_new_tokens=9)]
    rule = DenoiseParams("threshold_or_best", threshold=0.1, sub_block=4)

    def run(change):
        generation = engine.prepare(prompts, requests, rule)
        generation.prefill()
        change(generation)
        for _ in generation:
            pass
        cache = np.asarray(generation.state.layers[-1])[1, :, 0, :, :24]
        reasons = [result.finish_reason for result in generation.results()]
        assert list(generation.errors) == [i for i, why in enumerate(reasons) if why == "failed"]
        return generation.results(), cache, generation.report.narrow_forwards

    def idle(generation):
        generation.cancel(0)
        generation.cancel(2)

    def poison(generation):
        generation.state = poisoned(generation.state, 1)

    usual, cache, narrow = run(lambda _: None)
    (alone, quiet, _), (spoilt, dirty, _) = run(idle), run(poison)
    assert usual[1].tokens == alone[1].tokens == spoilt[1].tokens
    assert cache.tobytes() == quiet.tobytes() == dirty.tobytes()
    assert [r.finish_reason for r in alone] == ["cancelled", "length", "cancelled"]
    assert [r.finish_reason for r in spoilt] == ["failed", "length", "failed"]
    assert engine.decode_program().compilations == 1
    assert bool(narrow) == bool(dual)


class Letters:
    """A tokenizer whose every token is a character; its own stream decoder."""

    def stream_decoder(self):
        return self

    def push(self, token):
        return chr(1000 + token)


def test_chunked_prefill_many_blocks_a_call_and_stop_strings():
    """Chunked equals one-shot, three blocks a call equal one, and a stop string cuts the same."""
    model = small(8)
    prompts = [prompt(150, 0), prompt(64, 1)]
    requests = SamplingParams(max_new_tokens=20)
    engine = BlockEngine(model, config=BlockEngineConfig(prefill_chunk=512))
    whole, report = engine.generate(prompts, requests)
    settings = BlockEngineConfig(prefill_chunk=64, blocks_per_call=3, kv_block=16)
    chunked, _ = BlockEngine(model, config=settings).generate(prompts, requests)
    assert [r.tokens for r in whole] == [r.tokens for r in chunked]
    assert report.prefill_tokens == 144 + 64
    texts = ["".join(map(Letters().push, result.tokens)) for result in whole]
    stop = texts[0][4:6]  # inside a block
    found, _ = engine.generate(prompts, requests, stop=["absent", stop], tokenizer=Letters())
    cut = [text[: text.find(stop) + 2] if stop in text else text for text in texts]
    assert ["".join(map(Letters().push, result.tokens)) for result in found] == cut
    assert len(cut[0]) < 8
    assert found[0].finish_reason == "stop"


def test_edits_in_a_block_leave_earlier_blocks_as_they_are():
    """Block causality: KV of blocks before an edited one is bit-identical, that of its own not."""
    model, width = small(8), 8
    engine = BlockEngine(model)
    tokens = prompt(24, 3)
    caches = []
    for edited in (tokens, [*tokens[:17], 5, *tokens[18:]]):
        generation = engine.prepare([edited], SamplingParams(max_new_tokens=1))
        generation.prefill()
        caches.append(np.asarray(generation.state.layers[1])[0, :, 0])
    first, second = (cache[:, :, : 3 * width] for cache in caches)
    assert (first[:, :, :16] == second[:, :, :16]).all()
    assert (first[:, :, 16] != second[:, :, 16]).any()  # it sees token 17 behind it


# --- what is refused ------------------------------------------------------------------------------


def test_faults():
    model = small(8)
    engine = BlockEngine(model, config=BlockEngineConfig(max_length=64))
    ask = SamplingParams(max_new_tokens=8)
    cases = [
        ([], ask, None, "no prompt"),
        ([[]], ask, None, "prompt 0 is empty"),
        ([[256]], ask, None, "holds token 256, outside the vocabulary of 256"),
        ([prompt(58, 0)], ask, None, "58 tokens and asks for 8 more: in blocks of 8 these are 72"),
        ([[1]], ask, DenoiseParams(steps=9), "9 denoising steps exceed the block size of 8"),
        ([[1]], [ask, ask], None, "1 prompts but 2 sampling settings"),
        ([[1]], ask, [DenoiseParams()] * 2, "1 prompts but 2 denoising settings"),
    ]
    for prompts, sampling, rule, words in cases:
        with pytest.raises(ValueError, match=words):
            engine.prepare(prompts, sampling, rule)
    with pytest.raises(ValueError, match=r"stop strings \['x'\] need a tokenizer"):
        engine.prepare([[1]], ask, stop=["x"])
    dual = BlockEngine(model, config=BlockEngineConfig(dual_cache=4))
    with pytest.raises(ValueError, match=r"sub-blocks of 4 tokens, request 0 denoises in .* of 2"):
        dual.prepare([[1]], ask, DenoiseParams("threshold_or_best", sub_block=2))
    with pytest.raises(NotImplementedError, match="logprobs"):
        engine.prepare([[1]], SamplingParams(logprobs=2))
    with pytest.raises(NotImplementedError, match="blocks of 48 do not divide KV blocks of 64"):
        BlockEngine(with_diffusion(small(8), block_size=48))
    with pytest.raises(ValueError, match="trained for blocks of 8 tokens, not 16"):
        BlockEngine(small(8), config=BlockEngineConfig(block_size=16))
    with pytest.raises(ValueError, match="names no mask token"):
        BlockEngine(with_diffusion(small(8), mask_token_id=None))
    with pytest.raises(ValueError, match="KV of 1 x 1 blocks"):
        tight = BlockEngineConfig(device_kv_bytes=1000)
        BlockEngine(model, config=tight).prepare([[1]], ask)
    with pytest.raises(RuntimeError, match="prefill has not run"):
        next(iter(engine.prepare([[1]], ask)))
