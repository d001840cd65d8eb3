"""Quality of selection policies on held-out text and needles, as rows of a results file.

A setting is a length, a grid and a few budgets; every policy runs in every setting by the same
code. Names of rows: section / setting / budget / meter / policy [/ layer or positions].
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import jax
import numpy as np

from pallas_kernels.geometry import BlockGeometry
from sparda_jax.config import SparseConfig
from sparda_jax.evaluation import needles, statistics
from sparda_jax.evaluation.kernel_benchmarks.harness import Row
from sparda_jax.evaluation.language import bucket_sizes, document_scores
from sparda_jax.evaluation.policies import DENSE, Policy
from sparda_jax.evaluation.selection_quality import METERS, Counts, document_counts
from sparda_jax.evaluation.tables import make_row
from sparda_jax.models.decoder import Decoder
from sparda_jax.tokenization import Tokenizer

# Of the mass of the oracle's free blocks, at the default budget (issue 4).
MASS_TARGET = 0.95

Report = Callable[[str], None]
Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One length, one grid and the budgets compared on it.

    Attributes:
        name: in rows.
        length: tokens of a document.
        sparse: grid and forced blocks; its budget is the largest of `budgets`.
        budgets: blocks selected, forced ones included.
        labels: of the budgets, in rows.
    """

    name: str
    length: int
    sparse: SparseConfig
    budgets: tuple[int, ...]
    labels: tuple[str, ...]

    @classmethod
    def of_policy(cls, length: int, sparse: SparseConfig) -> Setting:
        """A model's own policy and its one budget."""
        return cls(f"{_short(length)}_policy", length, sparse, (sparse.budget_blocks,), ("own",))

    @classmethod
    def of_percents(
        cls, length: int, block_size: int, local_blocks: int, percents: Sequence[float]
    ) -> Setting:
        """Budgets in percent of the context, on blocks of `block_size` with one leading block.

        Windows are half a block long and a quarter apart, as in the default policy.

        Raises:
            ValueError: a budget smaller than the forced blocks.
        """
        geometry = BlockGeometry(block_size, block_size // 2, block_size // 4)
        budgets = tuple(int(length * percent / 100) // block_size for percent in percents)
        if min(budgets) < local_blocks + 2:
            raise ValueError(
                f"{min(percents)} % of {length} tokens are {min(budgets)} blocks of {block_size}; "
                f"{local_blocks + 2} are forced"
            )
        sparse = SparseConfig(geometry, 1, local_blocks, max(budgets))
        labels = tuple(f"{percent:g}%" for percent in percents)
        return cls(f"{_short(length)}_P{block_size}", length, sparse, budgets, labels)


def _short(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def selection_rows(
    model: Decoder,
    policies: Sequence[Policy],
    reference: Policy,
    documents: Sequence[np.ndarray],
    setting: Setting,
    *,
    edges: tuple[int, ...],
    by_layer: bool,
    every: int,
    report: Report,
    seconds: float | None = None,
) -> Iterator[Row]:
    """Recall, mass, coverage and hit rate, averaged over layers; see `selection_quality`.

    Args:
        model: the decoder.
        policies: what to measure.
        reference: against which recall is counted.
        documents: of at least `setting.length` tokens each.
        setting: see there.
        edges: bounds of the position buckets; more than one bucket also gets rows of its own.
        by_layer: also the mass and recall of every layer.
        every: count two neighbouring tokens in every so many; 1: all.
        report: progress.
        seconds: no further document after so long.
    """
    counts: dict[str, list[Counts]] = {policy.name: [] for policy in policies}
    for number, document in enumerate(_until(documents, seconds)):
        start = time.perf_counter()
        found = document_counts(
            model, policies, reference, document[: setting.length], setting.sparse,
            setting.budgets, edges, every=every,
        )  # fmt: skip
        for name, parts in found.items():
            counts[name].append(parts)
        report(_progress("selection", setting, number, len(documents), start))
    stack = lambda *leaves: np.stack(leaves)
    for name, of_documents in counts.items():
        merged = jax.tree.map(stack, *of_documents)  # [X, budgets, L, buckets]
        for index, label in enumerate(setting.labels):
            prefix = f"selection/{setting.name}/{label}"
            for meter, (above, below) in METERS.items():
                pair = [getattr(merged, field)[:, index] for field in (above, below)]
                yield from _meter_rows(f"{prefix}/{meter}/{name}", pair, meter, edges, by_layer)


def _meter_rows(
    name: str, pair: list[np.ndarray], meter: str, edges: tuple[int, ...], by_layer: bool
) -> Iterator[Row]:
    """Rows of one meter of one policy; `pair` is [X, L, buckets] above and below."""
    if not pair[1].sum():
        return  # no token of these documents has a choice under this budget
    own = name.split("/")[2] == "own" and name.endswith("/mass/sparda")
    whole = [part.sum(-1) for part in pair]
    row = make_row(name, statistics.ratio(*whole), "share", "higher")
    yield dataclasses.replace(row, target=MASS_TARGET if own else None)
    if len(edges) > 2:
        for bucket, (low, high) in enumerate(itertools.pairwise(edges)):
            inside = [part[..., bucket] for part in pair]
            if inside[1].sum(0).all():
                estimate = statistics.ratio(*inside)
                yield make_row(f"{name}/tokens_{low}-{high}", estimate, "share", "higher")
    if by_layer and meter in ("mass", "recall"):
        for layer in range(whole[0].shape[1]):
            estimate = statistics.ratio(whole[0][:, layer], whole[1][:, layer])
            yield make_row(f"{name}/layer_{layer:02d}", estimate, "share", "higher")


def _until(items: Iterable[Item], seconds: float | None) -> Iterator[Item]:
    """The items that are begun in time; at least the first."""
    start = time.monotonic()
    for item in items:
        yield item
        if seconds is not None and time.monotonic() - start > seconds:
            return


def _progress(what: str, setting: Setting, number: int, total: int, start: float) -> str:
    seconds = time.perf_counter() - start
    return f"{what} {setting.name}: {number + 1}/{total}, {seconds:.1f} s"


def language_rows(
    model: Decoder,
    policies: Sequence[Policy],
    documents: Sequence[np.ndarray],
    setting: Setting,
    *,
    edges: tuple[int, ...],
    report: Report,
    seconds: float | None = None,
) -> Iterator[Row]:
    """Perplexity; paired gap to dense in nats a token; KL to dense; both also against sparse.

    Args:
        model: the decoder.
        policies: what to run besides dense attention.
        documents: of at least `setting.length` tokens each.
        setting: see there.
        edges: bounds of the position buckets; the last bucket also gets a row of KL.
        report: progress.
        seconds: no further document after so long.
    """
    scores: dict[str, list[np.ndarray]] = {}
    for number, document in enumerate(_until(documents, seconds)):
        start = time.perf_counter()
        found = document_scores(
            model, policies, document[: setting.length], setting.sparse, setting.budgets, edges
        )
        for name, part in found.items():
            scores.setdefault(name, []).append(part)
        report(_progress("language", setting, number, len(documents), start))
    sizes = np.tile(bucket_sizes(setting.length, edges), (len(scores["dense"]), 1))
    tokens = sizes.sum(1)
    sums = {name: np.stack(parts) for name, parts in scores.items()}  # [X, budgets, 2, buckets]
    dense = sums.pop("dense")[:, 0, 0].sum(-1)
    prefix = f"language/{setting.name}"
    yield _perplexity(f"{prefix}/100%/perplexity/dense", -dense, tokens)
    for name, values in sums.items():
        for index, label in enumerate(setting.labels):
            log_p, kl = values[:, index].sum(-1).T
            at = f"{prefix}/{label}"
            yield _perplexity(f"{at}/perplexity/{name}", -log_p, tokens)
            rows = {"gap": dense - log_p, "kl": kl}
            if "sparse" in sums and name != "sparse":
                other_p, other_kl = sums["sparse"][:, index].sum(-1).T
                rows |= {"gap_over_sparse": other_p - log_p, "kl_over_sparse": kl - other_kl}
            for meter, parts in rows.items():
                estimate = statistics.ratio(parts, tokens)
                yield make_row(f"{at}/{meter}/{name}", estimate, "nats/token", "lower")
            late = statistics.ratio(values[:, index, 1, -1], sizes[:, -1])
            positions = f"tokens_{edges[-2]}-{edges[-1]}"
            yield make_row(f"{at}/kl/{name}/{positions}", late, "nats/token", "lower")


def _perplexity(name: str, negative_log_p: np.ndarray, tokens: np.ndarray) -> Row:
    loss = statistics.ratio(negative_log_p, tokens)
    value, low, high = (math.exp(bound) for bound in (loss.value, loss.low, loss.high))
    return make_row(name, statistics.Estimate(value, low, high, loss.n), "perplexity", "lower")


def needle_rows(
    model: Decoder,
    policies: Sequence[Policy],
    tokenizer: Tokenizer,
    texts: Sequence[str],
    setting: Setting,
    *,
    samples: int,
    seeds: Sequence[int],
    row_tokens: int,
    dense_finds: float,
    report: Report,
    seconds: float | None = None,
) -> Iterator[Row]:
    """Share of values found, by task; policies run where dense attention finds enough.

    Args:
        model: the decoder.
        policies: what to run besides dense attention.
        tokenizer: the model's.
        texts: haystacks.
        setting: see there.
        samples: of each task and seed.
        seeds: of the samples.
        row_tokens: tokens of one forward pass, which bounds its memory.
        dense_finds: below this share the policies are not run.
        report: progress.
        seconds: no further task after so long.
    """
    size = max(1, row_tokens // (setting.length * len(setting.budgets)))
    for task in _until(needles.TASKS, seconds):
        drawn = [
            sample
            for seed in seeds
            for sample in needles.samples(
                task, tokenizer, texts, setting.length, samples, seed=seed
            )
        ]
        scores: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for policy in (DENSE, *policies):
            start = time.perf_counter()
            parts = [
                needles.found(model, policy, batch, setting.length, setting.sparse, setting.budgets)
                for batch in needles.batches(drawn, size)
            ]
            right, likely = (np.concatenate(part, axis=1) for part in zip(*parts, strict=True))
            scores[policy.name] = right, likely
            share, took = right.mean(), time.perf_counter() - start
            report(f"needle {task} {setting.name} {policy.name}: {share:.3f}, {took:.1f} s")
            if policy is DENSE and share < dense_finds:
                break
        yield from _needle_rows(f"needle/{setting.name}", task, scores, setting)


def _needle_rows(
    prefix: str,
    task: str,
    scores: dict[str, tuple[np.ndarray, np.ndarray]],
    setting: Setting,
) -> Iterator[Row]:
    right, likely = scores.pop("dense")
    yield make_row(f"{prefix}/100%/{task}/dense", statistics.mean(right[0]), "share", "higher")
    estimate = statistics.mean(likely[0])
    yield make_row(f"{prefix}/100%/{task}_log_p/dense", estimate, "nats/value", "higher")
    for name, (right, likely) in scores.items():
        for index, label in enumerate(setting.labels):
            at = f"{prefix}/{label}"
            rows = {task: right[index]}
            if name != "sparse" and "sparse" in scores:
                rows[f"{task}_over_sparse"] = right[index] - scores["sparse"][0][index]
            for meter, values in rows.items():
                estimate = statistics.mean(values)
                yield make_row(f"{at}/{meter}/{name}", estimate, "share", "higher")
            estimate = statistics.mean(likely[index])
            yield make_row(f"{at}/{task}_log_p/{name}", estimate, "nats/value", "higher")
