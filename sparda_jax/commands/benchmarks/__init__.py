"""Subcommands of `scripts/benchmark.py`, by topic; each module adds its own to the parser."""
