"""Block decoding told plainly: no cache, no batch, one whole-sequence forward a step.

The slow twin of `decode.forward`, for greedy requests without the dual cache. Everything before the
block at work is computed anew under the block-causal mask, so it shares nothing with the cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from sparda_jax.config import SamplingParams
from sparda_jax.diffusion.config import DenoiseParams, diffusion_of
from sparda_jax.models.decoder import Decoder
from sparda_jax.typing import Array, Bool, Float, Int


@dataclasses.dataclass(frozen=True)
class PlainStep:
    """A denoising forward.

    Attributes:
        start: position of the block.
        tokens: of the block before the forward; masked ones hold the mask token.
        decided: positions decided after it.
    """

    start: int
    tokens: list[int]
    decided: list[int]


def decode_plainly(
    model: Decoder,
    prompt: Sequence[int],
    sampling: SamplingParams,
    rule: DenoiseParams,
    *,
    room: int | None = None,
) -> tuple[list[int], list[PlainStep]]:
    """New tokens, cut at the stop token and at the tokens asked for, and the steps that gave them.

    Args:
        model: parameters.
        prompt: token ids.
        sampling: greedy; its stop tokens and number of tokens count.
        rule: how blocks are denoised.
        room: tokens of the forward, padding included; None: as many as this request needs.
            Requests with the same share a compiled program.
    """
    facts, mask_token_id = diffusion_of(model.config)
    width, limit = facts.block_size, len(prompt) + sampling.max_new_tokens
    distribution = _distribution(model, room or -(-limit // width) * width + width)
    known, steps = list(prompt), []
    stops = lambda: [
        i for i, t in enumerate(known) if i >= len(prompt) and t in sampling.stop_token_ids
    ]

    def handover() -> None:
        """The first token of the next block, from the last row of the block before."""
        if facts.logit_shift and known and len(known) % width == 0:
            row = distribution(known, len(known) - width, clean=True)[-1]
            known.append(_best(row, mask_token_id))

    handover()
    while len(known) < limit and not stops():
        start = len(known) // width * width
        block: list[int | None] = [*known[start:]] + [None] * (width - len(known) + start)
        step = 0
        while None in block:
            filled = [mask_token_id if token is None else token for token in block]
            rows = distribution(known[:start] + filled, start, clean=False)
            if facts.logit_shift:
                rows = np.concatenate([rows[:1], rows[:-1]])
            tokens = [_best(row, mask_token_id) for row in rows]
            sure = [float(row[token]) for row, token in zip(rows, tokens, strict=True)]
            unsure = [float(-np.sum(row * np.log(np.maximum(row, 1e-300)))) for row in rows]
            open_ = [i for i, token in enumerate(block) if token is None]
            if rule.sub_block:
                open_ = [i for i in open_ if i // rule.sub_block == open_[0] // rule.sub_block]
            decided = choose_plainly(open_, sure, unsure, step, width, rule)
            steps.append(PlainStep(start, filled, decided))
            for i in decided:
                block[i] = tokens[i]
            step += 1
            ahead = block[: block.index(None)] if None in block else block
            if rule.early_limit and start + len(ahead) >= limit:
                block = [*ahead]
                break
            if rule.early_stop and any(
                token in sampling.stop_token_ids and start + i >= len(prompt)
                for i, token in enumerate(ahead)
            ):
                block = [*ahead]
                break
        known = known[:start] + [token for token in block if token is not None]
        if len(known) % width == 0 and not (rule.early_stop and stops()):
            handover()
    new = known[len(prompt) :][: sampling.max_new_tokens]
    stop = next((i for i, token in enumerate(new) if token in sampling.stop_token_ids), None)
    return (new if stop is None else new[: stop + 1]), steps


def choose_plainly(
    open_: list[int],
    sure: Sequence[float],
    unsure: Sequence[float],
    step: int,
    width: int,
    rule: DenoiseParams,
) -> list[int]:
    """Positions decided now, by the rules as `DenoiseParams` states them.

    Args:
        open_: masks that may be replaced, from left to right; at least one.
        sure: confidence of every position of the block.
        unsure: entropy of every position.
        step: steps done in this block.
        width: W.
        rule: which rule.
    """
    limit = rule.steps or width
    count = min(width // limit + (step < width % limit), len(open_))
    by_confidence = sorted(open_, key=lambda i: -sure[i])  # sorted keeps equal ones in order
    above = [i for i in open_ if sure[i] > rule.threshold]
    if rule.strategy == "sequential":
        return open_[:count]
    if rule.strategy == "low_confidence_static":
        return sorted(by_confidence[:count])
    if rule.strategy == "low_confidence_dynamic":
        return above if len(above) >= count else sorted(by_confidence[:count])
    if rule.strategy == "threshold_or_best":
        return sorted({*above, by_confidence[0]})
    if rule.strategy == "threshold_or_first":
        return sorted({*above, open_[0]})
    chosen: list[int] = []
    spent = 0.0
    for i in sorted(open_, key=lambda i: unsure[i]):
        spent += unsure[i]
        if chosen and spent >= rule.entropy_bound:
            break
        chosen.append(i)
    return sorted(chosen)


def _best(row: np.ndarray, mask_token_id: int) -> int:
    return int(np.argmax(np.where(np.arange(len(row)) == mask_token_id, -1.0, row)))


@partial(jax.jit, static_argnames=("width", "causal_clean"))
def _block_logits(
    model: Decoder,
    tokens: Int[Array, " S"],
    start: Int[Array, ""],
    clean: Bool[Array, ""],
    *,
    width: int,
    causal_clean: bool,
) -> Float[Array, "W V"]:
    """Logits of the block at `start`; what comes after it is not seen by it."""
    place = jnp.arange(len(tokens))
    block = place // width
    mask = block[:, None] >= block
    if causal_clean:
        live = (block == start // width) & ~clean
        mask &= live[:, None] | (place[:, None] >= place)
    return jax.lax.dynamic_slice_in_dim(model(tokens[None], mask=mask)[0], start, width)


def _distribution(model: Decoder, room: int) -> Callable[..., np.ndarray]:
    """Softmax of the rows of one block, float64, from a forward over everything up to it."""
    facts, _ = diffusion_of(model.config)
    static = {"width": facts.block_size, "causal_clean": facts.causal_clean}

    def distribution(tokens: list[int], start: int, *, clean: bool) -> np.ndarray:
        padded = np.zeros(room, np.int32)
        padded[: len(tokens)] = tokens
        logits = np.asarray(_block_logits(model, padded, start, clean, **static), np.float64)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)

    return distribution
