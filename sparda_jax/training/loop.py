"""A training run in a folder: checkpoints, metrics, resume.

The state after step n is a function of seed, data and settings alone, so a resumed run ends in the
same bits (on as many devices of the same kind).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sparda_jax.checkpoints.forecast import model_fingerprint
from sparda_jax.forecast.data import Windows, batch_at
from sparda_jax.models.decoder import Decoder
from sparda_jax.training.config import RunConfig
from sparda_jax.training.step import AXIS, TrainState
from sparda_jax.typing import Array


class TrainingDiverged(RuntimeError):
    """The loss is not finite or exploded; the checkpoints before are kept."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """What is known after a step; `record` is the line that went to the metrics file."""

    record: dict[str, Any]
    seconds_left: float


class Run:
    """A run in a folder: checkpoints, `metrics.jsonl`, and the loop over steps.

    A subclass says what is trained: `initial`, `program`, `static`, `evaluate`.

    Args:
        model: the frozen backbone.
        config: how to train.
        train: windows to train on.
        held_out: windows to evaluate on; may be empty.
        folder: of the run; one that holds checkpoints is continued.
        devices: over which the windows of a step are spread, the model being on each; those of
            all processes if there are several (`jax.distributed`), which then share the folder and
            run the same program on the same data. None: the first of this process alone.

    Raises:
        ValueError: no window to train on; a batch that the devices cannot share evenly.
    """

    def __init__(
        self,
        model: Decoder,
        config: RunConfig,
        train: Windows,
        held_out: Windows,
        folder: str | Path,
        devices: Sequence[jax.Device] | None = None,
    ):
        if not len(train):
            raise ValueError("no window to train on: the text is shorter than one window")
        devices = jax.local_devices()[:1] if devices is None else devices
        if config.batch % (config.micro_batch * len(devices)):
            raise ValueError(
                f"batch {config.batch} is not a multiple of micro_batch {config.micro_batch} times "
                f"{len(devices)} devices"
            )
        self.mesh = Mesh(np.asarray(devices), (AXIS,))
        # What identifies the model is read from this process's own copy.
        self.fingerprint = model_fingerprint(model)
        self.model = jax.device_put(model, NamedSharding(self.mesh, P()))
        self.config, self.train, self.held_out = config, train, held_out
        self.folder = Path(folder)

    @property
    def settings(self) -> dict[str, Any]:
        """What a resumed run must have in common with the first."""
        config = dataclasses.asdict(self.config)
        free = ("save_every", "keep", "eval_every", "eval_windows", "explosion")
        return {
            "config": {name: value for name, value in config.items() if name not in free},
            "model": self.fingerprint,
            "windows": list(self.train.tokens.shape),
            "data": _digest(self.train.tokens),
        }

    def run(self, report: Callable[[Progress], None] = lambda _: None) -> TrainState:
        """Trains to the last step, from the newest checkpoint if there is one.

        Raises:
            TrainingDiverged: a loss that is not finite, or exploded; nothing of that step is saved.
            ValueError: the folder's run had other settings, data or another model.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with _manager(self.folder, self.config) as manager:
            state = self._restore(manager)
            first = int(state.step)
            if first == 0 and len(self.held_out):
                self._tell({"step": 0} | self.evaluate(state), math.inf, report)
            smallest, seconds = math.inf, []
            for step in range(first, self.config.steps):
                begun = time.monotonic()
                state, metrics = self._step(state, step)
                # Read back before anything is saved: a bad step must not become a checkpoint.
                record = {"step": step + 1} | {name: float(v) for name, v in metrics.items()}
                seconds.append(time.monotonic() - begun)
                self._check(record, smallest)
                smallest = min(smallest, record["loss"])
                record["tokens_per_second"] = self._tokens_per_step() / seconds[-1]
                last = step + 1 == self.config.steps
                every = self.config.eval_every
                if len(self.held_out) and (last or (every and (step + 1) % every == 0)):
                    record |= self.evaluate(state)
                if last or (step + 1) % self.config.save_every == 0:
                    _save(manager, state, self.settings)
                # The first step of a process compiles.
                left = np.mean(seconds[1:] or seconds) * (self.config.steps - step - 1)
                self._tell(record, float(left), report)
        return jax.tree.map(lambda array: array.addressable_data(0), state)

    def _check(self, record: dict[str, Any], smallest: float) -> None:
        step = record["step"]
        if not all(math.isfinite(value) for value in record.values()):
            raise TrainingDiverged(f"step {step}: loss or gradient is not finite")
        if record["loss"] > self.config.explosion * smallest:
            raise TrainingDiverged(
                f"step {step}: loss {record['loss']:.4g} is over {self.config.explosion:g} times "
                f"the smallest, {smallest:.4g}"
            )

    def _tell(
        self, record: dict[str, Any], left: float, report: Callable[[Progress], None]
    ) -> None:
        if jax.process_index() == 0:
            with self._metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        report(Progress(record, left))

    def initial(self) -> TrainState:
        """What is trained, before the first step."""
        raise NotImplementedError

    @property
    def program(self) -> Any:
        """The jitted step `(model, state, tokens) -> (state, metrics)`."""
        raise NotImplementedError

    def evaluate(self, state: TrainState) -> dict[str, Any]:
        """Figures over held-out windows."""
        raise NotImplementedError

    def plan(self) -> dict[str, float]:
        """What a run needs, from the compiled step and one timed step; nothing is written."""
        state, tokens = self.start(), self.batch(0)
        compiled = self.program.lower(self.model, state, tokens, **self.static).compile()
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
        return self.program(self.model, state, self.batch(step), **self.static)

    @functools.cached_property
    def static(self) -> dict[str, Any]:
        """Static arguments of the compiled programs."""
        return {"config": self.config.of_program(), "mesh": self.mesh}

    def start(self) -> TrainState:
        """The state before the first step."""
        return jax.device_put(self.initial(), NamedSharding(self.mesh, P()))

    def batch(self, step: int) -> Array:
        """The windows of a step, `int32[A, B, T]`, on the devices."""
        config = self.config
        rows = batch_at(self.train, step, config.batch, config.seed)
        rows = rows.reshape(-1, config.micro_batch * self.mesh.size, rows.shape[1])
        return jax.device_put(rows, NamedSharding(self.mesh, P(None, AXIS)))

    def _tokens_per_step(self) -> int:
        return self.config.batch * self.train.tokens.shape[1]

    def _restore(self, manager: Any) -> TrainState:
        state = self.start()
        newest = manager.latest_step()
        if newest is not None:
            state = _load(manager, newest, state, self.settings)
        done = int(state.step)
        kept = [line for line in self._lines() if done and json.loads(line)["step"] <= done]
        if jax.process_index() == 0:
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


def _digest(tokens: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(tokens).tobytes()).hexdigest()


@contextlib.contextmanager
def _manager(folder: Path, config: RunConfig) -> Iterator[Any]:
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
