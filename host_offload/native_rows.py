"""Scan, choice and gather of a request's rows in C++, where a compiler is there.

The portable path needs many calls of numpy and XLA for one request and layer; some twenty threads
that make them wait for Python's lock and for fresh memory. Here it is one call without either:
compiled on first use for the machine that it runs on, from `native_rows.cpp`, and kept.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import logging
import math
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np

from host_offload.cache_folder import cache_folder
from host_offload.cpu_selection import SelectionRule
from host_offload.row_store import RowStore

Implementation = Literal["auto", "native", "portable"]
Parts = tuple[float, float, float]

_SOURCE = Path(__file__).with_suffix(".cpp")
_FLAGS = ("-std=c++20", "-O3", "-march=native", "-fPIC", "-shared")
# Values that compiled code takes together.
_WIDTH = 32
_logger = logging.getLogger("host_offload")


_POINTERS = ("keys", "values", "small", "scales", "queries", "ids", "out")
_SIZES = (
    *("heads", "capacity", "width", "group", "first", "end", "count", "run", "extra"),
    *("out_rows", "granule"),
)


class _Job(ctypes.Structure):
    """`Job` of the source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _SIZES),
        ("scale", ctypes.c_float),
        ("raw", ctypes.c_int32),
        *((name, ctypes.c_double) for name in ("began", "chosen", "gathered")),
    ]


@functools.cache
def _compiled() -> Path:
    """The shared library, made for this machine if it is not there.

    Raises:
        NotImplementedError: no compiler, or one that cannot compile it.
    """
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        raise NotImplementedError("no C++ compiler: looked for c++, g++ and clang++")
    command = [compiler, *_FLAGS]
    try:
        # Version of the compiler and everything that the processor offers.
        told = [*command, "-dM", "-E", "-x", "c++", os.devnull]
        machine = subprocess.run(told, check=True, capture_output=True).stdout
        name = hashlib.sha256(machine + _SOURCE.read_bytes() + repr(command).encode()).hexdigest()
        folder = cache_folder()
        library = folder / f"native_rows_{name[:16]}.so"
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as fresh:
                made = Path(fresh) / library.name
                command += ["-o", str(made), str(_SOURCE)]
                subprocess.run(command, check=True, capture_output=True, text=True)
                made.replace(library)
    except subprocess.CalledProcessError as error:
        raise NotImplementedError(f"{compiler} failed: {str(error.stderr)[-300:]}") from error
    return library


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(_compiled()))


def reason_against(rule: SelectionRule, dtype: jnp.dtype, width: int) -> str | None:
    """Why rows cannot be chosen here; None: they can."""
    if rule.coverage is not None:
        return "a coverage needs all heads' scores at once"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"keys are {jnp.dtype(dtype)}, not bfloat16"
    if width % _WIDTH:
        return f"rows of {width} values are no multiple of {_WIDTH}"
    try:
        _library()
    except (NotImplementedError, OSError) as error:
        return str(error)
    return None


@functools.cache
def _told(choice: str) -> None:
    _logger.info("rows are chosen and gathered by %s", choice)


def chosen(
    implementation: Implementation, rule: SelectionRule, dtype: jnp.dtype, width: int
) -> bool:
    """Whether to choose rows here: "auto" does where it can, and says once what it chose.

    Raises:
        ValueError: an unknown implementation.
    """
    if implementation not in get_args(Implementation):
        raise ValueError(
            f"implementation must be one of {get_args(Implementation)}, got {implementation!r}"
        )
    if implementation != "auto":
        return implementation == "native"
    reason = reason_against(rule, dtype, width)
    if reason is None:
        _told("compiled code")
        return True
    _told(f"numpy and XLA ({reason})")
    return False


@dataclasses.dataclass(frozen=True)
class NativeRows:
    """Chooses and gathers; safe to call from several threads.

    Attributes:
        store: of bfloat16.
        rule: without a coverage.
        scale: factor on the dot products.
        quantised: scan the store's int8 keys.

    Raises:
        NotImplementedError: rows that compiled code does not choose.
    """

    store: RowStore
    rule: SelectionRule
    scale: float
    quantised: bool

    def __post_init__(self) -> None:
        reason = reason_against(self.rule, self.store.shape.dtype, self.store.shape.width)
        if reason is not None:
            raise NotImplementedError(f"rows cannot be chosen by compiled code: {reason}")

    def fetch(
        self,
        place: tuple[int, int],
        queries: np.ndarray,
        span: tuple[int, int, int],
        out: np.ndarray,
        granule: int,
    ) -> tuple[np.ndarray, Parts]:
        """Chooses rows as `CpuSelector` does and gathers them as `RowStore.gather` does.

        Args:
            place: layer and request.
            queries: `[K, Q, H]`.
            span: first scanned row, the row after the last, and how many rows to choose.
            out: `[K, 2, R, H]`, contiguous.
            granule: as in `RowStore.gather`.

        Returns:
            Ids `int32[K, count]`, ascending; when the work began, when the rows were chosen, and
            when they were gathered, on the clock of `time.perf_counter`.

        Raises:
            FloatingPointError: a score is not finite.
        """
        ids = np.empty((self.store.shape.heads, span[2]), np.int32)
        job = self._run("herald_fetch", place, span, ids, queries, out, granule)
        return ids, (job.began, job.chosen, job.gathered)

    def choose(
        self, place: tuple[int, int], queries: np.ndarray, span: tuple[int, int, int]
    ) -> np.ndarray:
        """The first half of `fetch`."""
        ids = np.empty((self.store.shape.heads, span[2]), np.int32)
        self._run("herald_choose", place, span, ids, queries)
        return ids

    def gather(
        self, place: tuple[int, int], ids: np.ndarray, out: np.ndarray, granule: int
    ) -> None:
        """The second half; ids `int32[K, n]`, contiguous."""
        self._run("herald_gather", place, (0, 0, ids.shape[1]), ids, None, out, granule)

    def _run(
        self,
        name: str,
        place: tuple[int, int],
        span: tuple[int, int, int],
        ids: np.ndarray,
        queries: np.ndarray | None = None,
        out: np.ndarray | None = None,
        granule: int = 1,
    ) -> _Job:
        shape, (first, end, count), run = self.store.shape, span, self.rule.run
        wide = None if queries is None else np.ascontiguousarray(queries, np.float32)
        pointers = (None if array is None else array.ctypes.data for array in (wide, ids, out))
        extra = math.ceil((self.rule.shortlist - 1) * count / run) * run
        job = _Job(
            *self.store.addresses(*place, quantised=self.quantised),
            *pointers,
            *(shape.heads, shape.capacity, shape.width, 1 if wide is None else wide.shape[1]),
            *(first, end, count, run, extra, 0 if out is None else out.shape[2], granule),
            *(self.scale, int(self.rule.aggregate == "raw")),
        )
        if getattr(_library(), name)(ctypes.byref(job)):
            raise FloatingPointError("a score is not finite: some key or query is not")
        return job
