"""Prefilled windows of text, and forwards of their blocks with rows chosen in any way."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sparda_jax.config import SamplingParams
from sparda_jax.diffusion.config import DenoiseParams, diffusion_of
from sparda_jax.evaluation import herald_meters as meters
from sparda_jax.evaluation.language import score_tokens
from sparda_jax.herald import device_selection, forward
from sparda_jax.herald import layout as layouts
from sparda_jax.herald.admission import finished, whole_caches
from sparda_jax.herald.config import Budget, HeraldConfig
from sparda_jax.herald.engine import HeraldEngine
from sparda_jax.herald.layerwise import OnDevice, Rows, Source, hidden_rows, run_layers
from sparda_jax.herald.requests import Request, block_fields
from sparda_jax.herald.state import HeraldState, Pool, Turn
from sparda_jax.models.decoder import Decoder

MODES = ("mage", "herald", "herald_serial", "infinigen")
Pools = Sequence[Pool | None]


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


class Given:
    """Rows chosen before."""

    def __init__(self, pools: Pools):
        self._pools = pools

    def pool(self, number: int, queries: jax.Array, rows: Rows) -> Pool | None:
        """See `Source`."""
        return self._pools[number]


class _Ahead(Given):
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
        width: W of the model.
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
        padded = np.zeros((batch, layout.cache[1] * layout.cache[3]), np.int32)
        padded[:, :length] = self.tokens
        aligned = engine.put(np.full(batch, length, np.int32))
        return finished(whole_caches(engine, layout, padded, aligned, chunk))[0]

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
        self._state, turn = run_layers(engine, self._state, turn, Given(pools), lookahead=False)
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
        """Means over the masked tokens of every window, `[3, B]`.

        Args:
            x: hidden states of a forward.
            dense: those of dense attention.
            start: of the block.
            masked: `[B, W]`.

        Returns:
            -log p, KL from dense, and the share that both predict alike.
        """
        model, tokens = self._engines["all"].model, self.tokens[:, start : start + self.width]
        if self._shift:
            x, dense, tokens, masked = x[:, :-1], dense[:, :-1], tokens[:, 1:], masked[:, 1:]
        log_p, divergence, _ = map(np.asarray, score_tokens(model, x, dense, jnp.asarray(tokens)))
        alike = np.asarray(meters.alike(model, x, dense))
        parts = np.stack([-log_p, divergence, alike]).astype(np.float64)
        return (parts * masked).sum(-1) / masked.sum(-1)
