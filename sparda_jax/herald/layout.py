"""What lies where in a session: which layers have caches or pools, and how large these are."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.row_store import RowShape
from sparda_jax.diffusion.config import diffusion_of
from sparda_jax.diffusion.plan import BlockPlan
from sparda_jax.diffusion.state import BlockState, LayerKV
from sparda_jax.herald.config import HeraldConfig
from sparda_jax.herald.state import HeraldState, Pool
from sparda_jax.model_config import ModelConfig
from sparda_jax.typing import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes of a batch in one mode.

    Attributes:
        batch: B.
        layers: L.
        sparse: layers that attend a pool, the last ones.
        cached: layers whose whole KV is on the device.
        cache: `[K, M, 2, P, H]`, one request's whole KV of a layer.
        slots: Z of a pool.
        init_rows: leading rows kept on the device.
        width: W.
        dtype: of all KV.
    """

    batch: int
    layers: int
    sparse: range
    cached: tuple[int, ...]
    cache: tuple[int, ...]
    slots: int
    init_rows: int
    width: int
    dtype: jnp.dtype

    @classmethod
    def of(
        cls, config: HeraldConfig, model: ModelConfig, plan: BlockPlan, batch: int, dtype: jnp.dtype
    ) -> Layout:
        """Of a mode, a model and a batch."""
        layers = model.num_layers
        never = config.policy.when == "never"
        sparse = range(layers if never else config.num_dense_layers, layers)
        every = range(layers)
        cached = every if not config.policy.offload else range(sparse.start)
        longest = plan.num_blocks * config.kv_block
        most = config.budget.count(longest // config.rule.run * config.rule.run, config.rule.run)
        slots = max(-(-most // config.kv_block), 1)
        width = diffusion_of(model)[0].block_size
        cache = plan.cache_shape[1:]
        return cls(
            batch, layers, sparse, tuple(cached), cache, slots, config.init_rows, width, dtype
        )

    def pool(self, batch: int) -> tuple[int, ...]:
        """Shape of one layer's pool."""
        heads, _, _, size, head_dim = self.cache
        return batch, heads, self.slots, 2, size, head_dim

    @property
    def device_bytes(self) -> int:
        """Two pools, what else stays on the device, and one prompt's whole KV during prefill."""
        heads, _, _, _, head_dim = self.cache
        cache, pool = int(np.prod(self.cache)), int(np.prod(self.pool(1)))
        near = heads * 2 * (self.init_rows + self.width) * head_dim
        rows = len(self.cached) * cache + len(self.sparse) * (2 * pool + near)
        return jnp.dtype(self.dtype).itemsize * (self.batch * rows + self.layers * cache)

    def store(self, quantised: bool) -> RowShape:
        """Of the host's rows."""
        heads, blocks, _, size, head_dim = self.cache
        layers, rows = len(self.sparse), blocks * size
        return RowShape(layers, self.batch, heads, rows, head_dim, self.dtype, quantised)


def empty_state(
    block: BlockState, *, layout: Layout
) -> tuple[HeraldState, tuple[Pool | None, ...]]:
    """A batch without requests, and its pools."""
    heads, _, _, _, head_dim = layout.cache
    zeros = lambda *shape: jnp.zeros((layout.batch, *shape), layout.dtype)
    near = lambda number, rows: zeros(heads, 2, rows, head_dim) if number in layout.sparse else None
    every = range(layout.layers)
    state = HeraldState(
        block,
        tuple(zeros(*layout.cache) if n in layout.cached else None for n in every),
        tuple(near(n, layout.init_rows) for n in every),
        tuple(near(n, layout.width) for n in every),
    )
    return state, empty_pools(layout=layout, batch=layout.batch)


def empty_pools(*, layout: Layout, batch: int) -> tuple[Pool | None, ...]:
    """Pools without rows."""
    make = lambda: empty_pool(layout=layout, batch=batch)
    return tuple(make() if n in layout.sparse else None for n in range(layout.layers))


def empty_pool(*, layout: Layout, batch: int) -> Pool:
    """One layer's."""
    return Pool(jnp.zeros(layout.pool(batch), layout.dtype), jnp.zeros(batch, jnp.int32))


def as_slots(kv: Float[Array, "B K 2 R H"], *, size: int) -> Float[Array, "B K Z 2 P H"]:
    """Rows as the host sends them, in slots of `size`, as attention reads them."""
    slots = kv.reshape(*kv.shape[:3], -1, size, kv.shape[-1])
    return jnp.moveaxis(slots, 3, 2)


def as_pools(
    rows: tuple[Float[Array, "B K 2 R H"], ...], counts: Int[Array, "X B"], *, size: int
) -> tuple[Pool, ...]:
    """Pools of the rows, and their counts, that the host sent for some layers."""
    return tuple(
        Pool(as_slots(kv, size=size), count) for kv, count in zip(rows, counts, strict=True)
    )


def insert(batch: Any, one: Any, row: jax.Array) -> Any:
    """A batch with the arrays of one request in its row."""
    write = lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, row, axis=0)
    return jax.tree.map(write, batch, one)


def by_row(cache: LayerKV) -> Float[Array, "B K 2 S H"]:
    """A cache `[B, K, M, 2, P, H]` row by row, S = M*P."""
    return jnp.moveaxis(cache, 3, 2).reshape(*cache.shape[:2], 2, -1, cache.shape[-1])


def prompt_rows(caches: tuple[LayerKV, ...]) -> tuple[jax.Array, ...]:
    """Whole caches row by row."""
    return tuple(map(by_row, caches))
