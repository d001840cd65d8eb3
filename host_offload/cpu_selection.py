"""Which cached rows some queries attend most, found by the CPU where the keys lie (HERALD, sec. C).

    mass[s]  = sum over queries of softmax_s(scale * q . key[s])     s over the scanned rows
    raw[s]   = sum over queries of scale * q . key[s]

The queries are those of one KV head: its group's query heads, at one position (the centre [MASK])
or at all of a block. The `k` best rows are taken, equal scores from the lowest row up; or the
best runs of 4, 8 or 16 rows, by the sum over a run. Everything here is a pure function of one
request's keys in one layer, so neither other requests nor the number of threads matter.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int8, Int32

Aggregate = Literal["softmax", "raw"]
RUNS = (1, 4, 8, 16)
# Rows that are scored again come in multiples of this, so that few programs serve all lengths.
_STEP = 256
# Of so many scores one is sampled, to guess where the chosen ones begin.
_SAMPLE = 8


@dataclasses.dataclass(frozen=True)
class SelectionRule:
    """How rows are chosen.

    Attributes:
        aggregate: over the queries: softmax mass, or raw scores (a head of large scale rules).
        run: rows chosen together, aligned to multiples of it.
        coverage: take the fewest rows that hold this share of the mass in every KV head, at most
            the count asked for; None: take the count.
        shortlist: with int8 keys, what may be chosen, as a multiple of the count. As many rows on
            either side of the border are scored again in full precision: with 1.125, those
            that rank from 0.875 to 1.125 times the count.
    """

    aggregate: Aggregate = "softmax"
    run: int = 1
    coverage: float | None = None
    shortlist: float = 1.125

    def __post_init__(self) -> None:
        if self.aggregate not in get_args(Aggregate):
            raise ValueError(f"unknown aggregate {self.aggregate!r}, expected softmax or raw")
        if self.run not in RUNS:
            raise ValueError(f"runs of {self.run} rows, expected one of {RUNS}")
        if self.coverage is not None:
            if not 0 < self.coverage <= 1:
                raise ValueError(f"coverage must be in (0, 1], got {self.coverage}")
            if self.aggregate == "raw":
                raise ValueError("coverage is a share of softmax mass: aggregate raw has none")
        if self.shortlist < 1:
            raise ValueError(f"shortlist must be at least 1, got {self.shortlist}")


def _scores(
    logits: Float32[Array, "*B K Q S"],
    first: Int32[Array, "*B"],
    end: Int32[Array, "*B"],
    aggregate: Aggregate,
) -> tuple[Array, Array, Array]:
    """Scores of rows [first, end), -inf elsewhere; the largest logit and the sum of each query."""
    place = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    seen = (place >= first[..., None]) & (place < end[..., None])
    seen = seen[..., None, None, :]
    logits = jnp.where(seen, logits, -jnp.inf)  # whatever stands in rows that are not scanned
    largest = jnp.max(logits, axis=-1, keepdims=True)
    largest = jnp.where(largest == -jnp.inf, 0.0, largest)  # no row at all
    weights = jnp.exp(logits - largest)
    total = jnp.maximum(weights.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    summed = (weights / total if aggregate == "softmax" else logits).sum(-2)
    return jnp.where(seen[..., 0, :], summed, -jnp.inf), largest, total


def row_scores(
    keys: Float[Array, "*B K S H"],
    queries: Float[Array, "*B K Q H"],
    first: Int32[Array, "*B"],
    end: Int32[Array, "*B"],
    *,
    scale: float,
    aggregate: Aggregate,
) -> Float32[Array, "*B K S"]:
    """Scores of all rows, float32; -inf outside [first, end). Also for use on the device.

    Args:
        keys: after RoPE; rows outside [first, end) may hold anything.
        queries: of each KV head.
        first: scanned from here.
        end: up to here.
        scale: factor on the dot products.
        aggregate: over the queries.
    """
    lead = tuple(range(keys.ndim - 2))
    dims = (((queries.ndim - 1,), (keys.ndim - 1,)), (lead, lead))
    logits = lax.dot_general(queries, keys, dims, preferred_element_type=jnp.float32)
    return _scores(logits * scale, first, end, aggregate)[0]


_scan = jax.jit(row_scores, static_argnames=("scale", "aggregate"))


def quantise_rows(
    keys: Float[Array, "*rows H"],
) -> tuple[Int8[Array, "*rows H"], Float32[Array, "*rows"]]:
    """int8 and one scale a row: key ~ int8 * scale, scale = max |key| / 127."""
    wide = keys.astype(jnp.float32)
    scales = jnp.max(jnp.abs(wide), axis=-1) / 127
    safe = jnp.where(scales > 0, scales, 1.0)
    return jnp.round(wide / safe[..., None]).astype(jnp.int8), scales


@functools.partial(jax.jit, static_argnames=("scale", "aggregate"))
def _scan_quantised(
    keys: Int8[Array, "K S H"],
    scales: Float32[Array, "K S"],
    queries: Float[Array, "K Q H"],
    first: Int32[Array, ""],
    end: Int32[Array, ""],
    *,
    scale: float,
    aggregate: Aggregate,
) -> tuple[Array, Array, Array]:
    """As `_scan`, from int8 keys and queries quantised likewise: int32 products."""
    small, factors = quantise_rows(queries)
    dims = (((2,), (2,)), ((0,), (0,)))
    products = lax.dot_general(small, keys, dims, preferred_element_type=jnp.int32)
    logits = products.astype(jnp.float32) * (factors[..., None] * scales[:, None] * scale)
    return _scores(logits, first, end, aggregate)


@functools.partial(jax.jit, static_argnames=("scale", "aggregate"))
def _rescore(
    rows: Float[Array, "K C H"],
    queries: Float[Array, "K Q H"],
    largest: Float32[Array, "K Q 1"],
    total: Float32[Array, "K Q 1"],
    *,
    scale: float,
    aggregate: Aggregate,
) -> Float32[Array, "K C"]:
    """Scores of some rows in full precision; the softmax's sum is that of the int8 scan."""
    dims = (((2,), (2,)), ((0,), (0,)))
    logits = lax.dot_general(queries, rows, dims, preferred_element_type=jnp.float32) * scale
    parts = jnp.exp(logits - largest) / total if aggregate == "softmax" else logits
    return parts.sum(1)


