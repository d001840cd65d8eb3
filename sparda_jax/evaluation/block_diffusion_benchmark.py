"""Block diffusion measured: quality of samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from sparda_jax.config import SamplingParams
from sparda_jax.diffusion.config import DenoiseParams, Strategy
from sparda_jax.diffusion.generate import BlockEngine
from sparda_jax.diffusion.plan import BlockEngineConfig
from sparda_jax.evaluation.kernel_benchmarks.harness import Row, Timing
from sparda_jax.evaluation.sample_quality import SampleQuality, causal_quality, diffusion_quality
from sparda_jax.models.decoder import Decoder

# The gate of the shipped adapter: perplexity of samples over that of the causal model's own.
GATE = 1.5


@dataclasses.dataclass(frozen=True)
class Sampling:
    """What is sampled.

    Attributes:
        prompts: of one length.
        new_tokens: of each.
        temperatures: for both models.
        thresholds: of the rule.
        strategy: of the rule.
        sub_block: of the rule.
    """

    prompts: Sequence[Sequence[int]]
    new_tokens: int
    temperatures: Sequence[float]
    thresholds: Sequence[float]
    strategy: Strategy
    sub_block: int | None


def sample_rows(causal: Decoder, diffusion: Decoder, plan: Sampling) -> Iterator[Row]:
    """Perplexity of both models' samples under the causal one; the rest as details.

    Args:
        causal: the model that the adapter was trained on; also the judge.
        diffusion: with the adapter.
        plan: what is sampled.
    """
    length = len(plan.prompts[0]) + plan.new_tokens + 64
    engine = BlockEngine(diffusion, config=BlockEngineConfig(max_length=length))
    for temperature in plan.temperatures:
        requests = [
            SamplingParams(max_new_tokens=plan.new_tokens, temperature=temperature, seed=seed)
            for seed in range(len(plan.prompts))
        ]
        own = causal_quality(causal, plan.prompts, requests)
        yield _sample_row(f"samples/causal/t{temperature:g}", own, None, len(plan.prompts))
        for threshold in plan.thresholds:
            rule = DenoiseParams(plan.strategy, threshold=threshold, sub_block=plan.sub_block)
            found = diffusion_quality(engine, causal, plan.prompts, requests, rule)
            name = f"samples/{plan.strategy}/t{temperature:g}/{threshold:g}"
            yield _sample_row(name, found, own, len(plan.prompts))
            speed = Timing.exact(found.tokens_per_second, len(plan.prompts))
            yield Row(f"{name}/speed", speed, "tok/s", "higher")


def _sample_row(name: str, found: SampleQuality, own: SampleQuality | None, count: int) -> Row:
    details = {f"distinct_{n}": share for n, share in found.distinct.items()}
    target = None
    if own is not None:
        target = GATE * own.perplexity
        details |= {
            "of_causal": found.perplexity / own.perplexity,
            "distinct_2_of_causal": found.distinct[2] / own.distinct[2],
            "tokens_per_forward": found.tokens_per_forward,
        }
        blocks = np.repeat(list(found.steps), list(found.steps.values()))
        quarters = np.percentile(blocks, (10, 50, 90))
        details |= {f"steps_p{p}": q for p, q in zip((10, 50, 90), quarters, strict=True)}
    value = found.perplexity
    timing = Timing.exact(value, count)
    return Row(name, timing, "perplexity", "lower", target=target, details=details)
