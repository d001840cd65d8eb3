"""A tiny block-diffusion model, prompts, and runs that keep what the host holds at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from host_offload.cpu_selection import SelectionRule
from sparda_jax.config import DiffusionConfig, ModelConfig, RopeConfig, SamplingParams
from sparda_jax.diffusion.config import DenoiseParams
from sparda_jax.herald.config import Budget, HeraldConfig
from sparda_jax.herald.engine import HeraldEngine
from sparda_jax.herald.report import HeraldReport
from sparda_jax.herald.requests import Request
from sparda_jax.herald.session import HeraldSession
from sparda_jax.models.decoder import Decoder

WIDTH, VOCABULARY, LAYERS = 8, 61, 2
SAMPLING = SamplingParams(max_new_tokens=27)
RULE = DenoiseParams("low_confidence_dynamic", steps=3, threshold=0.9)
# Row 0 begins a block, row 1 ends with all but one token of one, row 2 is shorter than a block.
LENGTHS = (48, 39, 5)


def make_model(**fields: Any) -> Decoder:
    config = ModelConfig(
        family="sdar",
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_layers=LAYERS,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope=RopeConfig(16),
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        diffusion=DiffusionConfig(WIDTH, VOCABULARY - 1),
    )
    model = Decoder.random(dataclasses.replace(config, **fields), seed=5)
    for layer in model.layers:  # few rows matter, so that it matters which
        layer.q.kernel[...] = layer.q.kernel[...] * 5
    return model


def make_prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY - 1, length).tolist() for length in lengths]


@dataclasses.dataclass
class Run:
    """What came of some requests.

    Attributes:
        requests: as they ended.
        report: of the session.
        rows: by request, keys and values `[2, L, K, rows, H]` on the host of all committed rows.
    """

    requests: list[Request]
    report: HeraldReport
    rows: list[np.ndarray]

    @property
    def tokens(self) -> list[list[int]]:
        return [request.tokens for request in self.requests]


@pytest.fixture(scope="module")
def base() -> HeraldEngine:
    """Whose compiled programs all engines of a module share; it attends few rows."""
    return HeraldEngine(make_model(), config=settings(rule=SelectionRule(coverage=0.5)))


def settings(**fields: Any) -> HeraldConfig:
    """Pools that can hold all rows: with a coverage fewer are chosen, in the same programs."""
    common = {"init_rows": 4, "kv_block": WIDTH, "prefill_chunk": 32, "workers": 2}
    return HeraldConfig(**({"budget": Budget(share=1.0)} | common | fields))


def run(
    engine: HeraldEngine,
    prompts: list[list[int]],
    *,
    batch: int | None = None,
    each_turn: Callable[[HeraldSession], None] = lambda session: None,
) -> Run:
    """Runs requests with the settings of this file."""
    plan = engine.plan(prompts, [SAMPLING] * len(prompts))
    requests = [
        Request(number, prompt, SAMPLING, RULE, engine.model.config)
        for number, prompt in enumerate(prompts)
    ]
    waiting, rows = list(requests), {}
    with HeraldSession(engine, batch or len(prompts), plan) as session:
        while waiting or session.busy:
            while waiting and session.free:
                session.admit(waiting.pop(0))
            before = list(session.requests)
            session.turn()
            each_turn(session)
            if session.store is not None:
                session._settle_commits()
                for row, request in enumerate(before):
                    if request is not None:
                        rows[request.number] = host_rows(session, row, request.start)
    return Run(requests, session.report, [rows[n] for n in sorted(rows)])


def host_rows(session: HeraldSession, row: int, count: int) -> np.ndarray:
    """A copy of one request's committed rows."""
    store, shape = session.store, session.store.shape
    ids = np.tile(np.arange(count), (shape.heads, 1))
    out = np.empty((shape.layers, shape.heads, 2, count, shape.width), shape.dtype)
    for layer in range(shape.layers):
        store.gather(layer, row, ids, out[layer], granule=1, run=1)
    return np.moveaxis(out, 2, 0)


def cache_rows(cache: jax.Array, row: int, count: int) -> np.ndarray:
    """[B, K, M, 2, P, H] -> one request's first rows, [2, K, count, H]."""
    own = np.asarray(cache)[row]
    return np.moveaxis(own, 2, 0).reshape(2, own.shape[0], -1, own.shape[-1])[:, :, :count]
