"""Requests that come and go on a GPU: what a prompt leaves in the host pool, and draws.

On a GPU a chunk runs beside the copies of its blocks to the pool and of known ones back.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.config import EngineConfig, SamplingParams, SparseConfig
from sparda_jax.engine.generate import Engine
from sparda_jax.engine.scheduler import Scheduler
from sparda_jax.engine.service import SchedulerConfig
from sparda_jax.forecast.projection import Forecast
from sparda_jax.models.decoder import Decoder
from tests.gpu.models import small_model

pytestmark = pytest.mark.gpu

CONFIG, BLOCK = small_model(997), 64
DOCUMENT, CHUNK = 3000, 1024
ASKED = SamplingParams(max_new_tokens=20, logprobs=1)


def relative(got, expected):
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def test_pages_and_tokens_are_those_of_a_batch():
    """Two questions on each of two documents, the second on what the first left."""
    bfloat16 = jnp.dtype("bfloat16")
    settings = {"mode": "sparda", "offload": "host", "top_logprobs": 1}
    engine = Engine(
        Decoder.random(CONFIG, seed=3, dtype=bfloat16),
        sparse=SparseConfig(local_blocks=2, budget_blocks=8),
        config=EngineConfig(prefill_chunk=CHUNK, max_length=3200, **settings),
        forecast=Forecast.random(CONFIG, seed=4, dtype=bfloat16),
    )
    scheduler = Scheduler(engine, SchedulerConfig(rows=2))
    rng = np.random.default_rng(0)
    for _ in range(2):
        document = rng.integers(0, 997, DOCUMENT).tolist()
        for question, known in ((20, 0), (40, 2880)):  # of 2,944 - 62 tokens, in pieces of 64
            prompt = [*document, *rng.integers(0, 997, question).tolist()]
            handle = scheduler.submit(prompt, ASKED)
            while handle.phase != "decode":
                scheduler.step()
            assert handle.cached_tokens == known
            whole = len(prompt) // BLOCK
            pages = scheduler.rows.pages.table[scheduler._owners.index(handle), :whole]
            pool = scheduler.rows.pool
            found = [np.asarray(pool.view(layer)[pages, :, 0], np.float32) for layer in range(3)]
            generation = engine.prepare([prompt], ASKED)
            generation.prefill()
            for layer, got in enumerate(found):
                expected = np.asarray(generation.pool.view(layer)[0][:, :whole], np.float32)
                expected = expected.swapaxes(0, 1)
                # A block chosen otherwise by rounding changes the layers behind it a little; a
                # page that was not written, or is another's, is wrong by as much as it is large.
                assert relative(got, expected) < (0.01 if layer == 0 else 0.05)
                assert max(map(relative, got, expected)) < 0.3
            drawn = generation._first[0].likelihoods[0].drawn
            assert abs(handle.result().likelihoods[0].drawn - drawn) < 0.1
