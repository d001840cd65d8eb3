"""Log-probabilities of given tokens, by the engine's own prefill, in any of its modes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from sparda_jax.config import SamplingParams
from sparda_jax.engine.generate import Engine
from sparda_jax.engine.plan import pad_prompts
from sparda_jax.engine.prompts import PromptRun
from sparda_jax.evaluation.language import score_tokens


@dataclasses.dataclass(frozen=True)
class TokenScores:
    """What the model says of a sequence's tokens but the first.

    Attributes:
        log_p: `float32[T - 1]`, of token t given those before it.
        likeliest: `bool[T - 1]`, whether greedy decoding would have drawn it.
    """

    log_p: np.ndarray
    likeliest: np.ndarray


def score_sequences(engine: Engine, rows: Sequence[Sequence[int]]) -> list[TokenScores]:
    """Scores every token of a batch of sequences.

    The sequences run as prompts do: in chunks, in the engine's mode, their KV to where it stays. In
    mode "infinigen" a prompt is attended as in "sparse", so its scores are those of "sparse".

    Args:
        engine: see there; its `length_step` bounds the shapes that are compiled.
        rows: token ids, at least two each.

    Raises:
        ValueError: a row of fewer than two tokens, or beyond the engine's limits.
    """
    short = next((number for number, row in enumerate(rows) if len(row) < 2), None)
    if short is not None:
        raise ValueError(f"sequence {short} has {len(rows[short])} token, scores need two")
    # The last token is a target only.
    prompts = [row[:-1] for row in rows]
    generation = engine.prepare(prompts, SamplingParams(max_new_tokens=1))
    x, _, _ = PromptRun(engine, generation.plan, generation.pool)(prompts, None)
    targets, _ = pad_prompts([row[1:] for row in rows], x.shape[1])
    log_p, _, likeliest = score_tokens(engine.model, x, x, jnp.asarray(targets))
    log_p, likeliest = np.asarray(log_p), np.asarray(likeliest)
    return [
        TokenScores(log_p[i, : len(row) - 1], likeliest[i, : len(row) - 1])
        for i, row in enumerate(rows)
    ]