def _units(scores: np.ndarray, run: int) -> np.ndarray:
    return scores if run == 1 else scores.reshape(len(scores), -1, run).sum(-1)


def _candidates(scores: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Places in the flattened scores, ascending, with all that can be among a head's best.

    A sample says above which bound a few more than `count` scores lie. So what is sorted is a
    twentieth of 8 x 32,768 scores: 0.7 ms instead of 2 (one core).

    Returns:
        The places, and how many each head has.
    """
    heads, size = scores.shape
    rank = int(1.3 * count / _SAMPLE) + 16
    if rank < size // _SAMPLE // 2:
        sample = np.ascontiguousarray(scores[:, ::_SAMPLE])
        place = sample.shape[1] - rank
        near = scores >= np.partition(sample, place, axis=1)[:, place, None]
        counts = np.array([np.count_nonzero(head) for head in near])
        if counts.min() >= count:
            return np.flatnonzero(near), counts
    return np.arange(scores.size), np.full(heads, size)


def choose_rows(scores: np.ndarray, count: int, run: int = 1) -> np.ndarray:
    """The best rows of each KV head, equal scores from the lowest up; `int32[K, count]`, ascending.

    Args:
        scores: `[K, S]`, scanned rows only.
        count: rows, a multiple of `run`.
        run: rows chosen together; S is a multiple of it.

    Raises:
        FloatingPointError: a score is NaN.
    """
    units, wanted = _units(scores, run), count // run
    heads, size = units.shape
    if np.isnan(units.max(axis=1, initial=-np.inf)).any():
        raise FloatingPointError("a score is NaN: some key or query is not finite")
    if wanted >= size or wanted == 0:
        ids = np.broadcast_to(np.arange(min(wanted, size)), (heads, min(wanted, size)))
    else:
        ids = _best(units, wanted)
    if run > 1:
        ids = (ids[..., None] * run + np.arange(run)).reshape(heads, -1)
    return ids.astype(np.int32)


def _best(scores: np.ndarray, count: int) -> np.ndarray:
    """`choose_rows` for 0 < count < S, one by one."""
    heads, size = scores.shape
    places, counts = _candidates(scores, count)
    values = scores.reshape(-1)[places]
    table = np.full((heads, counts.max()), -np.inf, scores.dtype)
    table[np.arange(table.shape[1]) < counts[:, None]] = values
    at = table.shape[1] - count
    threshold = np.repeat(np.partition(table, at, axis=1)[:, at], counts)
    taken = values >= threshold
    ends = np.cumsum(counts)
    for begin, end in zip(ends - counts, ends, strict=True):
        surplus = np.count_nonzero(taken[begin:end]) - count
        if surplus:
            equal = begin + np.flatnonzero(values[begin:end] == threshold[begin])
            taken[equal[-surplus:]] = False
    return (places[taken] % size).reshape(heads, count)


def covering_count(scores: np.ndarray, coverage: float, most: int, run: int = 1) -> int:
    """The fewest rows that hold a share of the mass in every KV head; at most `most`.

    Args:
        scores: softmax mass `[K, S]` of the scanned rows.
        coverage: share of each head's mass.
        most: rows, a multiple of `run`.
        run: rows chosen together.
    """
    best = -np.sort(-_units(scores, run), axis=1)
    held = np.cumsum(best, axis=1, dtype=np.float64)
    needed = (held < coverage * held[:, -1:] * (1 - 1e-9)).sum(axis=1) + 1
    return min(int(np.max(needed)) * run, most)


class CpuSelector:
    """Chooses the rows of one request in one layer; safe to call from several threads.

    Attributes:
        rule: how.
        scale: factor on the dot products.
    """

    def __init__(self, rule: SelectionRule, scale: float):
        self.rule, self.scale = rule, scale
        self._how: dict[str, Any] = {"scale": scale, "aggregate": rule.aggregate}
        self._scratch = threading.local()

    def scores(
        self, keys: Float[Array, "K S H"], queries: np.ndarray, first: int, end: int
    ) -> np.ndarray:
        """Scores of rows [first, end), `f32[K, end - first]`, from keys in place."""
        place = np.int32(first), np.int32(end)
        return np.asarray(_scan(keys, queries, *place, **self._how))[:, first:end]

    def scores_quantised(
        self,
        keys: Int8[Array, "K S H"],
        scales: Float32[Array, "K S"],
        queries: np.ndarray,
        first: int,
        end: int,
    ) -> tuple[np.ndarray, jax.Array, jax.Array]:
        """As `scores`, from int8 keys; and the largest logit and the sum of each query."""
        place = np.int32(first), np.int32(end)
        found, largest, total = _scan_quantised(keys, scales, queries, *place, **self._how)
        return np.asarray(found)[:, first:end], largest, total

    def select(
        self, keys: Float[Array, "K S H"], queries: np.ndarray, first: int, end: int, count: int
    ) -> np.ndarray:
        """The rows to fetch, `int32[K, n]` ascending; n is `count`, or less with a coverage.

        Args:
            keys: all rows of the request, in memory that the CPU back end reads in place.
            queries: `[K, Q, H]`.
            first: rows before it are not scanned.
            end: nor from here on.
            count: rows, a multiple of the rule's run, at most end - first.
        """
        scores = self.scores(keys, queries, first, end)
        return choose_rows(scores, self._count(scores, count), self.rule.run) + np.int32(first)

    def select_quantised(
        self,
        keys: Int8[Array, "K S H"],
        scales: Float32[Array, "K S"],
        exact: np.ndarray,
        queries: np.ndarray,
        first: int,
        end: int,
        count: int,
    ) -> np.ndarray:
        """As `select`, scanning int8 keys; who is near the border is scored again exactly.

        Args:
            keys: as `quantise_rows` gives them.
            scales: likewise.
            exact: `[K, S, H]`, the keys themselves.
            queries: as in `select`.
            first: likewise.
            end: likewise.
            count: likewise.
        """
        run = self.rule.run
        scores, largest, total = self.scores_quantised(keys, scales, queries, first, end)
        count = self._count(scores, count)
        extra = math.ceil((self.rule.shortlist - 1) * count / run) * run
        listed, sure = min(count + extra, end - first), max(count - extra, 0)
        ids = choose_rows(scores, listed, run)
        near = np.take_along_axis(scores, ids, axis=1)
        certain = np.zeros(ids.shape, bool)
        np.put_along_axis(certain, choose_rows(near, sure, run), True, axis=1)
        doubtful = ids[~certain].reshape(len(ids), -1)
        rows = self._listed_rows(exact, doubtful + np.int32(first))
        again = np.asarray(_rescore(rows, queries, largest, total, **self._how))
        best = choose_rows(again[:, : doubtful.shape[1]], count - sure, run)
        chosen = np.take_along_axis(doubtful, best, axis=1), ids[certain].reshape(len(ids), -1)
        return np.sort(np.concatenate(chosen, axis=1), axis=1) + np.int32(first)

    def _listed_rows(self, exact: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Rows of a short list, padded; in memory that the thread keeps (fresh pages cost more)."""
        heads, listed = ids.shape
        shape = heads, -(-listed // _STEP) * _STEP, exact.shape[2]
        rows = getattr(self._scratch, "rows", None)
        if rows is None or rows.shape != shape or rows.dtype != exact.dtype:
            rows = self._scratch.rows = np.zeros(shape, exact.dtype)
        for head, chosen in enumerate(ids):
            take_rows(exact[head], chosen, rows[head, :listed])
        return rows

    def _count(self, scores: np.ndarray, count: int) -> int:
        if self.rule.coverage is None:
            return count
        return covering_count(scores, self.rule.coverage, count, self.rule.run)


def take_rows(rows: np.ndarray, ids: np.ndarray, out: np.ndarray, run: int = 1) -> None:
    """`out[i] = rows[ids[i]]`; as unsigned integers, which numpy copies fastest.

    4.8 GB/s a core for rows of 256 B; 3.1 by way of a new array.

    Args:
        rows: `[S, H]`.
        ids: `[n]`, in whole runs.
        out: `[n, H]`, contiguous.
        run: rows that follow one another; S and n are multiples of it.
    """
    wide = lambda array: as_bits(array).reshape(-1, run * array.shape[-1])
    np.take(wide(rows), ids[::run] // run, axis=0, mode="clip", out=wide(out))


def as_bits(array: np.ndarray) -> np.ndarray:
    """The same values as unsigned integers."""
    return array.view(f"u{array.dtype.itemsize}")


def recall(chosen: np.ndarray, wanted: np.ndarray) -> float:
    """Share of the wanted rows that were chosen, mean over KV heads; ids without repeats."""
    pairs = zip(chosen, wanted, strict=True)
    return float(np.mean([np.isin(want, got).mean() for got, want in pairs]))


def covered_mass(scores: np.ndarray, chosen: np.ndarray, first: int) -> float:
    """Share of the softmax mass of the scanned rows that the chosen ones hold, mean over heads."""
    held = np.take_along_axis(scores, chosen - first, axis=1).sum(1)
    return float(np.mean(held / scores.sum(1)))
