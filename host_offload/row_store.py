"""All committed keys and values of a batch in host memory, row by row (HERALD).

Keys and values lie apart, `[B, K, S, H]` a layer, so that the keys of one (request, KV head) are
one run for the CPU to scan. The scan reads them where they lie: for the CPU back end each request's
keys are an array that aliases the store. The device never reads or writes here: new rows are copied
to the host and written by the CPU, chosen ones are gathered into staging. So the store is ordinary
memory, in huge pages, of which there may be more than can be pinned.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int8

from host_offload import memory
from host_offload.cpu_selection import as_bits, take_rows

_ALIGNMENT = 64  # bytes; the CPU back end copies what is less aligned


@dataclasses.dataclass(frozen=True)
class RowShape:
    """Sizes of a store.

    Attributes:
        layers: L.
        batch: B requests.
        heads: K.
        capacity: S, rows of each request.
        width: H.
        dtype: of keys and values.
        quantised: keep int8 keys besides, one scale a row.
    """

    layers: int
    batch: int
    heads: int
    capacity: int
    width: int
    dtype: jnp.dtype
    quantised: bool = False

    def holds(self, other: RowShape) -> bool:
        """Whether a store of this shape serves for one of `other`."""
        same = dataclasses.replace(self, quantised=other.quantised)
        return same == other and self.quantised >= other.quantised

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        rows = self.layers * self.batch * self.heads * self.capacity
        extra = self.width + 4 if self.quantised else 0
        return rows * (2 * self.width * jnp.dtype(self.dtype).itemsize + extra)


@functools.cache
def _maker(shape: tuple[int, ...], dtype: jnp.dtype, device: jax.Device) -> Callable[[], jax.Array]:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=memory.host_sharding(device))


def pinned_zeros(shape: tuple[int, ...], dtype: jnp.dtype, device: jax.Device) -> jax.Array:
    """Zeros in pinned host memory, every page touched."""
    return jax.block_until_ready(_maker(shape, dtype, device)())


class RowStore:
    """Keys and values of B requests, and the aliases through which the CPU scans the keys.

    Attributes:
        shape: sizes.

    Raises:
        ValueError: it exceeds the budget or the free memory; a
            capacity of which rows do not begin on aligned addresses.
    """

    def __init__(self, shape: RowShape, device: jax.Device, *, budget: int | None = None):
        self.shape = shape
        what = "the host KV of a batch"
        memory.check_host_budget(what, shape.nbytes, budget, device, pinned=False)
        if shape.heads * shape.capacity * shape.width % _ALIGNMENT:
            raise ValueError(
                f"{shape.heads} x {shape.capacity} rows of {shape.width} values are not a multiple "
                f"of {_ALIGNMENT} bytes: choose another capacity"
            )
        size = (shape.batch, shape.heads, shape.capacity, shape.width)
        make = lambda *array: [memory.host_zeros(*array) for _ in range(shape.layers)]
        self._keys, self._values = make(size, shape.dtype), make(size, shape.dtype)
        self._cpu = jax.devices("cpu")[0]
        self._small: list[tuple[np.ndarray, np.ndarray]] = []
        if shape.quantised:
            small = make(size, np.dtype("int8")), make(size[:3], np.dtype("float32"))
            self._small = list(zip(*small, strict=True))
        self._aliases: dict[tuple[int, int], jax.Array] = {}
        self._small_aliases: dict[tuple[int, int], tuple[jax.Array, jax.Array]] = {}

    def keys(self, layer: int, row: int) -> Float[Array, "K S H"]:
        """One request's keys as an array of the CPU back end that aliases the store."""
        place = layer, row
        if place not in self._aliases:
            self._aliases[place] = self._alias(self._keys[layer][row])
        return self._aliases[place]

    def quantised_keys(
        self, layer: int, row: int
    ) -> tuple[Int8[Array, "K S H"], Float32[Array, "K S"]]:
        """The int8 keys and their scales, likewise."""
        place = layer, row
        if place not in self._small_aliases:
            keys, scales = self._small[layer]
            self._small_aliases[place] = self._alias(keys[row]), self._alias(scales[row])
        return self._small_aliases[place]

    def key_view(self, layer: int, row: int) -> np.ndarray:
        """One request's keys `[K, S, H]`, the store itself."""
        return self._keys[layer][row]

    def addresses(self, layer: int, row: int, *, quantised: bool) -> tuple[int | None, ...]:
        """Where one request's keys, values, int8 keys and their scales begin; None: not wanted."""
        whole = [self._keys[layer], self._values[layer]]
        small = list(self._small[layer]) if quantised else []
        found = [array[row].ctypes.data for array in whole + small]
        return *found, *[None] * (4 - len(found))

    def write(
        self,
        layer: int,
        row: int,
        start: int,
        kv: np.ndarray,
        small: tuple[np.ndarray, np.ndarray] | None,
    ) -> None:
        """Writes rows of one request in one layer.

        Args:
            layer: which.
            row: which request.
            start: of the first.
            kv: `[K, 2, T, H]`.
            small: int8 keys `[K, T, H]` and scales `[K, T]`, where the store keeps them.
        """
        place = slice(start, start + kv.shape[2])
        as_bits(self._keys[layer][row])[:, place] = as_bits(kv[:, 0])
        as_bits(self._values[layer][row])[:, place] = as_bits(kv[:, 1])
        if self._small:
            assert small is not None
            for whole, part in zip(self._small[layer], small, strict=True):
                whole[row, :, place] = part

    def gather(
        self, layer: int, row: int, ids: np.ndarray, out: np.ndarray, granule: int, run: int
    ) -> None:
        """Copies chosen rows of one request, keys and values apart.

        Args:
            layer: which.
            row: which request.
            ids: `[K, n]`.
            out: `[K, 2, R, H]`, n <= R. The granule that is not full is filled up with zeros:
                programs read it whole, and a weight of zero times NaN is NaN. Later rows stay.
            granule: rows that programs read together; R is a multiple.
            run: rows that were chosen together.
        """
        count = ids.shape[1]
        end = (count // granule + 1) * granule
        for of, rows in enumerate((self._keys[layer][row], self._values[layer][row])):
            for head, chosen in enumerate(ids):
                target = out[head, of]
                take_rows(rows[head], chosen, target[:count], run)
                as_bits(target)[count:end] = 0

    def _alias(self, view: np.ndarray) -> jax.Array:
        alias = jax.device_put(view, self._cpu)
        if alias.unsafe_buffer_pointer() != view.ctypes.data:
            raise RuntimeError("the CPU back end copied the host KV instead of reading it in place")
        return alias
