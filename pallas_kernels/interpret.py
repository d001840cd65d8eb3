"""Mosaic GPU kernels simulated on the CPU, with race detection, for tests.

The simulator has no public name in JAX (0.11.2); this is the one file that imports it.
It needs exactly one CPU device and is not thread-safe.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax

# The simulator of jax 0.10 has no race detector and lacks transposed operands.
MINIMUM_JAX = (0, 11)

_active: contextvars.ContextVar[bool] = contextvars.ContextVar("interpret_active", default=False)


def is_active() -> bool:
    """Whether this is inside ``simulated()``."""
    return _active.get()


def params(*, detect_races: bool = True) -> Any:
    """The value for ``plgpu.kernel(..., interpret=...)`` that simulates the kernel.

    Args:
        detect_races: watch every access for races between threads and copies.

    Raises:
        NotImplementedError: jax older than 0.11.
    """
    _require_jax()
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams(detect_races=detect_races)


@contextlib.contextmanager
def simulated(*, detect_races: bool = True) -> Iterator[None]:
    """Simulates every Mosaic GPU kernel that is traced inside, and fails on a race.

    ``implementation="mosaic"`` is accepted on the CPU here.  Block on the results inside: a
    kernel that is still running at the end is waited for, but must not start later.

    Args:
        detect_races: watch every access for races between threads and copies.

    Raises:
        NotImplementedError: jax older than 0.11.
        RuntimeError: a kernel that ran inside had a data race.
    """
    _require_jax()
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax._src.pallas.mosaic_gpu.interpret.params import force_gpu_interpret_mode

    # The simulator keeps the race state of the last kernel only; we keep that of all.
    states: list[Any] = []
    state_name = "GPURaceDetectionState"
    make_state = getattr(gpu_callbacks, state_name)

    def recorded_state(*args: Any, **kwargs: Any) -> Any:
        states.append(make_state(*args, **kwargs))
        return states[-1]

    reset()
    token = _active.set(True)
    setattr(gpu_callbacks, state_name, recorded_state)
    try:
        with force_gpu_interpret_mode(params(detect_races=detect_races)):
            yield
            jax.effects_barrier()
        if any(state.races_found for state in states):
            raise RuntimeError("a simulated kernel has a data race (details on standard output)")
    finally:
        setattr(gpu_callbacks, state_name, make_state)
        _active.reset(token)
        # After an exception the simulator refuses to start again until it is reset.
        reset()


def reset() -> None:
    """Clears the simulator's state; needed after an exception inside a kernel."""
    _require_jax()
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    gpu_callbacks.reset_gpu_interpret_mode_state()


def _require_jax() -> None:
    if jax.__version_info__ < MINIMUM_JAX:
        raise NotImplementedError(f"simulated kernels need jax >= 0.11, this is {jax.__version__}")
