"""Whether rows for requests that come and go fit in memory, and how many would."""

from __future__ import annotations

from collections.abc import Callable

import jax

from host_offload import memory
from sparda_jax.config import EngineConfig
from sparda_jax.engine.plan import BatchPlan


def largest(check: Callable[[int], None], most: int) -> int:
    """The largest count, up to `most`, that a check passes; 0: not even one.

    Args:
      check: raises ValueError for too many.
      most: how many it is asked for at most.
    """
    least = 0
    while least < most:
        middle = (least + most + 1) // 2
        try:
            check(middle)
        except ValueError:
            most = middle - 1
        else:
            least = middle
    return least


def check_count(check: Callable[[int], None], count: int, unit: str) -> None:
    """Runs a check of so many things; its error says in addition how many would pass.

    Args:
      check: raises ValueError for too many.
      count: how many are wanted.
      unit: what they are, in the plural.

    Raises:
      ValueError: the check's, with "; N such rows would fit".
    """
    try:
        check(count)
    except ValueError as error:
        raise ValueError(f"{error}; {largest(check, count - 1)} such {unit} would fit") from None


def check_rows(
    plan: Callable[[int], BatchPlan], rows: int, config: EngineConfig, device: jax.Device
) -> None:
    """Raises if what rows keep on the device does not fit.

    Args:
      plan: sizes of so many rows; which layers stay on the device may depend on their number.
      rows: how many are wanted.
      config: limits.
      device: where.

    Raises:
      ValueError: naming what is needed, what there is and what would fit.
    """
    one = plan(1)  # prompts run one at a time

    def check(count: int) -> None:
        sizes = plan(count)
        what = f"the KV of {count} rows of {sizes.num_blocks} blocks on the device"
        kept, limit = sizes.device_kv_bytes, config.device_kv_bytes
        memory.check_device_budget(what, kept, limit, device)
        # Of layers that stay there, a prompt's KV exists twice while it goes into its row.
        prompt = one.prefill_bytes + one.full_kv_bytes * sizes.resident_layers // one.layers
        memory.check_device_budget(f"{what}, with prefill,", kept + prompt, None, device)

    check_count(check, rows, "rows")


def pool_pages(plan: BatchPlan, config: EngineConfig, device: jax.Device) -> int:
    """Pages of the host pool: for all blocks of all rows, or as many as it may have.

    Args:
      plan: of all rows; the pool holds the blocks of one at least.
      config: its `host_kv_bytes` is the limit.
      device: whose pool it is.

    Raises:
      ValueError: naming what is needed, what there is and what would fit.
    """
    count = plan.batch * plan.num_blocks
    page = plan.host_kv_bytes // count
    if config.host_kv_bytes is not None:
        count = max(min(count, config.host_kv_bytes // page), plan.num_blocks)

    def check(count: int) -> None:
        what = f"a host pool of {count} blocks, with rows of {plan.num_blocks},"
        memory.check_host_budget(what, count * page, config.host_kv_bytes, device)

    check_count(check, count, "blocks")
    return count
