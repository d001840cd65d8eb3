"""Benchmarks; each subcommand prints rows and can write a results file."""

import argparse
import json
import math
import os
import pathlib
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sparda_jax.evaluation import kernel_benchmarks

# For machines where the code lies without its repository.
COMMIT = os.environ.get("SPARDA_JAX_COMMIT")

NOTES = (
    "Times are wall clock of a loop inside one program, divided by the calls; device buffers are "
    "rotated so that they do not stay in L2.  of_roofline: share of the bandwidth of a large "
    "device copy (selection, pool attention) or of 53 GB/s (fetch).  error: relative L2 error, "
    "share of blocks chosen otherwise (selection) or of wrong elements (fetch)."
)


def publish(
    arguments: argparse.Namespace,
    rows: Iterable[kernel_benchmarks.Row],
    notes: str,
    *,
    show: Callable[[kernel_benchmarks.Row], bool] = lambda row: True,
) -> None:
    """Prints rows as they come; the results file is written at the first, then every second, and at
    the end, failed or not: a run that is cut short keeps what it has measured.

    Args:
        arguments: `json`, the results file or None; `merge`, whether its other rows stay.
        rows: of the benchmark.
        notes: for the file.
        show: whether to print a row.
    """
    path, command = arguments.json, shlex.join(["python", *sys.argv])
    before: list[dict[str, Any]] = []
    if path and arguments.merge and path.exists():
        before = json.loads(path.read_text())["rows"]
    done: list[kernel_benchmarks.Row] = []

    def write() -> None:
        if not path or not done:
            return
        document = kernel_benchmarks.results_document(command, done, notes, commit=COMMIT)
        measured = {new["name"] for new in document["rows"]}
        document["rows"][:0] = [old for old in before if old["name"] not in measured]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")

    written = -math.inf
    try:
        for row in rows:
            if show(row):
                print(json.dumps(row.as_json()), flush=True)
            done.append(row)
            if time.monotonic() > written + 1:
                write()
                written = time.monotonic()
    finally:
        write()


def kernels(arguments: argparse.Namespace) -> None:
    names = [
        name
        for name in kernel_benchmarks.REGISTRY
        if not arguments.only or any(part in name for part in arguments.only)
    ]
    if not names:
        sys.exit(f"benchmark.py: no kernel benchmark has one of {arguments.only} in its name")
    session = kernel_benchmarks.Session(refcheck=arguments.refcheck)
    rows = kernel_benchmarks.run(names, session, seconds=arguments.seconds)
    try:
        publish(arguments, rows, NOTES)
    except kernel_benchmarks.Incomplete as error:
        sys.exit(f"benchmark.py: {error}")


DECODE_NOTES = (
    "A checkpoint: text, float32, batch 1, greedy, 64 timed steps a repetition after a warm-up "
    "run; decode/dense/256: context grows to 256 tokens; its target is twice the time numpy "
    "needs to sum every weight once, measured alternately in the same run. A shape: random "
    "weights, bfloat16, and random caches, made on the device; the hit rate is a trace's, the "
    "selection kernels run; one layer's pool serves all layers; tokens a second, median, least "
    "and most of programs of 32 steps after one that fills the slots; write-back of filled "
    "blocks between programs is not in it. compute_alone_ms: the same program with a trace that"
    " never misses; fetch_alone_ms: the same copies and nothing else. of_roofline: the larger "
    "of what a step must read of the device's memory over a large copy's rate, and what it "
    "fetches over 53 GB/s, over the step. Compile time is excluded everywhere."
)


def decode(arguments: argparse.Namespace) -> None:
    from sparda_jax.presets import PRESETS

    if arguments.model in PRESETS:
        rows = decode_shape(arguments)
    else:
        rows = decode_checkpoint(arguments)
    publish(arguments, rows, DECODE_NOTES)


def decode_checkpoint(arguments: argparse.Namespace) -> Iterator[kernel_benchmarks.Row]:
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
        repetitions=arguments.repetitions,
    )


