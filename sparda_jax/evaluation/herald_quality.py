"""What block denoising loses when it attends chosen rows of the prefix, teacher-forced.

Windows of text are prefilled whole. Then some of their blocks are denoised with everything before
them true: some tokens are masked, one forward predicts them, over all of the prefix or over what a
mode chooses. Every mode meets the same windows and masks, so differences are paired.

    bound   E_m [mean over m masked tokens of -log p], m uniform in 1..n: nats a token of the
            any-order bound on -log p(block | prefix)
    KL      mean over masked tokens of KL(p_dense || p_mode)
    agreement  share of the masked tokens whose first choice is that of dense attention
    recall  share of the rows that all queries of the block choose over dense attention
    mass    share of these queries' attention to the rows to choose from that the chosen ones hold

What a mode chooses is what its engine would: `mage` by the dense first forward of the block;
`herald` by the draft of the block before, whose own pool was chosen like a first block's;
`herald_serial` by the centre query of the block itself; `infinigen` by the layer before, in every
forward. `near` attends nothing but the init rows and the block before: what the rest is worth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparda_jax.config import SamplingParams
from sparda_jax.diffusion import prefill
from sparda_jax.diffusion.config import DenoiseParams, diffusion_of
from sparda_jax.evaluation import herald_meters as meters
from sparda_jax.evaluation.language import score_tokens
from sparda_jax.herald import device_selection, forward
from sparda_jax.herald import layout as layouts
from sparda_jax.herald.config import Budget, HeraldConfig
from sparda_jax.herald.engine import HeraldEngine
from sparda_jax.herald.layerwise import OnDevice, Rows, Source, hidden_rows, run_layers
from sparda_jax.herald.requests import Request, block_fields
from sparda_jax.herald.state import HeraldState, Pool, Turn
from sparda_jax.models.decoder import Decoder

MODES = ("mage", "herald", "herald_serial", "infinigen")
METERS = ("bound", "kl", "agreement", "recall", "mass")
Pools = Sequence[Pool | None]
# Rows by mode, share and layer.
Chosen = dict[str, dict[float, dict[int, np.ndarray]]]


@dataclasses.dataclass(frozen=True)
class QualityPlan:
    """What is measured.

    Attributes:
        shares: budgets, of the scanned rows.
        blocks: of each window, from its last quarter.
        masks: numbers of masked tokens drawn for each block, one from each part of 1..n.
        modes: of `MODES`.
        init_rows: always attended.
        seed: of the masks.
    """

    shares: tuple[float, ...] = (0.025, 0.05, 0.1, 0.2)
    blocks: int = 4
    masks: int = 4
    modes: tuple[str, ...] = MODES
    init_rows: int = 16
    seed: int = 0


class _Scored:
    """Dense attention, and what the queries think of the rows that a chooser scans."""

    def __init__(self, windows: Windows, end: int):
        self._windows, self._end = windows, end
        self.scores: dict[int, np.ndarray] = {}

    def pool(self, number: int, queries: jax.Array, rows: Rows) -> None:
        self.scores[number] = self._windows.row_scores(number, queries, self._end)


class _Several:
    """Dense attention, and a choice for each budget."""

    def __init__(self, choosers: Sequence[OnDevice | _Scored]):
        self.choosers = choosers

    def pool(self, number: int, queries: jax.Array, rows: Rows) -> None:
        for chooser in self.choosers:
            chooser.pool(number, queries, rows)


class _Given:
    """Rows chosen before."""

    def __init__(self, pools: Pools):
        self._pools = pools

    def pool(self, number: int, queries: jax.Array, rows: Rows) -> Pool | None:
        return self._pools[number]


class _Ahead(_Given):
    """Rows chosen before, while those of the next block are chosen."""

    def __init__(self, pools: Pools, chooser: OnDevice):
        super().__init__(pools)
        self._chooser = chooser

    def pool(self, number: int, queries: jax.Array, rows: Rows) -> Pool | None:
        self._chooser.pool(number, queries, rows)
        return self._pools[number]


class _Own:
    """Rows that a layer's own queries choose; with `before`, the layer before chooses."""

    def __init__(self, engine: HeraldEngine, chooser: OnDevice, *, before: bool):
        self._engine, self.chooser, self._before = engine, chooser, before

    def pool(self, number: int, queries: jax.Array, rows: Rows) -> Pool | None:
        if number == 0 or not self._before:
            self.chooser.pool(number, queries, rows)
        following = number + 1
        if self._before and following < len(self._engine.layers):
            width = self._engine.width
            guess = self._engine.run_layer(forward.predict, following, *rows, width=width)
            self.chooser.pool(following, guess, rows)
        return self.chooser.pools[number]


