"""Benchmarks of the kernels: a registry, and what ``scripts/benchmark.py kernels`` runs.

A module of this folder registers functions with ``benchmark(name)``; importing it here makes
it run.  See ``harness`` for timing, ``Row`` for what a benchmark yields.
"""

from sparda_jax.evaluation.kernel_benchmarks import fetch, hiding, peers, pool, prefill, selection
from sparda_jax.evaluation.kernel_benchmarks.harness import (
    REGISTRY,
    Incomplete,
    Row,
    Session,
    benchmark,
    results_document,
    run,
)

__all__ = [
    "REGISTRY",
    "Incomplete",
    "Row",
    "Session",
    "benchmark",
    "fetch",
    "hiding",
    "peers",
    "pool",
    "prefill",
    "results_document",
    "run",
    "selection",
]
