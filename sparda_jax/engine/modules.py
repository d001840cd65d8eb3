"""nnx modules as flat tuples of arrays, which is what compiled programs take.

Flattening a module of some thirty layers in Python costs milliseconds a call; a tuple of arrays
costs microseconds. The module is put together again while a program is traced, never after.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, TypeVar

import jax
from flax import nnx

Module = TypeVar("Module", bound=nnx.Module)


@dataclasses.dataclass(frozen=True)
class Parameters(Generic[Module]):
    """The parameters of a module, apart from its structure.

    Attributes:
      arrays: every parameter.
      structure: what `merge` needs; modules with equal structure share programs.
    """

    arrays: tuple[jax.Array, ...]
    structure: tuple[Any, Any]

    @classmethod
    def of(cls, module: Module) -> Parameters[Module]:
        """Splits a module; its arrays are shared, not copied."""
        graph, state = nnx.split(module)
        arrays, tree = jax.tree.flatten(state)
        return cls(tuple(arrays), (graph, tree))

    def merge(self, arrays: tuple[jax.Array, ...]) -> Module:
        """The module with these (traced) arrays in place of its own."""
        graph, tree = self.structure
        return nnx.merge(graph, jax.tree.unflatten(tree, arrays))
