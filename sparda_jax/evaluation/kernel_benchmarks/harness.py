"""Timing of kernels inside one program, result rows, and the registry of benchmarks."""

import dataclasses
import datetime
import functools
import logging
import math
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

_logger = logging.getLogger("sparda_jax")


@dataclasses.dataclass(frozen=True)
class Timing:
    """What was measured, in the unit of its row.

    Attributes:
        median: of the repetitions; of an estimate, its value.
        spread: 10th and 90th percentile (`time_calls`), range (`of`) or interval of confidence.
        n: repetitions, or what an estimate was made from.
    """

    median: float
    spread: tuple[float, float]
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Timing":
        """Of a few repetitions, in any unit; the spread is their range."""
        return cls(statistics.median(values), (min(values), max(values)), len(values))

    @classmethod
    def exact(cls, value: float, n: int = 1) -> "Timing":
        """A figure without a spread: counted, or measured once."""
        return cls(value, (value, value), n)


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a results file.

    Attributes:
        name: path of the measurement, as in "pool_attention/W1/B32".
        timing: what was measured, already in ``unit``.
        unit: "us", "tok/s", "share", ...
        better: whether lower or higher values are better.
        target: what the issue asks for, if it does.
        of_roofline: share of the bound named in the file's notes.
        peers: the same work by others, in ``unit``.
        error: relative error against the reference, with ``--refcheck``.
        details: other figures of the same run, by name.
    """

    name: str
    timing: Timing
    unit: str
    better: Literal["lower", "higher"]
    target: float | None = None
    of_roofline: float | None = None
    peers: dict[str, float] | None = None
    error: float | None = None
    details: dict[str, float] | None = None

    def as_json(self) -> dict[str, Any]:
        """The row as it stands in the results file."""
        row: dict[str, Any] = {
            "name": self.name,
            "median": _rounded(self.timing.median),
            "unit": self.unit,
            "spread": [_rounded(value) for value in self.timing.spread],
            "n": self.timing.n,
            "better": self.better,
        }
        if self.of_roofline is not None:
            row["of_roofline"] = round(self.of_roofline, 3)
        if self.peers:
            row["peers"] = {name: _rounded(value) for name, value in self.peers.items()}
        if self.error is not None:
            row["error"] = float(f"{self.error:.2e}")
        if self.details:
            row["details"] = {name: _rounded(value) for name, value in self.details.items()}
        if self.target is not None:
            row["target"] = _rounded(self.target)
            row["meets"] = (
                self.timing.median <= self.target
                if self.better == "lower"
                else self.timing.median >= self.target
            )
        return row


@dataclasses.dataclass
class Session:
    """What benchmarks share.

    Attributes:
        refcheck: compare with the reference and fill ``Row.error``.
        repetitions: timed runs of each program.
    """

    refcheck: bool = False
    repetitions: int = 9

    @functools.cached_property
    def copy_bandwidth(self) -> float:
        """Bytes per second, read plus written, of a device copy of 4 GiB."""
        x = lax.iota(jnp.float32, 2**30)
        negate = jax.jit(lambda x: -x)
        timing = time_calls(lambda: negate(x), calls=1, repetitions=self.repetitions)
        return 2 * x.nbytes / (timing.median * 1e-6)

    def time(
        self,
        function: Callable[..., Any],
        variants: Sequence[tuple[jax.Array, ...]],
        *,
        shared: tuple[jax.Array, ...] = (),
        loops: int = 16,
    ) -> tuple[Timing, list[Any]]:
        """Time of one call of ``function``, timed in a loop inside one program.

        Args:
            function: what to time, traceable.
            variants: arguments, used in turn; together they should exceed the L2 cache.
            shared: arguments after those of the variant, the same in every call (so that what the
                compiler derives from them alone it derives once).
            loops: rounds over the variants in one program.

        Returns:
            The timing, and the outputs for every variant.
        """
        # All calls of a round in one CUDA graph, as in the engine: launched one by one from the
        # host, kernels of 20 us would wait for it.
        program = jax.jit(
            functools.partial(_in_turn, function, loops),
            compiler_options={"xla_gpu_graph_min_graph_size": 1},
        )
        outputs = jax.block_until_ready(program(variants, shared))
        timing = time_calls(
            lambda: program(variants, shared),
            calls=loops * len(variants),
            repetitions=self.repetitions,
        )
        return timing, outputs


def _in_turn(
    function: Callable[..., Any],
    loops: int,
    variants: Sequence[tuple[jax.Array, ...]],
    shared: tuple[jax.Array, ...],
) -> list[Any]:
    """``loops`` rounds over all variants.

    The barrier makes every round depend on the one before, so that the compiler neither
    merges the rounds nor moves the calls out of the loop; it costs nothing at run time.
    """

    def round_(_: int, outputs: list[Any]) -> list[Any]:
        tied, _ = lax.optimization_barrier((list(variants), outputs))
        return [function(*arguments, *shared) for arguments in tied]

    first = jax.eval_shape(lambda: [function(*each, *shared) for each in variants])
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), first)
    return lax.fori_loop(0, loops, round_, empty)


def time_calls(call: Callable[[], Any], *, calls: int, repetitions: int) -> Timing:
    """Microseconds on a wall clock per call of a program that makes ``calls`` of them, warm.

    Several runs of the program are queued at once, so that the host's dispatch of one hides
    behind the one before.
    """
    queued = 4
    jax.block_until_ready(call())
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        result = None
        for _ in range(queued):
            result = call()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / (queued * calls) * 1e6)
    times.sort()
    tenth = len(times) // 10
    return Timing(statistics.median(times), (times[tenth], times[-1 - tenth]), len(times))


def converted(timing: Timing, amount: float) -> Timing:
    """The timing as a rate: ``amount`` per microsecond becomes ``amount / time``."""
    low, high = timing.spread
    return Timing(amount / timing.median, (amount / high, amount / low), timing.n)


REGISTRY: dict[str, Callable[[Session], Iterator[Row]]] = {}


def benchmark(
    name: str,
) -> Callable[[Callable[[Session], Iterator[Row]]], Callable[[Session], Iterator[Row]]]:
    """Registers a generator of rows under ``name``."""

    def register(function: Callable[[Session], Iterator[Row]]) -> Any:
        REGISTRY[name] = function
        return function

    return register


class Incomplete(RuntimeError):
    """Raised after the last row of ``run``, naming the benchmarks without all their rows."""


def run(names: Iterable[str], session: Session, *, seconds: float = math.inf) -> Iterator[Row]:
    """Rows of the named benchmarks; one that fails is logged, and the others still run.

    Args:
        names: keys of ``REGISTRY``.
        session: what they share.
        seconds: no further row is measured once so many have passed.

    Raises:
        Incomplete: at the end, if anything failed or time ran out.
    """
    deadline = time.monotonic() + seconds
    failed, cut_short = [], []
    for name in names:
        if time.monotonic() >= deadline:
            cut_short.append(name)
            continue
        try:
            for row in REGISTRY[name](session):
                yield row
                if time.monotonic() >= deadline:
                    cut_short.append(name)
                    break
        except Exception:
            _logger.exception("benchmark %s failed", name)
            failed.append(name)
    problems = [
        f"{what}: {', '.join(which)}"
        for what, which in (("failed", failed), (f"cut short after {seconds:g} s", cut_short))
        if which
    ]
    if problems:
        raise Incomplete("; ".join(problems))


def results_document(
    command: str, rows: Iterable[Row], notes: str, *, commit: str | None = None
) -> dict[str, Any]:
    """The results file: how rows were made, and the rows.

    Args:
        command: what made it.
        rows: its rows.
        notes: what a reader has to know.
        commit: of the code that ran; None asks git.
    """
    device = jax.devices()[0]
    commit = commit or _commit()
    return {
        "command": command,
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": device.device_kind,
        "versions": {"jax": jax.__version__, "jaxlib": jax.lib.__version__},
        "notes": notes,
        # A file can hold rows of several runs.
        "rows": [row.as_json() | {"commit": commit} for row in rows],
    }


def _commit() -> str:
    """The commit that git names, "unknown" where there is no repository."""
    try:
        output = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return output.stdout.strip()


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
