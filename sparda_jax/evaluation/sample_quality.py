"""Quality of sampled text: perplexity under a causal model, and how much it repeats itself.

Low perplexity alone is easy: text that repeats itself has it. So it goes with the share of distinct
n-grams, and both are compared with the causal model's own samples at the same settings.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from sparda_jax.config import EngineConfig, SamplingParams
from sparda_jax.diffusion.config import DenoiseParams
from sparda_jax.diffusion.generate import BlockEngine
from sparda_jax.diffusion.loss import cross_entropy
from sparda_jax.engine.generate import Engine
from sparda_jax.models.decoder import Decoder
from sparda_jax.typing import Array, Float, Int

# Rows whose logits exist at a time.
CHUNK_ROWS = 1024


@dataclasses.dataclass(frozen=True)
class SampleQuality:
    """Figures of a set of continuations.

    Attributes:
        perplexity: exp of the mean negative log-probability of a token, given prompt and text.
        distinct: share of distinct n-grams within a continuation, mean over continuations, by n.
        steps: blocks by the denoising forwards they took; empty for causal sampling.
        tokens_per_forward: of a request, commits included; 1 for causal sampling.
        tokens_per_second: of decode, all requests together.
    """

    perplexity: float
    distinct: dict[int, float]
    steps: dict[int, int]
    tokens_per_forward: float
    tokens_per_second: float


@partial(jax.jit, static_argnames="skip")
def _losses(model: Decoder, tokens: Int[Array, "B T"], *, skip: int) -> Float[Array, ""]:
    hidden = model.hidden(tokens)
    weights = jnp.broadcast_to(jnp.arange(1, tokens.shape[1]) >= skip, tokens[:, 1:].shape)
    entropy, _, _ = cross_entropy(
        model, hidden[:, :-1], tokens[:, 1:], weights.astype(jnp.float32), None, CHUNK_ROWS
    )
    return entropy


def perplexity(
    model: Decoder, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> float:
    """Of continuations under a causal model; prompts of one length, continuations likewise."""
    rows = np.array([[*p, *t] for p, t in zip(prompts, texts, strict=True)], np.int32)
    count = sum(map(len, texts))
    return math.exp(float(_losses(model, rows, skip=len(prompts[0]))) / count)


def distinct_share(texts: Sequence[Sequence[int]], n: int) -> float:
    """Distinct n-grams of a text by all its n-grams, mean over texts."""
    shares = []
    for text in texts:
        grams = list(zip(*(text[i:] for i in range(n)), strict=False))
        shares.append(len(set(grams)) / len(grams))
    return float(np.mean(shares))


def causal_quality(
    model: Decoder, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]
) -> SampleQuality:
    """The causal model's own samples, judged by itself."""
    longest = max(len(p) + s.max_new_tokens for p, s in zip(prompts, sampling, strict=True))
    config = EngineConfig(mode="dense", max_length=longest, steps_per_call=64)
    results, report = Engine(model, config=config).generate(prompts, sampling)
    texts = [result.tokens for result in results]
    speed = report.decode_tokens_per_second
    return SampleQuality(perplexity(model, prompts, texts), _distinct(texts), {}, 1.0, speed)


def diffusion_quality(
    engine: BlockEngine,
    judge: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
    denoise: DenoiseParams,
) -> SampleQuality:
    """Samples of a block-diffusion model, judged by a causal one; timed the second time."""
    engine.generate(prompts, sampling, denoise)
    results, report = engine.generate(prompts, sampling, denoise)
    texts = [result.tokens for result in results]
    return SampleQuality(
        perplexity(judge, prompts, texts),
        _distinct(texts),
        dict(sorted(report.steps.items())),
        report.tokens_per_forward,
        report.decode_tokens_per_second,
    )


def _distinct(texts: Sequence[Sequence[int]]) -> dict[int, float]:
    return {n: distinct_share(texts, n) for n in (1, 2, 3, 4)}
