"""Command line of HERALD: options, the mode that the cost model chooses."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sparda_jax.cli import note

if TYPE_CHECKING:
    from sparda_jax.diffusion.config import DenoiseParams
    from sparda_jax.herald.config import HeraldConfig
    from sparda_jax.models.decoder import Decoder

# Besides "dense" and "infinigen", which other engines know too.
MODES = ("mage", "mage_offload", "herald_serial", "herald", "auto")


def add_herald_options(parser: argparse.ArgumentParser) -> None:
    """Options that count with `--diffusion --mode` of a sparse mode."""
    add = parser.add_argument_group("sparse prefix of block diffusion (HERALD)").add_argument
    add("--budget-share", type=float, default=0.05, help="of the prefix, chosen per KV head")
    add("--budget-rows", type=int, help="so many rows instead")
    add("--coverage", type=float, help="fewer rows where these hold so much of the mass")
    add("--aggregate", choices=("softmax", "raw"), default="softmax", help="over query heads")
    add("--run", type=int, choices=(1, 4, 8, 16), default=1, help="rows chosen together")
    add("--queries", choices=("centre", "all"), help="which choose (default: the mode's)")
    add("--init-rows", type=int, default=16, help="leading rows that are always attended")
    add("--num-dense-layers", type=int, default=0, help="leading layers that attend everything")
    add("--int8-keys", action="store_true", help="scan int8 keys, and a short list again exactly")
    add("--workers", type=int, default=4, help="threads that scan and gather")


def herald_settings(args: argparse.Namespace, model: Decoder, mode: Any) -> HeraldConfig:
    """Settings from the command line.

    Raises:
        ValueError: settings that are impossible or do not fit the model.
    """
    from host_offload.cpu_selection import SelectionRule
    from sparda_jax.diffusion.config import diffusion_of
    from sparda_jax.herald.config import Budget, HeraldConfig

    width = diffusion_of(model.config)[0].block_size
    return HeraldConfig(
        mode=mode,
        budget=Budget(args.budget_share, args.budget_rows),
        rule=SelectionRule(args.aggregate, args.run, args.coverage),
        queries=args.queries,
        init_rows=args.init_rows,
        num_dense_layers=args.num_dense_layers,
        quantised_keys=args.int8_keys,
        kv_block=max(64, width),
        prefill_chunk=args.prefill_chunk,
        workers=args.workers,
        max_length=args.max_length,
        device_kv_bytes=args.device_kv_gb,
        host_kv_bytes=args.host_kv_gb,
    )


def resolved(
    args: argparse.Namespace, model: Decoder, prompts: Sequence[Sequence[int]], steps: int
) -> HeraldConfig:
    """Settings, with the mode that the cost model speaks for where that is left to it."""
    import jax

    from host_offload.memory import free_device_bytes
    from sparda_jax.herald.cost import H200, Workload, choose_mode

    if args.block_mode != "auto":
        return herald_settings(args, model, args.block_mode)
    config = herald_settings(args, model, "herald")
    free = args.device_kv_gb or free_device_bytes(jax.devices()[0])
    machine = H200
    if free is not None:
        workload = Workload(model.config, config, 1, steps)
        machine = dataclasses.replace(H200, device_bytes=free + workload.weight_bytes())
    context = max(map(len, prompts)) + args.max_new_tokens
    workload = Workload(model.config, config, context, steps, machine)
    mode, lines = choose_mode(workload, len(prompts))
    if not args.json:
        note("cost model, at the rates of an H200 and its host:")
        for line in lines:
            note(f"  {line}")
    if args.int8_keys and mode != "herald":
        config = dataclasses.replace(config, quantised_keys=False)
    return dataclasses.replace(config, mode=mode)


def prepare(
    args: argparse.Namespace, model: Decoder, prompts: Any, requests: Any, rule: DenoiseParams
) -> Any:
    """A generation for `sparda_jax.commands.diffusion.run`."""
    from sparda_jax.diffusion.config import diffusion_of
    from sparda_jax.herald.engine import HeraldEngine

    steps = rule.steps or diffusion_of(model.config)[0].block_size
    engine = HeraldEngine(model, config=resolved(args, model, prompts, steps))
    return engine.prepare(prompts, requests, rule)