def decode_shape(arguments: argparse.Namespace) -> Iterator[kernel_benchmarks.Row]:
    from sparda_jax.config import ModelConfig, SparseConfig
    from sparda_jax.evaluation import decode_traces, offload_benchmark

    workloads = [
        decode_traces.Workload(arguments.context or 131072, batch, hit_rate, arguments.repetitions)
        for batch in arguments.batch
        for hit_rate in arguments.hit_rate
    ]
    return offload_benchmark.rows(
        ModelConfig.preset(arguments.model),
        SparseConfig(local_blocks=arguments.local_blocks, budget_blocks=arguments.budget_blocks),
        workloads,
        arguments.modes,
        prefix=f"decode/{arguments.model}",
        device_kv_bytes=int(arguments.device_kv_gb * 2**30),
        trace=arguments.trace,
        report=lambda line: print(line, file=sys.stderr, flush=True),
    )


PREFILL_NOTES = (
    "Random weights and tokens made on the device, bfloat16; wall time from token ids to the "
    "first token, KV of all layers on the host for sparda and sparse, on the device for dense; "
    "runs after one that compiles and pins host memory. peak_over_weights_and_kv_gib: most "
    "bytes in use so far in the process, less weights and what stays on the device."
)


def prefill(arguments: argparse.Namespace) -> None:
    from sparda_jax.config import ModelConfig, SparseConfig
    from sparda_jax.evaluation import prefill_benchmark

    rows = prefill_benchmark.rows(
        ModelConfig.preset(arguments.model),
        SparseConfig(local_blocks=arguments.local_blocks, budget_blocks=arguments.budget_blocks),
        prefill_benchmark.Prompts(
            arguments.context, arguments.batch, arguments.chunk, arguments.repetitions
        ),
        arguments.modes,
        prefix=f"prefill/{arguments.model}",
        report=lambda line: print(line, file=sys.stderr, flush=True),
    )
    publish(arguments, rows, PREFILL_NOTES)


SERVING_NOTES = (
    "Random weights and tokens, greedy, answers of a fixed length. offline: one batch through "
    "Engine.generate, prefill included. saturated: all requests there at once, one prompt at a "
    "time prefilled between decode calls; load0.5: Poisson arrivals at half that request rate. "
    "prefix: two questions about one document, time to first token."
)


