"""Trains the Forecast projections of a frozen model.

One optimizer step is a program of its own: micro-batches are scanned, gradients averaged in
float32, clipped, and given to AdamW with float32 master weights. The state after step n is a
function of seed, data and settings alone, so a resumed run ends in the same bits (on the same
kind of device). Published settings (spec/sparda.md, sec. 5) are the defaults.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from sparda_jax.checkpoints.forecast import model_fingerprint
from sparda_jax.forecast.data import Windows, batch_at
from sparda_jax.forecast.loss import LossConfig, forecast_loss
from sparda_jax.forecast.projection import Forecast
from sparda_jax.models.decoder import Decoder
from sparda_jax.typing import Array, Int


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How to train.

    Attributes:
        loss: what is distilled.
        steps: optimizer steps of the whole run.
        batch: windows per optimizer step.
        micro_batch: windows per forward pass; a divisor of `batch`.
        learning_rate: constant after the warm-up.
        warmup_steps: steps of a linear rise from 0.
        b1: of AdamW.
        b2: of AdamW.
        eps: of AdamW.
        weight_decay: of AdamW.
        clip: limit of the gradient's norm over all projections.
        seed: of the initial weights and of the order of the windows.
        save_every: steps between checkpoints; the last step is saved in any case.
        keep: checkpoints kept.
        eval_every: steps between evaluations on held-out windows; 0: only after the last step.
        eval_windows: held-out windows used at most.
        max_length: the length that fixes LongRoPE's factors; None: what the model declares.
        explosion: the run stops when a loss exceeds the smallest so far by this factor.
    """

    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    steps: int = 2000
    batch: int = 32
    micro_batch: int = 1
    learning_rate: float = 5e-4
    warmup_steps: int = 0
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
        for name in ("warmup_steps", "eval_every", "weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("learning_rate", "clip", "eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        if not self.explosion > 1:
            raise ValueError(f"explosion must be above 1, got {self.explosion}")
        if self.batch % self.micro_batch:
            raise ValueError(f"batch {self.batch} is not a multiple of {self.micro_batch}")


class TrainingDiverged(RuntimeError):
    """The loss is not finite or exploded; the checkpoints before are kept."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a checkpoint holds.

    Attributes:
        step: optimizer steps done.
        params: the projections, float32.
        optimizer: AdamW's moments and count.
    """

    step: Array
    params: nnx.State
    optimizer: optax.OptState


@dataclasses.dataclass(frozen=True)
class Progress:
    """What is known after a step; `record` is the line that went to the metrics file."""

    record: dict[str, Any]
    seconds_left: float


def optimizer_of(config: TrainConfig) -> optax.GradientTransformation:
    """Clipping by the global norm, then AdamW."""
    rate = optax.schedules.linear_schedule(0.0, config.learning_rate, config.warmup_steps)
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            rate if config.warmup_steps else config.learning_rate,
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
        ),
    )


def initial_state(model: Decoder, config: TrainConfig) -> TrainState:
    """Untrained projections and an empty optimizer."""
    params = nnx.state(Forecast.random(model.config, seed=config.seed))
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer_of(config).init(params))


