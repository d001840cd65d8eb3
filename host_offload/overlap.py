"""The copy of one layer behind another's work, inside one compiled program.

Two ways, compared in docs/decode_kernels.md: CUDA graphs (``CONCURRENT_OPTIONS``), and two streams.
XLA runs a program on one stream unless told otherwise.  A function wrapped by ``on_stream`` runs on
the stream of that number.  Measured on an H200 with jax 0.11.2:

* **Both** sides must be annotated.  With the copy alone on another stream, XLA waits for it at
  once, whatever its scheduling flags.
* CUDA graphs must be off (``COMPILER_OPTIONS``, which only a top-level program takes: the engine's
  ahead-of-time programs, not a function inside a user's jit).
* No call may remain inside an annotated function ("No ExecutionStreamId found"), and much of
  jax.numpy is jitted, ``where`` for one.  ``on_stream`` therefore inlines nested jits.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.extend import core

F = TypeVar("F", bound=Callable[..., Any])

# For ``.lower().compile(compiler_options=...)`` of a program that uses ``on_stream``.
COMPILER_OPTIONS = {"xla_gpu_enable_command_buffer": ""}

# Instead of streams: one CUDA graph, in which whatever the data allows runs side by side.  Nothing
# is annotated.  What is to overlap must lie in one graph: a loop or a sort in between cuts it.
CONCURRENT_OPTIONS = {
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
    "xla_gpu_graph_min_graph_size": 1,
}

COMPUTE_STREAM = 1
COPY_STREAM = 2

_JITS = ("jit", "pjit")
# The bodies of these become computations of the program's own; those of kernels do not.
_CONTROL_FLOW = ("cond", "while", "scan")


def on_stream(function: F, stream: int) -> F:
    """The function, run on GPU stream ``stream`` of the program it is traced into.

    Args:
        function: pure function of arrays; may contain kernels, jits, loops and conditionals.  Its
            results are in device memory.
        stream: 1 or more; 0 is the program's own.

    Raises:
        ValueError: a stream below 1.
    """
    if stream < 1:
        raise ValueError(f"stream must be at least 1, got {stream}")
    from jax.experimental import compute_on

    # jax 0.10 has the same function under another name.
    annotate = getattr(compute_on, "compute_on2", compute_on.compute_on)
    return annotate(
        inlined(function),
        compute_type=f"gpu_stream:{stream}",
        out_memory_spaces=jax.memory.Space.Device,
    )


def inlined(function: F) -> F:
    """The function without nested jits, in loops too: their operations become its own."""

    def without_jits(*arguments: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
        outputs = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return without_jits  # type: ignore[return-value]


def _without_jits(value: Any) -> Any:
    """A parameter of a loop or conditional with the jits of its bodies inlined."""
    if isinstance(value, tuple):
        return tuple(_without_jits(part) for part in value)
    if not isinstance(value, core.ClosedJaxpr):
        return value
    body = functools.partial(_evaluate, value.jaxpr, value.consts)
    return jax.make_jaxpr(lambda *arguments: body(arguments))(*value.in_avals)


def _evaluate(jaxpr: core.Jaxpr, constants: Any, arguments: Any) -> list[Any]:
    """Evaluates a jaxpr operation by operation, descending into jits."""
    values: dict[core.Var, Any] = {}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    values.update(zip(jaxpr.constvars, constants, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))
    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        if equation.primitive.name in _JITS:
            inner = equation.params["jaxpr"]
            outputs = _evaluate(inner.jaxpr, inner.consts, inputs)
        else:
            parameters = equation.params
            if equation.primitive.name in _CONTROL_FLOW:
                parameters = {name: _without_jits(value) for name, value in parameters.items()}
            parameters = equation.primitive.get_bind_params(parameters)
            # jax 0.10 returns the functions among the parameters apart.
            functions, parameters = (
                parameters if isinstance(parameters, tuple) else ((), parameters)
            )
            outputs = equation.primitive.bind(*functions, *inputs, **parameters)
            if not equation.primitive.multiple_results:
                outputs = [outputs]
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]
