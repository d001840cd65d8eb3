"""How a request joins: its prompt's KV, its first pools, its row."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np

from host_offload.retrieval import Span
from sparda_jax.diffusion import prefill
from sparda_jax.diffusion.config import diffusion_of
from sparda_jax.diffusion.plan import BlockPlan
from sparda_jax.diffusion.state import BlockState, LayerKV
from sparda_jax.engine.plan import pad_prompts
from sparda_jax.engine.units import first_value
from sparda_jax.herald import device_selection, forward
from sparda_jax.herald import layout as layouts
from sparda_jax.herald.layerwise import OnDevice, run_layers
from sparda_jax.herald.layout import Layout
from sparda_jax.herald.requests import Request, block_fields
from sparda_jax.herald.state import HeraldState, Pool

if TYPE_CHECKING:
    from sparda_jax.herald.engine import HeraldEngine

_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True)
class Admitted:
    """A request as a batch of one.

    Attributes:
        state: its first block.
        pools: rows chosen for it.
        rows: keys and values of its prompt for the host, of the layers that have a pool.
    """

    state: HeraldState
    pools: tuple[Pool | None, ...]
    rows: tuple[jax.Array, ...]


def admitted(
    engine: HeraldEngine, layout: Layout, plan: BlockPlan, request: Request, span: Span
) -> Admitted:
    """`admitting`, all at once."""
    return finished(admitting(engine, layout, plan, request, span))


def finished(work: Generator[Any, None, _Result]) -> _Result:
    """What work in units returns at its end."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            found: _Result = end.value
            return found


def admitting(
    engine: HeraldEngine, layout: Layout, plan: BlockPlan, request: Request, span: Span
) -> Generator[jax.Array, None, Admitted]:
    """Prefills a request; where a turn's rows are chosen a turn ahead, chooses the first ones.

    Args:
        engine: its programs.
        layout: what lies where.
        plan: sizes of the batch.
        request: not begun.
        span: what is scanned for its first block.

    Yields:
        After each chunk of the prompt an array that is there when it is done.

    Returns:
        The request as a batch of one.
    """
    caches = yield from _prefilled(engine, layout, plan, request)
    block = engine.put(block_fields(request))
    init, previous = engine.run_plain(
        device_selection.near_rows,
        caches,
        block.start,
        leading=layout.init_rows,
        width=layout.width,
    )
    every = range(layout.layers)
    only = lambda arrays, layers: tuple(arrays[n] if n in layers else None for n in every)
    pools, whole = _first_pools(engine, layout, block, caches, span)
    state = HeraldState(
        block, only(whole, layout.cached), only(init, layout.sparse), only(previous, layout.sparse)
    )
    rows = ()
    if engine.config.policy.offload:
        rows = engine.run_plain(layouts.prompt_rows, tuple(whole[n] for n in layout.sparse))
    return Admitted(state, pools, rows)


def _prefilled(
    engine: HeraldEngine, layout: Layout, plan: BlockPlan, request: Request
) -> Generator[jax.Array, None, tuple[LayerKV, ...]]:
    """Whole caches of a prompt; the request gains the token that they hand over, if they do."""
    facts, _ = diffusion_of(engine.model.config)
    padded = -(-request.aligned // plan.chunk) * plan.chunk
    tokens, _ = pad_prompts([request.prompt[: request.aligned]], padded)
    aligned = engine.put(np.array([request.aligned], np.int32))
    caches, last = yield from whole_caches(engine, layout, tokens, aligned, plan.chunk)
    if facts.logit_shift and request.aligned == len(request.prompt):
        sampling = engine.put(block_fields(request).sampling)
        drawn = engine.run(prefill.first_handover, last, aligned, sampling)
        request.gain([int(jax.device_get(drawn)[0])])
    return caches


def whole_caches(
    engine: HeraldEngine, layout: Layout, tokens: np.ndarray, aligned: jax.Array, chunk: int
) -> Generator[jax.Array, None, tuple[tuple[LayerKV, ...], jax.Array]]:
    """Prefills prompts, a chunk after the other.

    Args:
        engine: its programs.
        layout: shape of the caches.
        tokens: `[B, T]`, padded to whole chunks.
        aligned: whole diffusion blocks of each prompt, tokens.
        chunk: tokens of a call.

    Yields:
        After each chunk an array that is there when it is done.

    Returns:
        All layers' KV, and the hidden states of each prompt's last token in a whole block.
    """
    caches, last = engine.run_plain(
        prefill.empty_caches,
        shape=(len(tokens), *layout.cache),
        layers=layout.layers,
        size=engine.model.config.hidden_size,
        dtype=layout.dtype,
    )
    for at in range(0, tokens.shape[1], chunk):
        part, start = engine.put((tokens[:, at : at + chunk], np.int32(at)))
        arguments = engine.rope, part, start, aligned, caches, last
        caches, last = engine.run(prefill.prefill_chunk, *arguments, donate=(5, 6))
        yield engine.run_plain(first_value, last)
    return caches, last


def _first_pools(
    engine: HeraldEngine,
    layout: Layout,
    block: BlockState,
    caches: tuple[LayerKV, ...],
    span: Span,
) -> tuple[tuple[Pool | None, ...], Sequence[LayerKV | None]]:
    """Chosen by the first block's own queries, in a forward over whole caches; and the caches."""
    if engine.config.policy.when != "ahead" or not layout.sparse:
        return engine.run_plain(layouts.empty_pools, layout=layout, batch=1), caches
    scanned = [np.array([value], np.int32) for value in (span.first, span.end, span.count)]
    turn = engine.run_plain(forward.new_turn, batch=1, width=layout.width)
    none = (None,) * layout.layers
    state = HeraldState(block, caches, none, none)
    source = OnDevice(engine, caches, layout.sparse, engine.put(tuple(scanned)), layout.slots)
    state, _ = run_layers(engine, state, turn, source, lookahead=False)
    return tuple(source.pools), state.caches
