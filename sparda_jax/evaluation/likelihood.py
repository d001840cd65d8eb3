"""Log-probabilities of given tokens, by the engine's own prefill, in any of its modes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
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
        divergence: `float32[T - 1]`, KL of the prediction of token t from the reference's, nats; 0
            without one.
    """

    log_p: np.ndarray
    likeliest: np.ndarray
    divergence: np.ndarray


def score_sequences(
    engine: Engine, rows: Sequence[Sequence[int]], reference: Engine | None = None
) -> list[TokenScores]:
    """Scores every token of a batch of sequences.

    The sequences run as prompts do: in chunks, in the engine's mode, their KV to where it stays. In
    mode "infinigen" a prompt is attended as in "sparse", so its scores are those of "sparse".

    Args:
        engine: see there; its `length_step` bounds the shapes that are compiled.
        rows: token ids, at least two each.
        reference: of the same model, in the mode that predictions are compared with.

    Raises:
        ValueError: a row of fewer than two tokens, or beyond the engine's limits.
    """
    short = next((number for number, row in enumerate(rows) if len(row) < 2), None)
    if short is not None:
        raise ValueError(f"sequence {short} has {len(rows[short])} token, scores need two")
    x = _hidden_states(engine, rows)
    theirs = x if reference is None else _hidden_states(reference, rows)
    targets, _ = pad_prompts([row[1:] for row in rows], x.shape[1])
    scores = score_tokens(engine.model, x, theirs, jnp.asarray(targets))
    log_p, divergence, likeliest = map(np.asarray, scores)
    parts = lambda i, row: (array[i, : len(row) - 1] for array in (log_p, likeliest, divergence))
    return [TokenScores(*parts(i, row)) for i, row in enumerate(rows)]


def _hidden_states(engine: Engine, rows: Sequence[Sequence[int]]) -> jax.Array:
    """After the last layer, of all tokens but the last, which is a target only."""
    prompts = [row[:-1] for row in rows]
    generation = engine.prepare(prompts, SamplingParams(max_new_tokens=1))
    x, _, _ = PromptRun(engine, generation.plan, generation.pool)(prompts, None)
    return x
