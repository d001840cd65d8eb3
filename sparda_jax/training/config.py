"""Settings of a training run and the optimizer they mean.

The published settings of SparDA (spec/sparda.md, sec. 5) are the defaults.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Self

import optax


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """How a run goes on, whatever is trained.

    Attributes:
        steps: optimizer steps of the whole run.
        batch: windows per optimizer step.
        micro_batch: windows per forward pass and device.
        learning_rate: constant between warm-up and decay.
        warmup_steps: steps of a linear rise from 0.
        decay_steps: steps of a linear fall to 0, the last ones.
        b1: of AdamW.
        b2: of AdamW.
        eps: of AdamW.
        weight_decay: of AdamW.
        clip: limit of the norm of the whole gradient.
        seed: of the initial weights and of the order of the windows.
        save_every: steps between checkpoints; the last step is saved in any case.
        keep: checkpoints kept.
        eval_every: steps between evaluations on held-out windows; 0: only after the last step.
        eval_windows: held-out windows used at most.
        max_length: the length that fixes LongRoPE's factors; None: what the model declares.
        explosion: the run stops when a loss exceeds the smallest so far by this factor.
    """

    steps: int = 2000
    batch: int = 32
    micro_batch: int = 1
    learning_rate: float = 5e-4
    warmup_steps: int = 0
    decay_steps: int = 0
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-6
    weight_decay: float = 0.01
    clip: float = 0.5
    seed: int = 42
    save_every: int = 50
    keep: int = 5
    eval_every: int = 0
    eval_windows: int = 16
    max_length: int | None = None
    explosion: float = 10.0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "micro_batch", "save_every", "keep", "eval_windows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("warmup_steps", "decay_steps", "eval_every", "weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("learning_rate", "clip", "eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        if self.warmup_steps + self.decay_steps > self.steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} and decay_steps {self.decay_steps} exceed "
                f"{self.steps} steps"
            )
        if not self.explosion > 1:
            raise ValueError(f"explosion must be above 1, got {self.explosion}")

    def of_program(self) -> Self:
        """The same but for what no compiled program depends on: so several runs share theirs."""
        steps = self.steps if self.warmup_steps or self.decay_steps else 1
        rest: dict[str, Any] = {"save_every": 1, "keep": 1, "eval_every": 0, "eval_windows": 1}
        return dataclasses.replace(self, steps=steps, seed=0, explosion=math.inf, **rest)


def learning_rate_of(config: RunConfig) -> float | optax.Schedule:
    """Linear rise, constant, linear fall; a number where it is constant throughout."""
    peak, rise, fall = config.learning_rate, config.warmup_steps, config.decay_steps
    if not rise and not fall:
        return peak
    linear = optax.schedules.linear_schedule
    # A linear schedule ends in its last value, but one of no steps is its first.
    start = linear(0.0, peak, rise) if rise else optax.schedules.constant_schedule(peak)
    return optax.schedules.join_schedules([start, linear(peak, 0.0, fall)], [config.steps - fall])


def optimizer_of(config: RunConfig) -> optax.GradientTransformation:
    """Clipping by the global norm, then AdamW."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            learning_rate_of(config),
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
        ),
    )
