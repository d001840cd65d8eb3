"""Benchmarks; each subcommand prints rows and can write a results file."""

import argparse
import json
import os
import pathlib
import shlex
import sys

from sparda_jax.evaluation import kernel_benchmarks

# For machines where the code lies without its repository.
COMMIT = os.environ.get("SPARDA_JAX_COMMIT")

NOTES = (
    "Times are wall clock of a loop inside one program, divided by the calls; device buffers are "
    "rotated so that they do not stay in L2.  of_roofline: share of the bandwidth of a large "
    "device copy (selection, pool attention) or of 53 GB/s (fetch).  error: relative L2 error, "
    "share of blocks chosen otherwise (selection) or of wrong elements (fetch)."
)


def kernels(arguments: argparse.Namespace) -> None:
    names = [
        name
        for name in kernel_benchmarks.REGISTRY
        if not arguments.only or any(part in name for part in arguments.only)
    ]
    session = kernel_benchmarks.Session(refcheck=arguments.refcheck)
    command = shlex.join(["python", *sys.argv])
    before = []
    if arguments.json and arguments.merge and arguments.json.exists():
        before = json.loads(arguments.json.read_text())["rows"]
    rows = []
    for row in kernel_benchmarks.run(names, session):
        print(json.dumps(row.as_json()), flush=True)
        rows.append(row)
        if arguments.json:
            # After every row: a run that is cut short keeps what it has measured.
            document = kernel_benchmarks.results_document(command, rows, NOTES, commit=COMMIT)
            measured = {new["name"] for new in document["rows"]}
            document["rows"][:0] = [old for old in before if old["name"] not in measured]
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(document, indent=1) + "\n")


DECODE_NOTES = (
    "SmolLM2-135M-Instruct, float32, batch 1, greedy, 64 timed steps a repetition after a warm-up "
    "run; compile time excluded.  decode/dense/256: context grows to 256 tokens; its target is "
    "twice the time numpy needs to sum every weight once, measured alternately in the same run."
)


def decode(arguments: argparse.Namespace) -> None:
    import jax.numpy as jnp

    from sparda_jax.assets import load_excerpt
    from sparda_jax.checkpoints.load import load_pretrained
    from sparda_jax.evaluation import decode_benchmark

    model, tokenizer = load_pretrained("default", dtype=jnp.dtype("float32"))
    assert tokenizer is not None
    tokens = tokenizer.encode(load_excerpt())
    rows = []
    measured = decode_benchmark.rows(
        model, tokens, context=arguments.context, repetitions=arguments.repetitions
    )
    for row in measured:
        print(json.dumps(row.as_json()), flush=True)
        rows.append(row)
    if arguments.json:
        command = shlex.join(["python", *sys.argv])
        document = kernel_benchmarks.results_document(command, rows, DECODE_NOTES, commit=COMMIT)
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


TRAINING_NOTES = (
    "Random weights and tokens made on the device, bfloat16 backbone, float32 projections.  Peak "
    "memory: bytes in use at most, weights included.  part/...: of a whole step, each timed in a "
    "program of its own; loss_... contains teacher and two choices."
)


def training(arguments: argparse.Namespace) -> None:
    from sparda_jax.evaluation import training_benchmark

    rows = []
    for name, workload in training_benchmark.workloads().items():
        if arguments.only and not any(part in name for part in arguments.only):
            continue
        for row in training_benchmark.rows(name, workload, steps=arguments.steps, folder="unused"):
            print(json.dumps(row.as_json()), flush=True)
            rows.append(row)
    if arguments.json:
        command = shlex.join(["python", *sys.argv])
        document = kernel_benchmarks.results_document(command, rows, TRAINING_NOTES, commit=COMMIT)
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("kernels", help="the Pallas kernels, on a GPU")
    command.add_argument("--refcheck", action="store_true", help="also compare with references")
    command.add_argument("--json", type=pathlib.Path, help="write a results file")
    command.add_argument("--merge", action="store_true", help="keep the file's other rows")
    command.add_argument("--only", nargs="*", help="benchmarks whose name contains one of these")
    command.set_defaults(run=kernels)
    command = commands.add_parser("decode", help="decode steps of the default model, on this CPU")
    command.add_argument("--json", type=pathlib.Path, help="write a results file")
    command.add_argument("--context", type=int, default=3000, help="tokens of the long prompt")
    command.add_argument("--repetitions", type=int, default=3, help="timed runs of each mode")
    command.set_defaults(run=decode)
    command = commands.add_parser("training", help="training of the Forecast, on a GPU")
    command.add_argument("--json", type=pathlib.Path, help="write a results file")
    command.add_argument("--only", nargs="*", help="shapes whose name contains one of these")
    command.add_argument("--steps", type=int, default=3, help="timed steps")
    command.set_defaults(run=training)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
