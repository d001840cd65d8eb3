"""HERALD: speed of every mode, of the host's side alone, and what leaving rows out costs."""

from __future__ import annotations

import argparse
import pathlib
from typing import TYPE_CHECKING

from sparda_jax.cli import note
from sparda_jax.commands.benchmarks.publish import publish, stopwatch

if TYPE_CHECKING:
    from sparda_jax.commands.benchmarks.publish import Commands


HERALD_NOTES = (
    "Random weights and one random prompt for all requests, bfloat16; turns in which every request "
    "gets one block in U denoising forwards and a commit, after a turn that compiles. gpu_ms: from "
    "a turn's begin until all rows had given their block; stall_ms: waited for chosen rows after "
    "that. limit_...: the cost model's, at the rates that herald-host measured where --host-rates "
    "names them; target: 85 % of limit_tok_s. Options after a mode: int8 keys, all queries, runs."
)


def _herald(arguments: argparse.Namespace) -> None:
    import dataclasses
    import json
    import shlex
    import sys
    from collections.abc import Sequence

    import jax.numpy as jnp

    from sparda_jax.config import ModelConfig
    from sparda_jax.evaluation import herald_benchmark, herald_host_benchmark
    from sparda_jax.evaluation.kernel_benchmarks import results_document
    from sparda_jax.herald.config import Budget, HeraldConfig
    from sparda_jax.herald.cost import H200
    from sparda_jax.herald.report import Event
    from sparda_jax.models.decoder import Decoder

    machine = dataclasses.replace(
        H200, device_bytes=arguments.device_gb * 1e9, host_bytes=arguments.host_gb * 2**30
    )
    if arguments.host_rates:
        measured = json.loads(arguments.host_rates.read_text())["rows"]
        machine = herald_host_benchmark.measured(measured, machine)
    plan = herald_benchmark.Plan(
        context=arguments.context,
        steps=tuple(arguments.steps),
        turns=arguments.turns,
        variants=tuple(map(herald_benchmark.Variant.parse, arguments.modes)),
        machine=machine,
    )
    config = HeraldConfig(
        budget=Budget(arguments.budget_share),
        prefill_chunk=arguments.chunk,
        workers=arguments.workers,
    )
    preset = ModelConfig.preset(arguments.model)
    if arguments.layers:
        preset = dataclasses.replace(preset, num_layers=arguments.layers)
    if arguments.estimate:
        herald_benchmark.estimates(preset, config, plan, note)
        return

    def draw(name: str, events: Sequence[Event]) -> None:
        if arguments.timeline and "/herald" in name and "serial" not in name:
            command = shlex.join(["python", *sys.argv])
            notes = f"One turn of {name}: sum of all times in a lane; spread: shortest and longest."
            told, shown = herald_benchmark.timeline_rows(name, events)
            document = results_document(command, told, notes, commit=arguments.commit)
            arguments.timeline.write_text(json.dumps(document | {"events": shown}) + "\n")
            arguments.timeline = None  # the first is enough

    model = Decoder.random(preset, dtype=jnp.bfloat16)
    prefix = f"herald/{arguments.model}/{arguments.context // 1024}K"
    rows = herald_benchmark.rows(model, config, plan, prefix=prefix, report=note, timeline=draw)
    publish(arguments, rows, HERALD_NOTES)


HERALD_HOST_NOTES = (
    "Random bfloat16 keys and queries in a store of a few layers, through the classes that a "
    "generation uses; portable: by numpy and XLA, native: by compiled code.  read: numpy sums the "
    "keys, the best of these is the machine's read bandwidth; scan: bytes of keys (native: the "
    "choice included), of_roofline: of that bandwidth; gather: bytes of chosen keys and values, "
    "read once and written once; retrieval: one request's layer through scan, choice, gather and "
    "copy, all side by side; ..._thread_ms: of one thread."
)


def _herald_host(arguments: argparse.Namespace) -> None:
    from sparda_jax.config import ModelConfig
    from sparda_jax.evaluation import herald_host_benchmark

    plan = herald_host_benchmark.HostPlan(
        context=arguments.context,
        batch=arguments.batch,
        layers=arguments.layers,
        workers=tuple(arguments.workers),
        share=arguments.budget_share,
        implementations=tuple(arguments.implementations),
    )
    model = ModelConfig.preset(arguments.model)
    prefix = f"herald_host/{arguments.model}/{arguments.context // 1024}K"
    publish(arguments, herald_host_benchmark.rows(model, plan, prefix), HERALD_HOST_NOTES)


HERALD_QUALITY_NOTES = (
    "The model's own block diffusion, greedy.  text: held-out text, words: lists of words drawn by "
    "Zipf's law; teacher-forced, every mode on the same windows, blocks and masks; bound: nats a "
    "token of the any-order likelihood bound of a block; ..._over_dense: paired difference; kl: "
    "of the predictions of masked tokens, from dense ones; agreement: share of these whose first "
    "choice is the dense one's; recall: of the rows that all queries of the block choose over "
    "dense attention; mass: of these queries' attention that the chosen rows hold; "
    "gain_kept: of what the context is worth over the init "
    "rows and the block before alone (near).  selection: int8 keys and runs of rows against the "
    "exact choice of single rows, by the centre query; mass: softmax mass that the rows hold, over "
    "what the exact choice holds.  generation: steps: denoising forwards a block, the "
    "commit aside.  needles: share of the values found in greedy generation.  spread: 95 % "
    "bootstrap interval over windows or samples.  PX%: of the scanned rows; init rows and the "
    "block before on top."
)


