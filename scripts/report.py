#!/usr/bin/env python3
"""Make docs/report.md and its pictures from the files in results/."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sparda_jax.cli import HelpFormatter, Parser, guarded


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="report.py", description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of files")
    parser.add_argument("--page", type=Path, default=Path("docs/report.md"), help="Markdown")
    parser.add_argument("--traceback", action="store_true", help="show where an error arose")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    from sparda_jax.evaluation import report

    results = report.read_results(args.results)
    folder = args.page.with_suffix("")
    pictures = report.draw(results, folder)
    known = {name for names in pictures.values() for name in names}
    for path in folder.glob("*.svg"):
        if path.name not in known:
            path.unlink()  # of a file that is gone
    linked = {file: [f"{folder.name}/{n}" for n in names] for file, names in pictures.items()}
    args.page.write_text(report.page(results, linked), encoding="utf-8")
    print(f"{args.page}: {len(results)} files, {len(known)} pictures")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return guarded("report.py", run, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