def forecast_of(model: Decoder, state: TrainState) -> Forecast:
    """The projections of a state, float32."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: Forecast.random(model.config)))
    return nnx.merge(graph, state.params)


@partial(jax.jit, static_argnames=("config", "graph"), donate_argnames="state")
def train_step(
    model: Decoder,
    state: TrainState,
    tokens: Int[Array, "A B T"],
    *,
    config: TrainConfig,
    graph: nnx.GraphDef,
) -> tuple[TrainState, dict[str, Array]]:
    """One optimizer step over A micro-batches."""

    def loss(params: nnx.State, micro: Array) -> tuple[Array, Any]:
        return forecast_loss(
            model, nnx.merge(graph, params), micro, config.loss, max_length=config.max_length
        )

    def accumulate(carry: Any, micro: Array) -> tuple[Any, None]:
        (value, output), gradient = jax.value_and_grad(loss, has_aux=True)(state.params, micro)
        new = (value, output.free.sum(), output.recalled.sum(), gradient)
        return jax.tree.map(jnp.add, carry, new), None

    zero = jnp.zeros((), jnp.float32)
    start = (zero, zero, zero, jax.tree.map(jnp.zeros_like, state.params))
    (value, free, recalled, gradient), _ = jax.lax.scan(accumulate, start, tokens)
    gradient = jax.tree.map(lambda g: g / len(tokens), gradient)
    updates, optimizer = optimizer_of(config).update(gradient, state.optimizer, state.params)
    params: nnx.State = optax.apply_updates(state.params, updates)  # type: ignore[assignment]
    metrics = {
        "loss": value / len(tokens),
        "recall": recalled / jnp.maximum(free, 1),
        "gradient_norm": optax.tree.norm(gradient),
    }
    return TrainState(state.step + 1, params, optimizer), metrics


@partial(jax.jit, static_argnames=("config", "graph"))
def evaluate_window(
    model: Decoder, params: nnx.State, tokens: Array, *, config: TrainConfig, graph: nnx.GraphDef
) -> tuple[Array, Array, Array]:
    """Loss, free and recalled blocks of windows `[B, T]`."""
    loss, output = forecast_loss(
        model, nnx.merge(graph, params), tokens, config.loss, max_length=config.max_length
    )
    return loss, output.free.sum(), output.recalled.sum()


class Trainer:
    """A run in a folder: checkpoints, `metrics.jsonl`, and the loop over steps.

    Args:
        model: the frozen backbone.
        config: how to train.
        train: windows to train on.
        held_out: windows to evaluate on; may be empty.
        folder: of the run; one that holds checkpoints is continued.

    Raises:
        ValueError: no window to train on; a folder whose run had other settings, data or model.
    """

    def __init__(
        self,
        model: Decoder,
        config: TrainConfig,
        train: Windows,
        held_out: Windows,
        folder: str | Path,
    ):
        if not len(train):
            raise ValueError("no window to train on: the text is shorter than one window")
        self.model, self.config, self.train, self.held_out = model, config, train, held_out
        self.folder = Path(folder)
        self.graph, _ = nnx.split(nnx.eval_shape(lambda: Forecast.random(model.config)))

    @property
    def settings(self) -> dict[str, Any]:
        """What a resumed run must have in common with the first."""
        config = dataclasses.asdict(self.config)
        free = ("save_every", "keep", "eval_every", "eval_windows", "explosion")
        return {
            "config": {name: value for name, value in config.items() if name not in free},
            "model": model_fingerprint(self.model),
            "windows": list(self.train.tokens.shape),
            "data": _digest(self.train.tokens),
        }

    def run(self, report: Callable[[Progress], None] = lambda _: None) -> TrainState:
        """Trains to the last step, from the newest checkpoint if there is one.

        Raises:
            TrainingDiverged: a loss that is not finite, or exploded; nothing of that step is saved.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with _manager(self.folder, self.config) as manager:
            state = self._restore(manager)
            first = int(state.step)
            begun, smallest = time.monotonic(), math.inf
            for step in range(first, self.config.steps):
                state, metrics = self._step(state, step)
                record = {"step": step + 1} | {name: float(v) for name, v in metrics.items()}
                # Read back before anything is saved: a bad step must not become a checkpoint.
                if not all(math.isfinite(value) for value in record.values()):
                    raise TrainingDiverged(f"step {step + 1}: loss or gradient is not finite")
                if record["loss"] > self.config.explosion * smallest:
                    raise TrainingDiverged(
                        f"step {step + 1}: loss {record['loss']:.4g} is over "
                        f"{self.config.explosion:g} times the smallest, {smallest:.4g}"
                    )
                smallest = min(smallest, record["loss"])
                last = step + 1 == self.config.steps
                every = self.config.eval_every
                if len(self.held_out) and (last or (every and (step + 1) % every == 0)):
                    record |= self.evaluate(state)
                done, seconds = step + 1 - first, time.monotonic() - begun
                record["tokens_per_second"] = done * self._tokens_per_step() / seconds
                self._write(record)
                if last or (step + 1) % self.config.save_every == 0:
                    _save(manager, state, self.settings)
                report(Progress(record, seconds / done * (self.config.steps - step - 1)))
        return state

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Mean loss and recall over held-out windows."""
        rows = self.held_out.tokens[: self.config.eval_windows]
        parts = [
            evaluate_window(
                *(self.model, state.params, jnp.asarray(row[None])),
                config=self.config,
                graph=self.graph,
            )
            for row in rows
        ]
        loss, free, recalled = (float(sum(part)) for part in zip(*parts, strict=True))
        return {"held_out_loss": loss / len(rows), "held_out_recall": recalled / max(free, 1.0)}

    def plan(self) -> dict[str, float]:
        """What a run needs, from the compiled step and one timed step; nothing is written."""
        state = initial_state(self.model, self.config)
        tokens = self._tokens(0)
        compiled = train_step.lower(
            self.model, state, tokens, config=self.config, graph=self.graph
        ).compile()
        memory: Any = compiled.memory_analysis()
        state, metrics = compiled(self.model, state, tokens)
        jax.block_until_ready(metrics)
        begun = time.monotonic()
        state, metrics = compiled(self.model, state, tokens)
        jax.block_until_ready(metrics)
        seconds = time.monotonic() - begun
        return {
            "argument_bytes": memory.argument_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
            "seconds_per_step": seconds,
            "seconds": seconds * self.config.steps,
            "tokens_per_second": self._tokens_per_step() / seconds,
        }

    def _step(self, state: TrainState, step: int) -> tuple[TrainState, dict[str, Array]]:
        return train_step(
            self.model, state, self._tokens(step), config=self.config, graph=self.graph
        )

    def _tokens(self, step: int) -> Array:
        config = self.config
        rows = batch_at(self.train, step, config.batch, config.seed)
        return jnp.asarray(rows.reshape(-1, config.micro_batch, rows.shape[1]))

    def _tokens_per_step(self) -> int:
        return self.config.batch * self.train.tokens.shape[1]

    def _restore(self, manager: Any) -> TrainState:
        state = initial_state(self.model, self.config)
        newest = manager.latest_step()
        if newest is not None:
            state = _load(manager, newest, state, self.settings)
        kept = [line for line in self._lines() if json.loads(line)["step"] <= int(state.step)]
        self._metrics.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        return state

    @property
    def _metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    def _lines(self) -> list[str]:
        """Whole lines of the metrics file; a killed run may have left a torn one."""
        if not self._metrics.is_file():
            return []
        return self._metrics.read_text(encoding="utf-8").split("\n")[:-1]

    def _write(self, record: dict[str, Any]) -> None:
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _digest(tokens: np.ndarray) -> str:
    import hashlib

    return hashlib.sha256(np.ascontiguousarray(tokens).tobytes()).hexdigest()


@contextlib.contextmanager
def _manager(folder: Path, config: TrainConfig) -> Iterator[Any]:
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(max_to_keep=config.keep, create=True)
    manager = ocp.CheckpointManager((folder / "checkpoints").resolve(), options=options)
    try:
        yield manager
    finally:
        # Also when the run fails: a save under way is finished, an unfinished one is no checkpoint.
        manager.close()


def _arrays(state: TrainState) -> list[Array]:
    return jax.tree.leaves(state)


def _save(manager: Any, state: TrainState, settings: dict[str, Any]) -> None:
    """A list of arrays: independent of how flax and optax name their trees."""
    import orbax.checkpoint as ocp

    arrays = ocp.args.StandardSave(_arrays(state))
    items = ocp.args.Composite(state=arrays, settings=ocp.args.JsonSave(settings))
    manager.save(int(state.step), args=items)
    manager.wait_until_finished()


def _load(manager: Any, step: int, like: TrainState, settings: dict[str, Any]) -> TrainState:
    import orbax.checkpoint as ocp

    stored = manager.restore(step, args=ocp.args.Composite(settings=ocp.args.JsonRestore()))
    theirs, ours = stored["settings"], json.loads(json.dumps(settings))
    for name, value in ours.items():
        if name == "config":
            differing = [k for k, v in value.items() if theirs[name].get(k) != v]
            if differing:
                raise ValueError(
                    f"the run in this folder has another {differing[0]}: "
                    f"{theirs[name].get(differing[0])}, not {value[differing[0]]}"
                )
        elif theirs[name] != value:
            raise ValueError(f"the run in this folder has another {name}: {theirs[name]}")
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, _arrays(like))
    restored = manager.restore(
        step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
    )
    return jax.tree.unflatten(jax.tree.structure(like), restored["state"])
