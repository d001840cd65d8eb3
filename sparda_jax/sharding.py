"""Where arrays lie on several devices: one table of partitions for parameters and caches.

Mesh axes: `data` splits the requests of a batch, `model` splits heads, KV heads, the inner width of
MLPs and the vocabulary, `expert` splits the experts. An axis that a mesh lacks splits nothing.
In a plain jit XLA derives the communication from these partitions. The engine, whose kernels XLA
cannot see into, runs its programs under `jax.shard_map`, each device on its part alone; there the
model communicates by the functions at the end of this file, which elsewhere do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from sparda_jax.config import ModelConfig
from sparda_jax.typing import Array

DATA, MODEL, EXPERT = "data", "model", "expert"
P = PartitionSpec

# Last parts of a parameter's path -> partition; the longest that fits counts. All else is whole on
# every device: norms, routers, biases of outputs.
_PARAMETERS: dict[tuple[str, ...], PartitionSpec] = {
    ("embedding",): P(MODEL, None),
    ("head", "kernel"): P(None, MODEL),
    ("o", "kernel"): P(MODEL, None),
    ("importance", "scale"): P(MODEL),
    ("importance", "delta", "kernel"): P(None, MODEL),
    # The Forecast: `first.kernel` and `layers.#.kernel`, K*H columns each.
    ("first", "kernel"): P(None, MODEL),
    ("layers", "kernel"): P(None, MODEL),
    ("mlp", "down", "kernel"): P(MODEL, None),
    ("shared", "down", "kernel"): P(MODEL, None),
    ("experts", "gate", "kernel"): P(EXPERT, None, MODEL),
    ("experts", "up", "kernel"): P(EXPERT, None, MODEL),
    ("experts", "down", "kernel"): P(EXPERT, MODEL, None),
} | {
    (*prefix, name, leaf): P(None, MODEL) if leaf == "kernel" else P(MODEL)
    for prefix, names in (((), "qkv"), (("mlp",), ("gate", "up")), (("shared",), ("gate", "up")))
    for name in names
    for leaf in ("kernel", "bias")
}


def make_mesh(*, data: int = 1, model: int = 1, expert: int = 1) -> Mesh:
    """A mesh over the first `data * model * expert` devices.

    Raises:
        ValueError: fewer devices than that.
    """
    shape = (data, model, expert)
    needed = data * model * expert
    devices = jax.devices()
    if needed > len(devices):
        raise ValueError(
            f"a mesh of {data} x {model} x {expert} needs {needed} devices, found {len(devices)}"
        )
    return jax.make_mesh(
        shape, (DATA, MODEL, EXPERT), axis_types=(AxisType.Auto,) * 3, devices=devices[:needed]
    )


def check_mesh(config: ModelConfig, mesh: Mesh) -> None:
    """Refuses a mesh that does not divide a model, before memory is spent.

    Raises:
        ValueError: names axis, size and what it does not divide.
    """
    sizes = {
        MODEL: {
            "KV heads": config.num_kv_heads,
            "heads": config.num_heads,
            "MLP channels": config.intermediate_size,
            "vocabulary": config.vocab_size,
        },
        EXPERT: {},
    }
    if config.moe is not None:
        sizes[MODEL]["channels of an expert"] = config.moe.intermediate_size
        sizes[EXPERT]["experts"] = config.moe.num_experts
    for axis, counts in sizes.items():
        size = mesh.shape.get(axis, 1)
        for what, count in counts.items():
            if count % size:
                raise ValueError(
                    f"mesh axis {axis!r} of size {size} does not divide the {what}: {count}"
                )
    unknown = set(mesh.axis_names) - {DATA, MODEL, EXPERT}
    if unknown:
        raise ValueError(f"unknown mesh axes {sorted(unknown)}, expected data, model, expert")
    if EXPERT in mesh.shape and config.moe is None and mesh.shape[EXPERT] > 1:
        raise ValueError(f"mesh axis 'expert' of size {mesh.shape[EXPERT]}: no experts to split")


def parameter_spec(path: tuple[Any, ...]) -> PartitionSpec:
    """Partition of a parameter by its path in a `Decoder` or a `Forecast`."""
    names = tuple(part for part in path if isinstance(part, str))
    for start in range(len(names)):
        if names[start:] in _PARAMETERS:
            return _PARAMETERS[names[start:]]
    return P()


def sharding(mesh: Mesh, spec: PartitionSpec, memory_kind: str | None = None) -> NamedSharding:
    """A partition on a mesh, without the axes that the mesh lacks."""

    def there(part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(axis for axis in part if axis in mesh.shape) or None
        return part if part in mesh.shape else None

    return NamedSharding(mesh, P(*map(there, spec)), memory_kind=memory_kind)


def distribute(module: nnx.Module, mesh: Mesh) -> None:
    """Moves the parameters of a `Decoder` or a `Forecast` to a mesh, in place."""
    state = nnx.state(module)
    flat = [
        (path, p.replace(jax.device_put(p.get_value(), sharding(mesh, parameter_spec(path)))))
        for path, p in nnx.to_flat_state(state)
    ]
    nnx.update(module, nnx.from_flat_state(flat))


def place_on(mesh: Mesh) -> Callable[[tuple[Any, ...], tuple[int, ...]], NamedSharding]:
    """Sharding of a parameter by path and shape; see `sparda_jax.checkpoints.assemble`."""
    return lambda path, shape: sharding(mesh, parameter_spec(path))


def _splits(axis: str) -> bool:
    """Whether this is traced for one device's part along an axis."""
    mesh = jax.sharding.get_abstract_mesh()
    return axis in mesh.manual_axes and mesh.shape[axis] > 1


def sum_over(x: Array, *axes: str) -> Array:
    """Sums parts over mesh axes, where the computation is split along them."""
    split = tuple(axis for axis in axes if _splits(axis))
    return jax.lax.psum(x, split) if split else x


def gather_over_model(x: Array, axis: int) -> Array:
    """Puts the devices' parts of one array axis together."""
    return jax.lax.all_gather(x, MODEL, axis=axis, tiled=True) if _splits(MODEL) else x


def part_number(axis: str) -> Array | int:
    """Which part along a mesh axis this device has."""
    return jax.lax.axis_index(axis) if _splits(axis) else 0
