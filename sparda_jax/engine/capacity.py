"""Whether rows for requests that come and go fit in memory, and how many would."""

from __future__ import annotations

from collections.abc import Callable

import jax

from host_offload import memory
from sparda_jax.config import EngineConfig
from sparda_jax.engine.plan import BatchPlan


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
        least, most = 0, count - 1
        while least < most:
            middle = (least + most + 1) // 2
            try:
                check(middle)
            except ValueError:
                most = middle - 1
            else:
                least = middle
        raise ValueError(f"{error}; {least} such {unit} would fit") from None


def check_rows(plan: BatchPlan, one: BatchPlan, config: EngineConfig, device: jax.Device) -> None:
    """Raises if what rows keep on the device does not fit.

    Args:
      plan: of all rows.
      one: of one row; its prefill is that of any, since prompts run one at a time.
      config: limits.
      device: where.

    Raises:
      ValueError: naming what is needed, what there is and what would fit.
    """
    # Resident, a prompt's KV exists twice while it goes into its row.
    prompt = one.prefill_bytes + (0 if plan.slots else one.full_kv_bytes)
    limits = (("device", 0, config.device_kv_bytes), ("device, with prefill,", prompt, None))

    def check(count: int) -> None:
        for place, besides, limit in limits:
            what = f"the KV of {count} rows of {plan.num_blocks} blocks on the {place}"
            needed = count * one.device_kv_bytes + besides
            memory.check_device_budget(what, needed, limit, device)

    check_count(check, plan.batch, "rows")


def pool_pages(plan: BatchPlan, one: BatchPlan, config: EngineConfig, device: jax.Device) -> int:
    """Pages of the host pool: for all blocks of all rows, or as many as it may have.

    Args:
      plan: of all rows.
      one: of one row, whose blocks the pool holds at least.
      config: its `host_kv_bytes` is the limit.
      device: whose pool it is.

    Raises:
      ValueError: naming what is needed, what there is and what would fit.
    """
    page, count = one.host_kv_bytes // one.num_blocks, plan.batch * plan.num_blocks
    if config.host_kv_bytes is not None:
        count = max(min(count, config.host_kv_bytes // page), one.num_blocks)

    def check(count: int) -> None:
        what = f"a host pool of {count} blocks, with rows of {one.num_blocks},"
        memory.check_host_budget(what, count * page, config.host_kv_bytes, device)

    check_count(check, count, "blocks")
    return count
