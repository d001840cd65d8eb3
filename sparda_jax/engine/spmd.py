"""The engine on several devices: every program runs on each device's part of requests and heads.

Inside a program nothing changes: arrays are smaller, run indices count a device's own runs, each
device fetches its own from its own part of the host pool. The model adds what its parts give
(`sparda_jax.sharding`). Here is how the programs' arguments and results are split.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from host_offload import host_pool
from sparda_jax.engine.plan import BatchPlan
from sparda_jax.engine.state import DenseCache, Misses, StepOutput
from sparda_jax.sharding import DATA, MODEL, P, sharding

ROWS = P(DATA)
HEADS = P(DATA, MODEL)  # [B, K, ...]
TOKENS = P(DATA, None, MODEL)  # [B, T, K, H]
STEPS = P(None, DATA)  # [n, B]
PARTS = P((DATA, MODEL))  # what is each device's own


def _specs(tree: Any) -> Any:
    """How arrays are split that lie on the mesh already."""
    return jax.tree.map(lambda leaf: leaf.sharding.spec, tree)


# How the results of each program are split, given its arguments.
_RESULTS: dict[str, Callable[..., Any]] = {
    "embed": lambda *args: ROWS,
    "layer_keys_values": lambda *args: DenseCache(TOKENS, TOKENS),  # type: ignore[arg-type]
    "layer_blocks": lambda *args: HEADS,
    "blocks_bias": lambda *args: HEADS,
    "dense_chunk": lambda *args: ROWS,
    "sparse_chunk": lambda *args: ROWS,
    "first_forecast": lambda *args: TOKENS,
    "forecast_chunk": lambda *args: (ROWS, TOKENS),
    "decode_tail": lambda *args: HEADS,
    "empty_slots": lambda *args: (HEADS, HEADS, HEADS, PARTS),
    "first_token": lambda model, x, state: (_specs(state), ROWS, ROWS, ROWS),
    "decode_steps": lambda model, rope, pool, state, *rest: (
        _specs(state),
        StepOutput(STEPS, STEPS, STEPS, P(), P(), P()),  # type: ignore[arg-type]
    ),
}


def mesh_of(model: nnx.Module) -> Mesh | None:
    """The mesh that a model's parameters lie on; None: one device.

    Raises:
        NotImplementedError: a mesh of several hosts.
    """
    place = jax.tree.leaves(nnx.state(model))[0].sharding
    if not isinstance(place, NamedSharding):
        return None
    if not place.is_fully_addressable:
        raise NotImplementedError("the engine runs on the devices of one host; the mesh has more")
    return cast(Mesh, place.mesh)


def check_on_mesh(tree: Any, mesh: Mesh | None, what: str) -> None:
    """Refuses parameters that lie elsewhere than the model's.

    Raises:
        ValueError: says how to load them.
    """
    for leaf in jax.tree.leaves(tree):
        place = leaf.sharding.mesh if isinstance(leaf.sharding, NamedSharding) else None
        if place != mesh:
            raise ValueError(f"{what} and the model lie on different devices: load both on a mesh")


def place(mesh: Mesh, tree: Any, spec: PartitionSpec) -> Any:
    """Copies arrays to the mesh, those without axes whole to every device."""
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, sharding(mesh, spec if jnp.ndim(leaf) else P())), tree
    )


def _each_misses(function: Callable[[Misses], Misses], tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: function(leaf) if isinstance(leaf, Misses) else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, Misses),
    )


def _entering(tree: Any) -> Any:
    """A count of misses is each device's own: outside it is one of several."""
    return _each_misses(lambda m: dataclasses.replace(m, count=m.count[0]), tree)


def _leaving(tree: Any, devices: int = 1) -> Any:
    return _each_misses(
        lambda m: dataclasses.replace(m, count=jnp.broadcast_to(m.count, (devices,))), tree
    )


def _summed(tree: Any) -> Any:
    """Counters of a step are those of all devices."""
    if not (isinstance(tree, tuple) and tree and isinstance(tree[-1], StepOutput)):
        return tree
    output = tree[-1]
    counts = {
        n: jax.lax.psum(getattr(output, n), (DATA, MODEL)) for n in ("free", "hits", "fetched")
    }
    return (*tree[:-1], dataclasses.replace(output, **counts))


def split(function: Callable[..., Any], mesh: Mesh, args: tuple[Any, ...]) -> Callable[..., Any]:
    """The program on a mesh.

    Args:
        function: for one device; known by its name.
        mesh: axes `data` and `model`.
        args: lie on the mesh.

    Raises:
        NotImplementedError: a program whose results have no partition here.
    """
    name = function.__name__
    if name not in _RESULTS:
        raise NotImplementedError(f"{name} on several devices is not supported")
    results = _on(mesh, _RESULTS[name](*args))
    if not args:
        # Made from nothing, of the whole size.
        places = jax.tree.map(lambda spec: sharding(mesh, spec), results, is_leaf=_is_spec)
        parts = mesh.shape.get(DATA, 1) * mesh.shape.get(MODEL, 1)
        return jax.jit(lambda: _leaving(function(), parts), out_shardings=places)

    def one(*args: Any) -> Any:
        return _leaving(_summed(function(*_entering(args))))

    return jax.shard_map(one, mesh=mesh, in_specs=_specs(args), out_specs=results, check_vma=False)


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)


def _on(mesh: Mesh, specs: Any) -> Any:
    """The partitions without the axes that the mesh lacks."""
    return jax.tree.map(lambda spec: sharding(mesh, spec).spec, specs, is_leaf=_is_spec)


class SplitHostPool(host_pool.HostPool):
    """A host pool of which every device has its own part; see `HostPool`."""

    def __init__(self, num_layers: int, mesh: Mesh, **options: Any):
        super().__init__(num_layers, mesh.devices.flat[0], **options)
        if self._dtype is not None:
            raise NotImplementedError(f"host KV as {self._dtype} on several devices")
        self._host: Any = sharding(mesh, HEADS, "pinned_host")
        heads, rows = _on(mesh, (HEADS, ROWS))
        write = jax.shard_map(
            host_pool._write_back,
            mesh=mesh,
            in_specs=(heads, heads, rows),
            out_specs=heads,
            check_vma=False,
        )
        places = host_pool.PoolLayer(self._host)  # type: ignore[arg-type]
        self._jitted = jax.jit(
            write,
            donate_argnums=0,
            in_shardings=(places, sharding(mesh, HEADS), sharding(mesh, ROWS)),
            out_shardings=places,
        )
        self._compiled: jax.stages.Compiled | None = None
        self._write_back = self._write_parts  # type: ignore[assignment]

    def _write_parts(self, *args: Any) -> host_pool.PoolLayer:
        """Compiled with types that say nothing of host memory; see `programs.Program`."""
        if self._compiled is None:
            types = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)
            self._compiled = self._jitted.lower(*types).compile()
        return cast(host_pool.PoolLayer, self._compiled(*args))


def share(plan: BatchPlan, mesh: Mesh | None) -> BatchPlan:
    """What one device holds of a batch; host memory is that of all, who are on one host.

    Raises:
        ValueError: a batch that the mesh does not divide.
    """
    if mesh is None:
        return plan
    data, model = mesh.shape.get(DATA, 1), mesh.shape.get(MODEL, 1)
    if plan.batch % data:
        raise ValueError(f"mesh axis 'data' of size {data} does not divide {plan.batch} requests")
    return dataclasses.replace(
        plan,
        device_kv_bytes=plan.device_kv_bytes // (data * model),
        prefill_bytes=plan.prefill_bytes // data,
    )