def serving(arguments: argparse.Namespace) -> None:
    import jax.numpy as jnp

    from sparda_jax.config import EngineConfig, ModelConfig, SparseConfig
    from sparda_jax.engine.generate import Engine
    from sparda_jax.evaluation import serving_benchmark
    from sparda_jax.forecast.projection import Forecast
    from sparda_jax.models.decoder import Decoder

    shape, dtype = ModelConfig.preset(arguments.model), jnp.dtype("bfloat16")
    config = EngineConfig(
        mode="sparda",
        offload="host",
        prefill_chunk=arguments.chunk,
        max_length=max(arguments.context + arguments.answer, arguments.document + 256),
    )
    engine = Engine(
        Decoder.random(shape, dtype=dtype),
        sparse=SparseConfig(
            local_blocks=arguments.local_blocks, budget_blocks=arguments.budget_blocks
        ),
        config=config,
        forecast=Forecast.random(shape, dtype=dtype),
    )
    rows = serving_benchmark.rows(
        engine,
        serving_benchmark.Load(
            arguments.context,
            arguments.answer,
            arguments.requests,
            arguments.rows,
            arguments.prefill_ms / 1000,
        ),
        arguments.load,
        arguments.document,
        f"serving/{arguments.model}",
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    publish(arguments, rows, SERVING_NOTES)


TRAINING_NOTES = (
    "Random weights and tokens made on the device, bfloat16 backbone, float32 projections.  Peak "
    "memory: bytes in use at most, weights included.  part/...: of a whole step, each timed in a "
    "program of its own; loss_... contains teacher and two choices."
)


def training(arguments: argparse.Namespace) -> None:
    from sparda_jax.evaluation import training_benchmark

    def rows() -> Iterator[kernel_benchmarks.Row]:
        for name, workload in training_benchmark.workloads().items():
            if not arguments.only or any(part in name for part in arguments.only):
                steps = arguments.steps
                yield from training_benchmark.rows(name, workload, steps=steps, folder="unused")

    publish(arguments, rows(), TRAINING_NOTES)


DIFFUSION_NOTES = (
    "samples/...: continuations of held-out text; perplexity under the causal model, given the "
    "prompt; target: 1.5 times that of the causal model's own samples at the same temperature; "
    "distinct_n: distinct n-grams of a continuation by all of them, mean; n: continuations; "
    "steps_pX: percentiles of denoising forwards a block, the commit aside.  block_diffusion/...: "
    "random weights and caches, one block per request, U steps and a commit, wall clock of the "
    "call; of_roofline: the sum over operations of the larger of bytes and FLOPs, over the step."
)


def diffusion_samples(arguments: argparse.Namespace) -> None:
    import jax.numpy as jnp
    import numpy as np

    from sparda_jax.checkpoints.load import load_pretrained
    from sparda_jax.diffusion.files import load_adapter
    from sparda_jax.evaluation import block_diffusion_benchmark as benchmark

    model, _ = load_pretrained(arguments.model, dtype=jnp.dtype(arguments.dtype))
    text = np.load(arguments.text)
    stride = len(text) // arguments.samples
    starts = range(0, stride * arguments.samples, stride)
    plan = benchmark.Sampling(
        [text[at : at + arguments.prompt].tolist() for at in starts],
        arguments.new_tokens,
        arguments.temperatures,
        arguments.thresholds,
        arguments.strategy,
        arguments.sub_block,
    )
    rows = benchmark.sample_rows(model, load_adapter(arguments.adapter, model), plan)
    publish(arguments, rows, DIFFUSION_NOTES)


def diffusion_speed(arguments: argparse.Namespace) -> None:
    from sparda_jax.config import ModelConfig
    from sparda_jax.evaluation import block_diffusion_benchmark as benchmark
    from sparda_jax.presets import PRESETS

    config = ModelConfig.from_huggingface(PRESETS[arguments.model])
    rows = benchmark.speed_rows(
        arguments.model,
        config,
        arguments.contexts,
        arguments.batches,
        steps=arguments.steps,
    )
    publish(arguments, rows, DIFFUSION_NOTES)


HERALD_NOTES = (
    "Random weights and one random prompt for all requests, bfloat16; turns in which every request "
    "gets one block in U denoising forwards and a commit, after a turn that compiles. limit_tok_s: "
    "the cost model's, of which the target is 85 %."
)


def herald(arguments: argparse.Namespace) -> None:
    import dataclasses

    import jax.numpy as jnp

    from host_offload.cpu_selection import SelectionRule
    from sparda_jax.config import ModelConfig
    from sparda_jax.evaluation import herald_benchmark
    from sparda_jax.herald.config import Budget, HeraldConfig
    from sparda_jax.herald.cost import H200
    from sparda_jax.models.decoder import Decoder

    report: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
    machine = dataclasses.replace(
        H200, device_bytes=arguments.device_gb * 1e9, host_bytes=arguments.host_gb * 2**30
    )
    plan = herald_benchmark.Plan(
        context=arguments.context,
        steps=arguments.steps,
        turns=arguments.turns,
        modes=tuple(arguments.modes),
        batches=tuple(arguments.batches),
        machine=machine,
    )
    config = HeraldConfig(
        budget=Budget(arguments.budget_share),
        rule=SelectionRule(run=arguments.run_length),
        quantised_keys=arguments.int8_keys,
        prefill_chunk=arguments.chunk,
        workers=arguments.workers,
    )
    preset = ModelConfig.preset(arguments.model)
    if arguments.estimate:
        herald_benchmark.estimates(preset, config, plan, report)
        return
    model = Decoder.random(preset, dtype=jnp.bfloat16)
    kind = "int8" if arguments.int8_keys else "bf16"
    prefix = f"herald/{arguments.model}/{arguments.context // 1024}K/{kind}"
    rows = herald_benchmark.rows(model, config, plan, prefix=prefix, report=report)
    publish(arguments, rows, HERALD_NOTES)


QUALITY_NOTES = (
    "Whole sequences, teacher-forced, every policy in every layer and for every token.  spread: "
    "95 % bootstrap interval over documents (samples, for needles).  own: the model's policy; "
    "PX%: budget in percent of the context, forced blocks included, 1 leading block, 3 local ones "
    "(needles: 1), windows of half a block.  ..._over_sparse: paired difference to the multi-head "
    "selector.  Names: section/setting/budget/meter/policy."
)


def quality(arguments: argparse.Namespace) -> None:
    import jax.numpy as jnp

    from sparda_jax.checkpoints.load import load_pretrained
    from sparda_jax.evaluation import quality_benchmark

    model, tokenizer = load_pretrained(arguments.model, dtype=jnp.dtype(arguments.dtype))
    if tokenizer is None:
        sys.exit(f"benchmark.py: {arguments.model} has no tokenizer, which needles need")
    start = time.monotonic()

    def report(line: str) -> None:
        print(f"{time.monotonic() - start:7.1f} s  {line}", file=sys.stderr, flush=True)

    plan = quality_benchmark.Plan(
        length=arguments.length,
        fine_length=arguments.fine_length,
        percents=tuple(arguments.percents),
        blocks=arguments.blocks,
        needle_lengths=tuple(arguments.needle_lengths),
        samples=arguments.samples,
        dense_finds=arguments.dense_finds,
        every=arguments.every,
        sections=tuple(arguments.sections or quality_benchmark.SECTIONS),
        seconds=arguments.seconds,
        workers=arguments.workers,
    )
    inputs = quality_benchmark.read_inputs(
        model,
        tokenizer,
        text=arguments.text,
        haystacks=arguments.haystacks or arguments.text,
        calibration=arguments.calibration,
        forecasts=arguments.forecast,
        variants=arguments.variant,
        documents=arguments.documents,
        plan=plan,
    )
    rows = quality_benchmark.rows(inputs, plan, report)
    # By layer and by position there are hundreds: those are for the file.
    publish(arguments, rows, QUALITY_NOTES, show=lambda row: row.name.count("/") == 4)


def quality_report(arguments: argparse.Namespace) -> None:
    from sparda_jax.evaluation import quality_report as page

    rows = page.read_rows(arguments.results)
    arguments.page.write_text(page.fill(arguments.page.read_text(), rows))
    page.plot(rows, arguments.page.with_suffix(".svg"))


def loading(arguments: argparse.Namespace) -> None:
    from sparda_jax.evaluation import loading_benchmark

    rows = loading_benchmark.rows(
        arguments.model,
        arguments.folder,
        devices=arguments.devices,
        context=arguments.context,
        batch=arguments.batch,
    )
    publish(
        arguments,
        rows,
        "Random weights under a preset's names, in shards of 5 GiB, once each. read: all shards "
        "into a buffer just before; copy: a plain array to the device. peak_host: over what was "
        "used before. Decode: sparda, offloaded, random Forecast, 64 tokens.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    results = argparse.ArgumentParser(add_help=False)
    results.add_argument("--json", type=pathlib.Path, help="write a results file")
    results.add_argument("--merge", action="store_true", help="keep the file's other rows")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("kernels", parents=[results], help="the Pallas kernels, on a GPU")
    command.add_argument("--refcheck", action="store_true", help="also compare with references")
    command.add_argument("--only", nargs="*", help="benchmarks whose name contains one of these")
    command.add_argument(
        "--seconds", type=float, default=float("inf"), help="no further row after so long"
    )
    command.set_defaults(run=kernels)
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
    command.add_argument("--local-blocks", type=int, default=32, help="preset: forced")
    command.add_argument("--budget-blocks", type=int, default=96, help="preset: selected")
    command.add_argument(
        "--modes",
        nargs="+",
        default=["sparse_offload", "sparda_no_prefetch", "sparda"],
        help="preset: names in sparda_jax.evaluation.offload_benchmark.MODES",
    )
    command.add_argument(
        "--trace", type=pathlib.Path, help="preset: folder for a timeline (Perfetto JSON) of a call"
    )
    command.add_argument(
        "--device-kv-gb", type=float, default=8.0, help="preset: GiB of KV in sparda_placed"
    )
    command.set_defaults(run=decode)
    command = commands.add_parser("prefill", parents=[results], help="prefill of a shape, on a GPU")
    command.add_argument("--model", default="minicpm4.1-8b", help="a preset's name")
    command.add_argument("--context", type=int, default=131072, help="tokens of each prompt")
    command.add_argument("--batch", type=int, default=1, help="prompts")
    command.add_argument("--chunk", type=int, default=4096, help="tokens of a chunk")
    command.add_argument("--repetitions", type=int, default=3, help="timed runs of each mode")
    command.add_argument("--local-blocks", type=int, default=32, help="forced")
    command.add_argument("--budget-blocks", type=int, default=96, help="selected")
    command.add_argument(
        "--modes", nargs="+", default=["sparda", "sparse", "dense"], help="what to run"
    )
    command.set_defaults(run=prefill)
    command = commands.add_parser(
        "serving", parents=[results], help="requests that come and go, a shape's on a GPU"
    )
    command.add_argument("--model", default="minicpm4.1-8b", help="a preset's name")
    command.add_argument("--context", type=int, default=32768, help="tokens of each prompt")
    command.add_argument("--answer", type=int, default=256, help="tokens of each answer")
    command.add_argument("--requests", type=int, default=32, help="of each measurement")
    command.add_argument("--rows", type=int, default=16, help="requests at the same time")
    command.add_argument("--chunk", type=int, default=512, help="tokens of a prefill chunk")
    command.add_argument("--prefill-ms", type=float, default=50, help="between two decode calls")
    command.add_argument(
        "--load", type=float, nargs="*", default=[0.5, 0.8], help="shares of the saturated rate"
    )
    command.add_argument("--document", type=int, default=65536, help="asked about twice; 0: none")
    command.add_argument("--local-blocks", type=int, default=32, help="forced")
    command.add_argument("--budget-blocks", type=int, default=96, help="selected")
    command.set_defaults(run=serving)
    command = commands.add_parser(
        "loading", parents=[results], help="a synthetic checkpoint: written, loaded, decoded"
    )
    command.add_argument("--model", default="minicpm4.1-8b", help="a preset's name")
    command.add_argument("--folder", type=pathlib.Path, required=True, help="for the checkpoint")
    command.add_argument("--devices", type=int, default=1, help="that share the heads")
    command.add_argument("--context", type=int, default=32768, help="tokens of each prompt")
    command.add_argument("--batch", type=int, default=4, help="requests")
    command.set_defaults(run=loading)
    command = commands.add_parser(
        "training", parents=[results], help="training of the Forecast, on a GPU"
    )
    command.add_argument("--only", nargs="*", help="shapes whose name contains one of these")
    command.add_argument("--steps", type=int, default=3, help="timed steps")
    command.set_defaults(run=training)
    command = commands.add_parser(
        "herald", parents=[results], help="block diffusion, all modes, KV in host memory, on a GPU"
    )
    command.add_argument("--model", default="sdar-8b-chat-b32", help="a preset's name")
    command.add_argument("--context", type=int, default=32768, help="tokens at the end")
    command.add_argument("--steps", type=int, default=20, help="U, denoising forwards a block")
    command.add_argument("--turns", type=int, default=4, help="timed, a block of each request each")
    command.add_argument(
        "--modes",
        nargs="+",
        default=["dense", "mage", "mage_offload", "herald_serial", "herald"],
        choices=["dense", "mage", "mage_offload", "infinigen", "herald_serial", "herald"],
        help="what to run",
    )
    command.add_argument(
        "--batches", type=int, nargs="*", default=[], help="requests (default: the model's best)"
    )
    command.add_argument("--budget-share", type=float, default=0.05, help="of the prefix")
    command.add_argument("--run-length", type=int, default=1, help="rows chosen together")
    command.add_argument("--int8-keys", action="store_true", help="scan int8 keys")
    command.add_argument("--chunk", type=int, default=4096, help="prompt tokens of a prefill call")
    command.add_argument("--workers", type=int, default=16, help="threads that scan and gather")
    command.add_argument("--device-gb", type=float, default=80.0, help="10^9 bytes of HBM to use")
    command.add_argument("--host-gb", type=float, default=200.0, help="GiB of host KV at most")
    command.add_argument("--estimate", action="store_true", help="print the cost model and end")
    command.set_defaults(run=herald)
    command = commands.add_parser(
        "quality", parents=[results], help="selection policies on text and needles"
    )
    command.add_argument("--model", default="default", help="as in decode.py")
    command.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    command.add_argument("--forecast", nargs="+", required=True, help="NAME=PATH, run everywhere")
    command.add_argument(
        "--variant", nargs="*", default=[], help="NAME=PATH[@LOOKAHEAD], on its own policy alone"
    )
    command.add_argument("--text", type=pathlib.Path, nargs="+", required=True, help="held out")
    command.add_argument("--haystacks", type=pathlib.Path, nargs="*", help="default: the text")
    command.add_argument("--calibration", type=pathlib.Path, nargs="+", required=True)
    command.add_argument("--documents", type=int, default=1000, help="at most")
    command.add_argument("--length", type=int, default=8192, help="tokens of a long document")
    command.add_argument("--fine-length", type=int, default=2048, help="of a short one")
    command.add_argument("--percents", type=float, nargs="+", default=[50, 25, 12.5, 6.25])
    command.add_argument("--blocks", type=int, default=128, help="of a text, for %% budgets")
    command.add_argument("--needle-lengths", type=int, nargs="*", default=[1024, 2048, 4096])
    command.add_argument("--samples", type=int, default=16, help="needles of each of three seeds")
    command.add_argument("--dense-finds", type=float, default=0.8, help="compare needles from here")
    command.add_argument(
        "--every", type=int, default=1, help="count selections at 2 tokens in so many"
    )
    command.add_argument("--sections", nargs="*", metavar="SECTION", help="default: all")
    command.add_argument("--seconds", type=float, help="no further document of a section after")
    command.add_argument("--workers", type=int, default=1, help="sections side by side")
    command.set_defaults(run=quality)
    command = commands.add_parser(
        "diffusion-samples", parents=[results], help="quality of a block-diffusion model's samples"
    )
    command.set_defaults(run=diffusion_samples)
    command.add_argument("text", type=pathlib.Path, help=".npy of token ids, held-out text")
    command.add_argument("--model", default="default")
    command.add_argument("--adapter", default="default")
    command.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    command.add_argument("--samples", type=int, default=64)
    command.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    command.add_argument("--new-tokens", type=int, default=128)
    command.add_argument("--temperatures", type=float, nargs="+", default=[0.8])
    command.add_argument("--thresholds", type=float, nargs="+", default=[0.7, 0.8, 0.9, 0.95])
    command.add_argument("--strategy", default="threshold_or_first")
    command.add_argument("--sub-block", type=int)
    command = commands.add_parser(
        "diffusion-speed", parents=[results], help="block decoding of a large shape, resident KV"
    )
    command.set_defaults(run=diffusion_speed)
    command.add_argument("model", help="a preset: sdar-8b-chat-b32 or llada2.0-mini")
    command.add_argument("--contexts", type=int, nargs="+", default=[1024, 16384, 32000])
    command.add_argument("--batches", type=int, nargs="+", default=[1])
    command.add_argument("--steps", type=int, default=20, help="U")
    command = commands.add_parser("quality-report", help="fill a page's tables, draw its picture")
    command.add_argument("results", type=pathlib.Path, help="a results file of `quality`")
    command.add_argument("page", type=pathlib.Path, help="Markdown; the picture goes beside it")
    command.set_defaults(run=quality_report)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
