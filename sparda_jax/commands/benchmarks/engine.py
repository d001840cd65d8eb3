"""The engine: decode, prefill, requests that come and go, loading."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sparda_jax.cli import note
from sparda_jax.commands.benchmarks.publish import publish

if TYPE_CHECKING:
    from sparda_jax.commands.benchmarks.publish import Commands
    from sparda_jax.config import SparseConfig
    from sparda_jax.evaluation.kernel_benchmarks import Row


def _add_sparse(command: argparse.ArgumentParser, prefix: str = "") -> None:
    command.add_argument("--local-blocks", type=int, default=32, help=f"{prefix}forced")
    command.add_argument("--budget-blocks", type=int, default=96, help=f"{prefix}selected")
    command.add_argument(
        "--query-blocks", type=int, help=f"{prefix}of the budget, chosen by the query (NOSA: 41)"
    )


def _sparse(arguments: argparse.Namespace) -> SparseConfig:
    from sparda_jax.config import SparseConfig

    return SparseConfig(
        local_blocks=arguments.local_blocks,
        budget_blocks=arguments.budget_blocks,
        query_blocks=arguments.query_blocks,
    )


DECODE_NOTES = (
    "A checkpoint: text, float32, batch 1, greedy, 64 timed steps a repetition after a warm-up "
    "run; decode/dense/256: context grows to 256 tokens; its target is twice the time numpy "
    "needs to sum every weight once, measured alternately in the same run. A shape: random "
    "weights, bfloat16, and random caches, made on the device; the hit rate is a trace's, the "
    "selection kernels run; one layer's pool serves all layers, but with --whole-pool; tokens a "
    "second, median, least and most of programs of 32 steps after one that fills the slots; "
    "write-back of filled blocks between programs is not in it. in_use_gib: the device's memory "
    "between two programs; temporary_gib: what one needs besides, as XLA says. GB under a cap: "
    "1e9, weights included. compute_alone_ms: the same program with a trace that"
    " never misses; fetch_alone_ms: the same copies and nothing else. of_roofline: the larger "
    "of what a step must read of the device's memory over a large copy's rate, and what it "
    "fetches over 53 GB/s, over the step. Compile time is excluded everywhere."
)


def _decode(arguments: argparse.Namespace) -> None:
    from sparda_jax.presets import PRESETS

    if arguments.model in PRESETS:
        rows = _decode_shape(arguments)
    else:
        rows = _decode_checkpoint(arguments)
    publish(arguments, rows, DECODE_NOTES)


def _decode_checkpoint(arguments: argparse.Namespace) -> Iterator[Row]:
    import jax.numpy as jnp

    from sparda_jax.assets import load_excerpt
    from sparda_jax.checkpoints.load import load_pretrained
    from sparda_jax.evaluation import decode_benchmark
    from sparda_jax.forecast.files import load_forecast

    model, tokenizer = load_pretrained(arguments.model, dtype=jnp.dtype("float32"))
    assert tokenizer is not None
    forecast, _ = load_forecast("default", model)
    return decode_benchmark.rows(
        model,
        forecast,
        tokenizer.encode(load_excerpt()),
        context=arguments.context or 3000,
        modes=arguments.modes,
        repetitions=arguments.repetitions,
    )


def _decode_shape(arguments: argparse.Namespace) -> Iterator[Row]:
    from sparda_jax.config import ModelConfig
    from sparda_jax.evaluation import decode_traces, offload_benchmark

    workloads = [
        decode_traces.Workload(arguments.context or 131072, batch, hit_rate, arguments.repetitions)
        for batch in arguments.batch
        for hit_rate in arguments.hit_rate
    ]
    return offload_benchmark.rows(
        ModelConfig.preset(arguments.model),
        _sparse(arguments),
        workloads,
        arguments.modes or ["sparse_offload", "sparda_no_prefetch", "sparda"],
        prefix=f"decode/{arguments.model}",
        limits=offload_benchmark.Memory(
            int(arguments.device_kv_gb * 2**30),
            arguments.hbm_gb,
            int(arguments.host_kv_gb * 2**30),
            arguments.whole_pool,
        ),
        trace=arguments.trace,
        report=note,
    )


PREFILL_NOTES = (
    "Random weights and tokens made on the device, bfloat16; wall time from token ids to the "
    "first token, KV of all layers on the host for sparda and sparse, on the device for dense; "
    "runs after one that compiles and pins host memory. peak_over_weights_and_kv_gib: most "
    "bytes in use so far in the process, less weights and what stays on the device."
)


def _prefill(arguments: argparse.Namespace) -> None:
    from sparda_jax.config import ModelConfig
    from sparda_jax.evaluation import prefill_benchmark

    rows = prefill_benchmark.rows(
        ModelConfig.preset(arguments.model),
        _sparse(arguments),
        prefill_benchmark.Prompts(
            arguments.context, arguments.batch, arguments.chunk, arguments.repetitions
        ),
        arguments.modes,
        prefix=f"prefill/{arguments.model}",
        report=note,
    )
    publish(arguments, rows, PREFILL_NOTES)


SERVING_NOTES = (
    "Random weights and tokens, greedy, answers of a fixed length; sparda, KV in a host pool. "
    "saturated: all requests there at once, one prompt at a time prefilled between decode calls; "
    "loadX: Poisson arrivals at X times that request rate, from the arrival on. token: from "
    "the first to the last token, for each after the first; piece_gap: between two decode calls' "
    "tokens. prefix: two questions about one document, time to first token. offline: as many "
    "prompts as rows in one batch through Engine.generate, prefill and decode, a second run that "
    "neither compiles nor pins memory."
)


def _serving(arguments: argparse.Namespace) -> None:
    from sparda_jax.config import ModelConfig
    from sparda_jax.evaluation import serving_benchmark

    load = serving_benchmark.Load(
        prompt=arguments.context,
        answer=arguments.answer,
        requests=arguments.requests,
        rows=arguments.rows,
        prefill_seconds=arguments.prefill_ms / 1000,
        rates=arguments.load,
        arrivals=arguments.arrivals,
        document=arguments.document,
        offline=arguments.offline,
    )
    shape = ModelConfig.preset(arguments.model)
    engine = serving_benchmark.random_engine(shape, _sparse(arguments), load, arguments.chunk)
    rows = serving_benchmark.rows(engine, load, f"serving/{arguments.model}", note)
    publish(arguments, rows, SERVING_NOTES)


LOADING_NOTES = (
    "Random weights under a preset's names, in shards of 5 GiB; each figure once. load: files in "
    "the page cache as they were written, or (cold) evicted before; read: the first shard into a "
    "buffer, cached or cold; copy: 1 GiB to the device, plain or pinned. peak_host: over what was "
    "used before, the pages of the one mapped shard in it; peak_device: of the process so far. "
    "prefill, decode: sparda, offloaded, random Forecast, the same settings on all devices; a "
    "prefill after one that compiles and pins; decode calls of 8 steps, the first quarter left out."
)


def _loading(arguments: argparse.Namespace) -> None:
    from sparda_jax.evaluation import loading_benchmark

    rows = loading_benchmark.rows(
        arguments.model,
        arguments.folder,
        devices=arguments.devices,
        context=arguments.context,
        batch=arguments.batch,
        cold=arguments.cold,
    )
    publish(arguments, rows, LOADING_NOTES)


def _add_decode(commands: Commands, results: argparse.ArgumentParser) -> None:
    command = commands.add_parser(
        "decode", parents=[results], help="decode steps: a checkpoint's, or a shape's on a GPU"
    )
    command.add_argument(
        "--model", default="default", help="a checkpoint, or a preset's name: random weights"
    )
    command.add_argument("--context", type=int, help="tokens of each sequence")
    command.add_argument("--repetitions", type=int, default=3, help="timed runs of each mode")
    command.add_argument("--batch", type=int, nargs="+", default=[16], help="preset: sequences")
    command.add_argument(
        "--hit-rate", type=float, nargs="+", default=[0.9], help="preset: of the free blocks"
    )
    _add_sparse(command, "preset: ")
    command.add_argument(
        "--modes",
        nargs="+",
        help="a checkpoint: names in sparda_jax.evaluation.decode_benchmark.MODES (default: all); "
        "preset: in decode_modes.MODES (default: sparse_offload sparda_no_prefetch sparda)",
    )
    command.add_argument(
        "--trace",
        type=pathlib.Path,
        help="preset: folder for a timeline (Perfetto JSON) of a call of the first row",
    )
    command.add_argument(
        "--device-kv-gb", type=float, default=8.0, help="preset: GiB of KV in sparda_placed"
    )
    command.add_argument(
        "--hbm-gb",
        type=float,
        nargs="*",
        default=[],
        help="preset: GB (1e9) of device memory, weights included; each mode's largest batch under "
        "each, in place of --batch",
    )
    command.add_argument(
        "--host-kv-gb", type=float, default=110.0, help="preset: GiB of host KV under --hbm-gb"
    )
    command.add_argument(
        "--whole-pool",
        action="store_true",
        help="preset: pin host memory for every layer, not for one that stands for all",
    )
    command.set_defaults(run=_decode)


def _add_prefill(commands: Commands, results: argparse.ArgumentParser) -> None:
    command = commands.add_parser("prefill", parents=[results], help="prefill of a shape, on a GPU")
    command.add_argument("--model", default="minicpm4.1-8b", help="a preset's name")
    command.add_argument("--context", type=int, default=131072, help="tokens of each prompt")
    command.add_argument("--batch", type=int, default=1, help="prompts")
    command.add_argument("--chunk", type=int, default=4096, help="tokens of a chunk")
    command.add_argument("--repetitions", type=int, default=3, help="timed runs of each mode")
    _add_sparse(command)
    command.add_argument(
        "--modes", nargs="+", default=["sparda", "sparse", "dense"], help="what to run"
    )
    command.set_defaults(run=_prefill)


def _add_serving(commands: Commands, results: argparse.ArgumentParser) -> None:
    command = commands.add_parser(
        "serving", parents=[results], help="requests that come and go, a shape's on a GPU"
    )
    command.add_argument("--model", default="minicpm4.1-8b", help="a preset's name")
    command.add_argument("--context", type=int, default=32768, help="tokens of each prompt")
    command.add_argument("--answer", type=int, default=128, help="tokens of each answer")
    command.add_argument("--requests", type=int, default=24, help="at saturation")
    command.add_argument("--rows", type=int, default=8, help="requests at the same time")
    command.add_argument("--chunk", type=int, default=4096, help="tokens of a prefill chunk")
    command.add_argument("--prefill-ms", type=float, default=400, help="between two decode calls")
    command.add_argument(
        "--load", type=float, nargs="*", default=[0.5, 0.8], help="shares of the saturated rate"
    )
    command.add_argument("--arrivals", type=int, default=10, help="requests at each of these rates")
    command.add_argument(
        "--offline",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also the same prompts through Engine.generate",
    )
    command.add_argument("--document", type=int, default=65536, help="asked about twice; 0: none")
    _add_sparse(command)
    command.set_defaults(run=_serving)


def _add_loading(commands: Commands, results: argparse.ArgumentParser) -> None:
    command = commands.add_parser(
        "loading", parents=[results], help="a synthetic checkpoint: written, loaded, decoded"
    )
    command.add_argument("--model", default="minicpm4.1-8b", help="a preset's name")
    command.add_argument("--folder", type=pathlib.Path, required=True, help="for the checkpoint")
    command.add_argument("--devices", type=int, default=1, help="that share the heads")
    command.add_argument("--context", type=int, default=32768, help="tokens of each prompt")
    command.add_argument("--batch", type=int, default=4, help="requests")
    command.add_argument("--cold", action="store_true", help="also load with the files evicted")
    command.set_defaults(run=_loading)


def add(commands: Commands, results: argparse.ArgumentParser) -> None:
    """Adds `decode`, `prefill`, `serving` and `loading`."""
    for one in (_add_decode, _add_prefill, _add_serving, _add_loading):
        one(commands, results)
