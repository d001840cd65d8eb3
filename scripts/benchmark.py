"""Benchmarks; each subcommand prints rows and can write a results file."""

import argparse
import os
import pathlib

from sparda_jax.commands.benchmarks import (
    diffusion,
    engine,
    evaluation,
    forecast,
    herald,
    kernels,
    pictures,
)

# For machines where the code lies without its repository.
COMMIT = os.environ.get("SPARDA_JAX_COMMIT")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    results = argparse.ArgumentParser(add_help=False)
    results.set_defaults(commit=COMMIT)
    results.add_argument("--json", type=pathlib.Path, help="write a results file")
    results.add_argument("--merge", action="store_true", help="keep the file's other rows")
    commands = parser.add_subparsers(required=True)
    for topic in (kernels, engine, forecast, diffusion, herald, evaluation, pictures):
        topic.add(commands, results)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
