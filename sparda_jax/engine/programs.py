"""Ahead-of-time compiled programs, so that compile time is seen and never mistaken for work."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from host_offload import overlap
from sparda_jax.engine.modules import Parameters
from sparda_jax.engine.spmd import split
from sparda_jax.models.decoder import Decoder, DecoderLayer

# Where results go, by where the arguments lie; None, also for a part: on the device.
Results = Callable[[tuple], tuple]


def _signature(args: tuple) -> tuple:
    """What a compiled program depends on: structure, shapes, dtypes, memory kinds, partitions."""
    leaves, structure = jax.tree.flatten(args)
    return structure, tuple(
        (leaf.shape, leaf.dtype, leaf.sharding.memory_kind, getattr(leaf.sharding, "spec", None))
        for leaf in leaves
    )


class Program:
    """A function compiled once per signature; the call that compiles is timed apart.

    It is traced with arguments that say nothing of their memory: a kernel's bulk copies refuse a
    reference that is typed as host memory. Where the arguments lie, the shardings say.

    Attributes:
      compilations: how many signatures were compiled.
      compile_seconds: time spent tracing and compiling them.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        donate: Sequence[int] = (),
        options: Mapping[str, str | int] | None = None,
        results: Results | None = None,
        mesh: Mesh | None = None,
    ):
        self._mesh, self._results = mesh, results
        self._function, self._donate = function, tuple(donate)
        self._options = None if options is None else dict(options)
        if self._options is not None and mesh is not None:
            self._options |= overlap.COLLECTIVE_OPTIONS
        self._compiled: dict[tuple, jax.stages.Compiled] = {}
        self.compilations = 0
        self.compile_seconds = 0.0

    def compile(self, *args: Any) -> jax.stages.Compiled:
        """The program for these arguments, compiled now if it is new. Arguments stay untouched."""
        key = _signature(args)
        if key not in self._compiled:
            start = time.perf_counter()
            types = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)
            places = jax.tree.map(lambda leaf: leaf.sharding, args)
            function = self._function
            if self._mesh is not None:
                function = split(function, self._mesh, args)
            results = None if self._results is None else self._results(places)
            jitted = jax.jit(
                function, donate_argnums=self._donate, in_shardings=places, out_shardings=results
            )
            self._compiled[key] = jitted.lower(*types).compile(compiler_options=self._options)
            self.compile_seconds += time.perf_counter() - start
            self.compilations += 1
        return self._compiled[key]

    def __call__(self, *args: Any) -> Any:
        """Runs the program, compiling it first if these shapes are new."""
        return self.compile(*args)(*args)


class Programs:
    """Every program of one engine, found by its function and static arguments."""

    def __init__(
        self,
        model: Parameters[Decoder],
        layers: tuple[Parameters[DecoderLayer], ...],
        mesh: Mesh | None = None,
    ) -> None:
        self._model, self._layer, self._mesh = model, layers[0], mesh
        if any(layer.structure != self._layer.structure for layer in layers):
            raise NotImplementedError("layers of different structure cannot share programs")
        self._programs: dict[tuple, Program] = {}

    def on_model(
        self,
        function: Callable[..., Any],
        *,
        donate: Sequence[int] = (),
        options: Mapping[str, str | int] | None = None,
        **static: Any,
    ) -> Program:
        """``function(model, *args, **static)``; called with the model's arrays as first argument.

        Args:
          function: traced with a `Decoder`.
          donate: positions of donated arguments, the model being 0.
          options: for the compiler.
          **static: hashable arguments that are part of the program.
        """
        return self._get(self._model, function, donate, static, options)

    def on_layer(
        self,
        function: Callable[..., Any],
        *,
        donate: Sequence[int] = (),
        options: Mapping[str, str | int] | None = None,
        results: Results | None = None,
        **static: Any,
    ) -> Program:
        """``function(layer, *args, **static)`` with a `DecoderLayer`: one for all layers."""
        return self._get(self._layer, function, donate, static, options, results)

    def plain(
        self, function: Callable[..., Any], *, donate: Sequence[int] = (), **static: Any
    ) -> Program:
        """``function(*args, **static)``, without parameters."""
        return self._get(None, function, donate, static)

    def _get(
        self,
        parameters: Parameters | None,
        function: Callable[..., Any],
        donate: Sequence[int],
        static: dict[str, Any],
        options: Mapping[str, str | int] | None = None,
        results: Results | None = None,
    ) -> Program:
        key = (function, tuple(sorted(static.items(), key=lambda item: item[0])))
        if key not in self._programs:

            def run(*args: Any) -> Any:
                if parameters is None:
                    return function(*args, **static)
                return function(parameters.merge(args[0]), *args[1:], **static)

            run.__name__ = function.__name__
            self._programs[key] = Program(
                run, donate=donate, options=options, results=results, mesh=self._mesh
            )
        return self._programs[key]

    @property
    def compilations(self) -> int:
        """Programs compiled so far."""
        return sum(program.compilations for program in self._programs.values())

    @property
    def compile_seconds(self) -> float:
        """Time spent compiling so far."""
        return sum(program.compile_seconds for program in self._programs.values())