class Windows:
    """Prefilled windows, and forwards of their blocks.

    Attributes:
        tokens: `int32[B, S]`.
        plan: what is measured.
    """

    def __init__(self, model: Decoder, tokens: np.ndarray, plan: QualityPlan, chunk: int = 512):
        self.tokens, self.plan = tokens.astype(np.int32), plan
        batch, length = tokens.shape
        config = HeraldConfig(
            mode="mage", budget=Budget(max(plan.shares)), init_rows=plan.init_rows,
            prefill_chunk=chunk, max_length=length,
        )  # fmt: skip
        every = HeraldEngine(model, config=config)
        self._engines = {
            "all": every,
            "centre": every.with_config(dataclasses.replace(config, queries="centre")),
        }
        self.width = every.width
        sampling = SamplingParams(max_new_tokens=self.width)
        self._layout = every.layout(batch, every.plan([[0] * (length - self.width)], [sampling]))
        request = Request(0, [0], sampling, DenoiseParams.of_family(model.config), model.config)
        self._block = jax.tree.map(lambda a: np.repeat(a, batch, axis=0), block_fields(request))
        self._state = HeraldState(every.put(self._block), self._prefill(chunk), (), ())
        self._shift = diffusion_of(model.config)[0].logit_shift

    def _prefill(self, chunk: int) -> tuple[jax.Array, ...]:
        engine, layout = self._engines["all"], self._layout
        batch, length = self.tokens.shape
        shape, size = (batch, *layout.cache), engine.model.config.hidden_size
        caches: Any = tuple(jnp.zeros(shape, layout.dtype) for _ in range(layout.layers))
        last: Any = jnp.zeros((batch, size), layout.dtype)
        caches, last = engine.put((caches, last))
        padded = np.zeros((batch, layout.cache[1] * layout.cache[3]), np.int32)
        padded[:, :length] = self.tokens
        aligned = engine.put(np.full(batch, length, np.int32))
        for at in range(0, padded.shape[1], chunk):
            part, start = engine.put((padded[:, at : at + chunk], np.int32(at)))
            arguments = engine.rope, part, start, aligned, caches, last
            caches, last = engine.run(prefill.prefill_chunk, *arguments, donate=(5, 6))
        return caches

    def at(self, start: int, masked: np.ndarray) -> None:
        """Goes to the block at a position; `masked [B, W]` of its tokens are masks."""
        engine, width = self._engines["all"], self.width
        batch = len(self.tokens)
        block = dataclasses.replace(
            self._block,
            start=np.full(batch, start, np.int32),
            tokens=self.tokens[:, start : start + width],
            masked=masked,
            limit=np.full(batch, 2**30, np.int32),
        )
        put = engine.put(block)
        near = engine.run_plain(
            device_selection.near_rows, self._state.caches, put.start,
            leading=self.plan.init_rows, width=width,
        )  # fmt: skip
        self._state = HeraldState(put, self._state.caches, *near)

    def all_masked(self) -> np.ndarray:
        """All of a block but what a commit hands over."""
        masked = np.ones((len(self.tokens), self.width), bool)
        masked[:, 0] = not self._shift
        return masked

    def chooser(self, share: float, end: int) -> OnDevice:
        """Of rows before `end`."""
        engine, first = self._engines["all"], self.plan.init_rows
        count = Budget(share).count(max(end - first, 0))
        one = lambda value: np.full(len(self.tokens), value, np.int32)
        scanned = engine.put((one(first), one(max(end, first)), one(count)))
        return OnDevice(
            engine, self._state.caches, self._layout.sparse, scanned, self._layout.slots
        )

    def row_scores(self, number: int, queries: jax.Array, end: int) -> np.ndarray:
        """Of the cached rows before `end`, `[B, K, S]`; 0 for others."""
        engine, batch = self._engines["all"], len(self.tokens)
        span = engine.put(tuple(np.full(batch, at, np.int32) for at in (self.plan.init_rows, end)))
        aggregate = engine.config.rule.aggregate
        scores = engine.run_plain(
            meters.cache_scores, self._state.caches[number], queries, *span, aggregate=aggregate
        )
        return np.maximum(np.asarray(scores), 0.0)

    def run(self, queries: str, source: Source) -> jax.Array:
        """Hidden states of a forward of the block where `at` went."""
        engine = self._engines[queries]
        turn = self._turn(engine)
        x, _, self._state = hidden_rows(engine, self._state, turn, source, lookahead=False)
        return x

    def look_ahead(self, pools: Pools, share: float, end: int) -> OnDevice:
        """Two forwards of the block where `at` went: its draft, then with the block after it.

        Returns:
            The choice for the block after it, of rows before `end`.
        """
        engine = self._engines["centre"]
        turn = self._turn(engine)
        self._state, turn = run_layers(engine, self._state, turn, _Given(pools), lookahead=False)
        chooser = self.chooser(share, end)
        source = _Ahead(pools, chooser)
        _, _, self._state = hidden_rows(engine, self._state, turn, source, lookahead=True)
        return chooser

    def keys(self, layer: int) -> np.ndarray:
        """A layer's, of whole windows: `[B, K, S, H]`."""
        cache = self._state.caches[layer]
        assert cache is not None  # no layer goes without here
        return np.asarray(layouts.by_row(cache)[:, :, 0])

    def empty_pools(self) -> Pools:
        """Pools without rows."""
        engine, batch = self._engines["all"], len(self.tokens)
        return engine.run_plain(layouts.empty_pools, layout=self._layout, batch=batch)

    def own(self, chooser: OnDevice, *, before: bool) -> _Own:
        """A source whose rows are chosen in the forward itself."""
        return _Own(self._engines["all"], chooser, before=before)

    def _turn(self, engine: HeraldEngine) -> Turn:
        return engine.run_plain(forward.new_turn, batch=len(self.tokens), width=self.width)

    def scores(self, x: jax.Array, dense: jax.Array, start: int, masked: np.ndarray) -> np.ndarray:
        """Of the masked tokens of every window, mean -log p and KL from dense: `[2, B]`."""
        tokens = jnp.asarray(self.tokens[:, start : start + self.width])
        if self._shift:
            x, dense, tokens, masked = x[:, :-1], dense[:, :-1], tokens[:, 1:], masked[:, 1:]
        log_p, divergence, _ = score_tokens(self._engines["all"].model, x, dense, tokens)
        parts = np.stack([-np.asarray(log_p), np.asarray(divergence)]).astype(np.float64)
        return (parts * masked).sum(-1) / masked.sum(-1)

    def agreement(self, x: jax.Array, dense: jax.Array, masked: np.ndarray) -> np.ndarray:
        """Share of the masked tokens that both predict alike, `[B]`."""
        if self._shift:
            x, dense, masked = x[:, :-1], dense[:, :-1], masked[:, 1:]
        alike = np.asarray(meters.alike(self._engines["all"].model, x, dense))
        return (alike & masked).sum(-1) / masked.sum(-1)