def _herald_quality(arguments: argparse.Namespace) -> None:
    import sys

    import jax.numpy as jnp
    import numpy as np

    from sparda_jax.checkpoints.load import load_pretrained
    from sparda_jax.diffusion.files import load_adapter
    from sparda_jax.evaluation import herald_quality_benchmark as benchmark
    from sparda_jax.evaluation.herald_windows import QualityPlan

    model, tokenizer = load_pretrained(arguments.model, dtype=jnp.dtype(arguments.dtype))
    if tokenizer is None:
        sys.exit(f"benchmark.py: {arguments.model} has no tokenizer, which the word lists need")
    if arguments.adapter != "none":
        model = load_adapter(arguments.adapter, model)
    shares = tuple(percent / 100 for percent in arguments.percents)
    quality = QualityPlan(shares=shares, blocks=arguments.blocks, masks=arguments.masks)
    plan = benchmark.BenchmarkPlan(
        quality=quality,
        sections=tuple(arguments.sections),
        length=arguments.length,
        windows=arguments.windows,
        batch=arguments.batch,
        generate_shares=tuple(percent / 100 for percent in arguments.generate_percents),
        generate_modes=tuple(arguments.generate_modes),
        prompts=arguments.prompts,
        new_tokens=arguments.new_tokens,
        threshold=arguments.threshold,
        needle_lengths=tuple(arguments.needle_lengths),
        needles=arguments.needles,
        seconds=arguments.seconds,
    )
    documents = [np.load(path) for path in arguments.text]
    rows = benchmark.rows(model, tokenizer, documents, plan, stopwatch())
    publish(arguments, rows, HERALD_QUALITY_NOTES)


def add(commands: Commands, results: argparse.ArgumentParser) -> None:
    """Adds `herald`, `herald-host` and `herald-quality`."""
    command = commands.add_parser(
        "herald", parents=[results], help="block diffusion, all modes, KV in host memory, on a GPU"
    )
    command.add_argument("--model", default="sdar-8b-chat-b32", help="a preset's name")
    command.add_argument("--context", type=int, default=32768, help="tokens at the end")
    command.add_argument("--layers", type=int, help="of the model (default: all)")
    command.add_argument(
        "--steps", type=int, nargs="+", default=[20], help="U, denoising forwards a block"
    )
    command.add_argument("--turns", type=int, default=4, help="timed, a block of each request each")
    command.add_argument(
        "--modes",
        nargs="+",
        metavar="MODE[:OPTION,...]",
        default=["dense", "mage", "herald", "herald:int8", "herald_serial:int8", "mage_offload"],
        help="what to run; options: int8, all (queries), run4 (8, 16), B6 (requests; default: the "
        "cost model's best)",
    )
    command.add_argument("--budget-share", type=float, default=0.05, help="of the prefix")
    command.add_argument("--chunk", type=int, default=4096, help="prompt tokens of a prefill call")
    command.add_argument("--workers", type=int, default=16, help="threads that scan and gather")
    command.add_argument("--device-gb", type=float, default=80.0, help="10^9 bytes of HBM to use")
    command.add_argument("--host-gb", type=float, default=200.0, help="GiB of host KV at most")
    command.add_argument("--host-rates", type=pathlib.Path, help="a results file of herald-host")
    command.add_argument(
        "--timeline", type=pathlib.Path, help="results file: a turn of the first herald mode"
    )
    command.add_argument("--estimate", action="store_true", help="print the cost model and end")
    command.set_defaults(run=_herald)
    command = commands.add_parser(
        "herald-host", parents=[results], help="the host's scan, choice and gather, no model"
    )
    command.add_argument("--model", default="sdar-8b-chat-b32", help="whose KV heads")
    command.add_argument("--context", type=int, default=32768, help="rows of each request")
    command.add_argument("--batch", type=int, default=6, help="requests")
    command.add_argument("--layers", type=int, default=4, help="of the store")
    command.add_argument("--workers", type=int, nargs="+", default=[8, 16, 32], help="threads")
    command.add_argument("--budget-share", type=float, default=0.05, help="of the rows, chosen")
    command.add_argument(
        "--implementations",
        nargs="+",
        choices=("portable", "native"),
        default=["portable", "native"],
        help="of the choice and the gather",
    )
    command.set_defaults(run=_herald_host)
    command = commands.add_parser(
        "herald-quality", parents=[results], help="what the modes lose on a block-diffusion model"
    )
    add = command.add_argument
    add("text", type=pathlib.Path, nargs="+", help=".npy of token ids, held out, one a document")
    add("--model", default="default", help="as in decode.py")
    add("--adapter", default="default", help='block-diffusion adapter; "none": the model has it')
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    add("--sections", nargs="+", default=["text", "words", "selection", "generation", "needles"])
    add("--length", type=int, default=2048, help="tokens of a window, a multiple of 512")
    add("--windows", type=int, default=64, help="of each teacher-forced section")
    add("--batch", type=int, default=16, help="windows at a time")
    add("--percents", type=float, nargs="+", default=[2.5, 5, 10, 20], help="budgets")
    add("--blocks", type=int, default=4, help="of each window")
    add("--masks", type=int, default=4, help="numbers of masked tokens for each block")
    add("--generate-percents", type=float, nargs="+", default=[5, 20])
    add("--generate-modes", nargs="+", default=["mage", "herald", "infinigen"])
    add("--prompts", type=int, default=16, help="of generation")
    add("--new-tokens", type=int, default=96)
    add("--threshold", type=float, default=0.7, help="of the generation's confidence")
    add("--needle-lengths", type=int, nargs="+", default=[512, 1024])
    add("--needles", type=int, default=16, help="samples of each task and length")
    add("--seconds", type=float, default=float("inf"), help="no further batch of a section after")
    command.set_defaults(run=_herald_quality)
