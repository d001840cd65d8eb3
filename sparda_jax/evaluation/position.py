"""Perplexity by position, by the engine's own prefill (spec/evaluation.md, sec. 6).

Token t is predicted from those before it; the first one of a document is not counted. Tokens inside
a document depend on each other, so intervals are over documents.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from sparda_jax.engine.generate import Engine
from sparda_jax.evaluation import statistics
from sparda_jax.evaluation.files import append_line, whole_lines
from sparda_jax.evaluation.likelihood import score_sequences
from sparda_jax.evaluation.run import Report
from sparda_jax.evaluation.statistics import Estimate
from sparda_jax.evaluation.tables import ScoreRow, label, make_row
from sparda_jax.tokenization import Tokenizer


def bucket_edges(length: int) -> tuple[int, ...]:
    """Bounds of the buckets: 1, 256, 1024, 2048 and so on by doubling, up to the length.

    Raises:
        ValueError: fewer than two tokens.
    """
    if length < 2:
        raise ValueError(f"a document of {length} tokens has none to predict")
    inner = [edge for edge in (256, *(1024 << i for i in range(24))) if edge < length]
    return (1, *inner, length)


def documents_of(tokens: Sequence[Sequence[int]], length: int, count: int) -> list[list[int]]:
    """The first tokens of the documents that are long enough, at most `count` of them.

    Raises:
        ValueError: none is.
    """
    found = [list(map(int, document[:length])) for document in tokens if len(document) >= length]
    if not found:
        longest = max(map(len, tokens), default=0)
        raise ValueError(f"no document has {length} tokens, the longest of {len(tokens)} {longest}")
    return found[:count]


def run_documents(
    path: Path,
    documents: Sequence[Sequence[int]],
    engine: Callable[[], Engine],
    batch: int,
    report: Report,
    reference: Callable[[], Engine] | None = None,
) -> np.ndarray:
    """Sums of -log p and KL by document and bucket; what is in the file is not run again.

    Args:
        path: file of results, a batch a line.
        documents: token ids, all of one length.
        engine: called when there is work.
        batch: documents that run together.
        report: progress.
        reference: makes the engine that predictions are compared with, likewise; None: no other.

    Returns:
        `float64[2, documents, buckets]` in nats; KL is 0 without a reference.
    """
    pairs = list(itertools.pairwise(bucket_edges(len(documents[0]))))
    done = {record["batch"]: (record["nll"], record["kl"]) for record in whole_lines(path)}
    path.parent.mkdir(parents=True, exist_ok=True)
    groups = [documents[i : i + batch] for i in range(0, len(documents), batch)]
    for number, group in enumerate(groups):
        if number in done:
            continue
        rows = [*group, *[group[-1]] * (min(batch, len(documents)) - len(group))]
        other = None if reference is None else reference()
        scores = score_sequences(engine(), rows, other)[: len(group)]
        # The score of token t stands at t - 1.
        add = lambda values: [
            float(values[a - 1 : b - 1].astype(np.float64).sum()) for a, b in pairs
        ]
        nll, kl = [add(-s.log_p) for s in scores], [add(s.divergence) for s in scores]
        done[number] = nll, kl
        append_line(path, json.dumps({"batch": number, "nll": nll, "kl": kl}))
        report(f"{path.parent.name} {path.stem}: {number + 1} of {len(groups)} batches")
    parts = [done[number] for number in range(len(groups))]
    return np.stack([np.concatenate(both) for both in zip(*parts, strict=True)])


def rows(
    sums: dict[str, np.ndarray],
    documents: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
    baseline: str,
    seed: int,
) -> Iterator[ScoreRow]:
    """Perplexity of each bucket and the whole, bits a byte, paired differences and KL.

    Args:
        sums: by mode, see `run_documents`.
        documents: token ids.
        tokenizer: tells how many bytes they are.
        baseline: the mode that others are compared with.
        seed: of the resampling.
    """
    edges = bucket_edges(len(documents[0]))
    sizes = np.tile(np.diff(edges).astype(np.float64), (len(documents), 1))
    columns = lambda part: [*part.T, part.sum(1)]
    prefix = f"perplexity/{label(len(documents[0]))}"
    whole = lambda ids: len(tokenizer.decode(ids).encode())
    sizes_in_bytes = np.array([whole(d) - whole(d[:1]) for d in documents], np.float64)
    names = [*(f"tokens_{a}-{b}" for a, b in itertools.pairwise(edges)), "all"]
    for mode, (nll, kl) in sums.items():
        base = columns(sums[baseline][0])
        parts = zip(names, columns(nll), base, columns(kl), columns(sizes), strict=True)
        for name, part, theirs, divergence, count in parts:
            estimate = _exp(statistics.ratio(part, count, seed=seed))
            yield make_row(f"{prefix}/{name}/{mode}", estimate, "perplexity", "lower")
            if mode != baseline:
                found = statistics.ratio(part - theirs, count, seed=seed)
                percent = round(100 * math.expm1(found.value), 3)
                title = f"{prefix}/{name}/{mode}-{baseline}"
                yield make_row(title, found, "nats/token", "lower", percent=percent)
                apart = statistics.ratio(divergence, count, seed=seed)
                title = f"{prefix}/{name}.kl/{mode}-{baseline}"
                yield make_row(title, apart, "nats/token", "lower")
        bits = statistics.ratio(nll.sum(1), sizes_in_bytes, seed=seed)
        title = f"{prefix}/bits_per_byte/{mode}"
        yield make_row(title, bits, "bits/byte", "lower", scale=1 / math.log(2))


def _exp(loss: Estimate) -> Estimate:
    return Estimate(math.exp(loss.value), math.exp(loss.low), math.exp(loss.high), loss.n)
