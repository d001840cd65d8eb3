"""How a block is denoised: settings of a request, validated when built."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, get_args

import jax
import numpy as np

from sparda_jax.config import DiffusionConfig, ModelConfig
from sparda_jax.typing import Array, Bool, Float, Int

Strategy = Literal[
    "sequential",
    "low_confidence_static",
    "low_confidence_dynamic",
    "entropy_bounded",
    "threshold_or_best",
    "threshold_or_first",
]
STRATEGIES: tuple[str, ...] = get_args(Strategy)


@dataclasses.dataclass(frozen=True)
class DenoiseParams:
    """Which masks of a block a denoising step replaces (spec/herald.md, sec. 2.3 to 2.5).

    s_i = W // U, one more in the first W mod U steps, never more than there are masks left. The
    confidence of a position is the softmax probability of its token, whatever the temperature.

    Attributes:
        strategy: "sequential": the leftmost s_i masks; "low_confidence_static": the s_i most
            confident; "low_confidence_dynamic": all above the threshold if these are at least
            s_i, else the s_i most confident (SDAR, LLaDA2); "entropy_bounded": as many of the
            least uncertain as keep their summed entropy below the bound, at least one;
            "threshold_or_best": all above the threshold and the most confident (Fast-dLLM v2);
            "threshold_or_first": all above the threshold and the leftmost mask, which keeps the
            order of a causal model where it is not sure (ours).
        steps: U, steps that a block takes at most; None: W. Counts in the first three.
        threshold: a confidence must exceed it; 1 is exceeded by none.
        entropy_bound: nats.
        sub_block: denoise the block in parts of so many tokens, from left to right; None: at once.
        early_stop: end as soon as a stop token has no mask before it, not at the block's end.
        early_limit: end as soon as all tokens asked for are decided, not at the block's end.
        edit_threshold: of LLaDA2.1's token editing, which is refused; None: no editing.
    """

    strategy: Strategy = "low_confidence_dynamic"
    steps: int | None = None
    threshold: float = 0.9
    entropy_bound: float = 0.35
    sub_block: int | None = None
    early_stop: bool = False
    early_limit: bool = False
    edit_threshold: float | None = None

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(
                f"unknown strategy {self.strategy!r}, expected one of {', '.join(STRATEGIES)}"
            )
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"denoising steps must be at least 1, got {self.steps}")
        if not 0 < self.threshold <= 1:
            raise ValueError(f"threshold must be in (0, 1], got {self.threshold}")
        if not self.entropy_bound > 0:
            raise ValueError(f"entropy_bound must be positive, got {self.entropy_bound}")
        if self.sub_block is not None and self.sub_block < 1:
            raise ValueError(f"sub_block must be at least 1, got {self.sub_block}")
        if self.edit_threshold is not None:
            raise NotImplementedError(
                f"edit_threshold {self.edit_threshold}: token editing (LLaDA2.1) is not supported: "
                "it revises tokens whose keys and values are cached; decode without it"
            )

    @classmethod
    def of_family(cls, config: ModelConfig) -> DenoiseParams:
        """The settings that a family's authors publish; of models of our own training, ours."""
        if config.family == "sdar":
            return cls("low_confidence_dynamic", threshold=0.9)
        if config.family == "llada2":
            return cls("low_confidence_dynamic", threshold=0.95)
        if config.family == "fast_dllm":
            return cls("threshold_or_best", threshold=0.9, sub_block=8, early_stop=True)
        return cls("threshold_or_first", threshold=0.9, early_stop=True, early_limit=True)

    def check(self, block_size: int) -> None:
        """Compares the settings with a block size.

        Raises:
            ValueError: more steps than tokens in a block, or sub-blocks that do not divide it.
        """
        if self.steps is not None and self.steps > block_size:
            raise ValueError(
                f"{self.steps} denoising steps exceed the block size of {block_size}: "
                "every step decides at least one token"
            )
        if self.sub_block is not None and block_size % self.sub_block:
            raise ValueError(f"sub_block {self.sub_block} does not divide block size {block_size}")


def diffusion_of(config: ModelConfig) -> tuple[DiffusionConfig, int]:
    """What block diffusion needs of a model: its facts and the mask token.

    Raises:
        ValueError: an autoregressive model, or a checkpoint that names no mask token.
    """
    facts = config.diffusion
    if facts is None:
        raise ValueError(f"a {config.family} model without block diffusion: it has no mask token")
    mask = facts.mask_token_id
    if mask is None:
        raise ValueError(
            f"this {config.family} checkpoint names no mask token: state "
            "config.diffusion.mask_token_id"
        )
    return facts, mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RuleState:
    """`DenoiseParams` of a batch, as arrays: one program serves every rule.

    Attributes:
        strategy: index into `STRATEGIES`.
        steps: U.
        threshold: of confidence.
        entropy_bound: nats.
        sub_block: tokens; W where a block is denoised at once.
        early_stop: end at a stop token inside a block.
        early_limit: end at the last token asked for inside a block.
    """

    strategy: Int[Array, " B"]
    steps: Int[Array, " B"]
    threshold: Float[Array, " B"]
    entropy_bound: Float[Array, " B"]
    sub_block: Int[Array, " B"]
    early_stop: Bool[Array, " B"]
    early_limit: Bool[Array, " B"]


def rule_fields(params: Sequence[DenoiseParams], block_size: int) -> dict[str, np.ndarray]:
    """The fields of `RuleState` for a batch, on the host."""
    for one in params:
        one.check(block_size)
    return {
        "strategy": np.array([STRATEGIES.index(one.strategy) for one in params], np.int32),
        "steps": np.array([one.steps or block_size for one in params], np.int32),
        "threshold": np.array([one.threshold for one in params], np.float32),
        "entropy_bound": np.array([one.entropy_bound for one in params], np.float32),
        "sub_block": np.array([one.sub_block or block_size for one in params], np.int32),
        "early_stop": np.array([one.early_stop for one in params], bool),
        "early_limit": np.array([one.early_limit for one in params], bool),
    }