def masks(windows: Windows, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Masks of a block, the number of masked tokens one from each part of 1..n."""
    whole = windows.all_masked()
    count = int(whole[0].sum())
    for part in range(windows.plan.masks):
        masked = np.zeros_like(whole)
        for row in range(len(whole)):
            number = 1 + int((part + rng.random()) / windows.plan.masks * count)
            places = np.flatnonzero(whole[row])
            masked[row, rng.choice(places, min(number, count), replace=False)] = True
        yield masked


Scores = dict[tuple[str, float, str], np.ndarray]


def measure(windows: Windows, rng: np.random.Generator, report: Callable[[str], None]) -> Scores:
    """Meters of every mode and budget, a mean over blocks and masks for each window.

    Args:
        windows: prefilled.
        rng: of the masks.
        report: told of each block.

    Returns:
        By mode, share and meter, `[B]`; of "dense" and "near" the share is 1 and 0.
    """
    plan, width = windows.plan, windows.width
    length = windows.tokens.shape[1]
    places = np.linspace(0.75 * length, length - width, plan.blocks).astype(int) // width * width
    totals: dict[tuple[str, float, str], list[np.ndarray]] = {}

    def add(mode: str, share: float, meter: str, values: np.ndarray) -> None:
        totals.setdefault((mode, share, meter), []).append(values)

    for start in map(int, places):
        pools, found, scores = _choices(windows, start)
        oracle = found["mage"]
        for mode, by in found.items():
            for share, ids in by.items():
                add(mode, share, "recall", meters.recalls(ids, oracle[share], length))
                add(mode, share, "mass", meters.masses(ids, scores, length))
        for masked in masks(windows, rng):
            runs = _runs(windows, start, masked, pools)
            if "infinigen" in plan.modes:
                for share in plan.shares:
                    windows.at(start, masked)
                    chooser = windows.chooser(share, start - width)
                    x = windows.run("all", windows.own(chooser, before=True))
                    runs["infinigen", share] = x
                    add(
                        "infinigen",
                        share,
                        "recall",
                        meters.recalls(_ids(chooser), oracle[share], length),
                    )
            for (mode, share), x in runs.items():
                bound, divergence = windows.scores(x, runs["dense", 1.0], start, masked)
                add(mode, share, "bound", bound)
                add(mode, share, "kl", divergence)
                alike = windows.agreement(x, runs["dense", 1.0], masked)
                add(mode, share, "agreement", alike)
        report(f"block at {start}")
    return {key: np.mean(values, axis=0) for key, values in totals.items()}


def _runs(
    windows: Windows, start: int, masked: np.ndarray, pools: dict[str, dict[float, Pools]]
) -> dict[tuple[str, float], jax.Array]:
    """Hidden states of dense attention and of every pool, by mode and share."""
    windows.at(start, masked)
    none: Pools = [None] * len(pools["near"][0.0])
    runs = {("dense", 1.0): windows.run("all", _Given(none))}
    for mode, by in pools.items():
        for share, chosen in by.items():
            runs[mode, share] = windows.run("all", _Given(chosen))
    return runs


def _ids(chooser: OnDevice) -> dict[int, np.ndarray]:
    return {number: np.asarray(ids) for number, ids in chooser.ids.items()}


def _choices(
    windows: Windows, start: int
) -> tuple[dict[str, dict[float, Pools]], Chosen, dict[int, np.ndarray]]:
    """Pools of the modes that choose once a block, the rows, and what all queries think of each."""
    plan, width = windows.plan, windows.width
    pools: dict[str, dict[float, Pools]] = {"near": {0.0: windows.empty_pools()}}
    found: Chosen = {}

    def keep(mode: str, choosers: Sequence[OnDevice]) -> None:
        if mode in plan.modes:
            pools[mode] = {s: c.pools for s, c in zip(plan.shares, choosers, strict=True)}
        found[mode] = {
            share: _ids(chooser) for share, chooser in zip(plan.shares, choosers, strict=True)
        }

    def choosers(end: int) -> list[OnDevice]:
        return [windows.chooser(share, end) for share in plan.shares]

    whole = windows.all_masked()
    windows.at(start, whole)
    every, scored = choosers(start - width), _Scored(windows, start - width)
    windows.run("all", _Several([*every, scored]))
    keep("mage", every)
    if "herald_serial" in plan.modes:
        serial = []
        for share in plan.shares:
            windows.at(start, whole)
            chooser = windows.chooser(share, start - width)
            windows.run("centre", windows.own(chooser, before=False))
            serial.append(chooser)
        keep("herald_serial", serial)
    if "herald" in plan.modes:
        windows.at(start - width, whole)
        first = choosers(start - 2 * width)
        windows.run("centre", _Several(first))
        ahead = []
        for share, cold in zip(plan.shares, first, strict=True):
            windows.at(start - width, whole)
            ahead.append(windows.look_ahead(cold.pools, share, start - width))
        keep("herald", ahead)
    return pools, found, scored.scores
