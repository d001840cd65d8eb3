"""The order in which a block-diffusion model unmasked positions.

The forwards are those of the engine, one a call, so that what each of them decided can be looked
at. `scripts/benchmark.py unmasked` makes a results file of it, which `scripts/report.py` draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import numpy as np

from sparda_jax.config import SamplingParams
from sparda_jax.diffusion import decode
from sparda_jax.diffusion.config import DenoiseParams
from sparda_jax.diffusion.generate import BlockEngine
from sparda_jax.evaluation.statistics import Estimate
from sparda_jax.evaluation.tables import ScoreRow, make_row


def order_of(
    engine: BlockEngine,
    prompt: Sequence[int],
    sampling: SamplingParams,
    denoise: DenoiseParams | None = None,
) -> np.ndarray:
    """The step in which every position of every block was decided.

    Args:
        engine: of the model.
        prompt: token ids.
        sampling: settings of the request.
        denoise: how blocks are denoised; None: as the family's authors publish.

    Returns:
        `int[blocks, W]`, steps from 0; -1 where a token was known before (of the prompt, or handed
        over by the block before) or the request ended.

    Raises:
        FloatingPointError: logits that are not finite.
    """
    generation = engine.prepare([prompt], sampling, denoise)
    generation.prefill()
    state = generation.state
    assert state is not None
    program = engine.programs.on_model(decode.forward, donate=(2,))
    blocks: dict[int, np.ndarray] = {}
    while bool(state.active[0]):
        start, step = int(state.start[0]), int(state.step[0])
        state, output = program(engine.parameters.arrays, engine.rope, state)
        decided, failed = jax.device_get((output.decided[0], state.failed[0]))
        if failed:
            raise FloatingPointError(f"logits of the block at {start} are not finite")
        if decided.any():
            block = blocks.setdefault(start, np.full(len(decided), -1))
            block[decided] = step
    return np.array(list(blocks.values()))


def rows(strategy: str, steps: np.ndarray) -> Iterator[ScoreRow]:
    """Of each block: its steps, and how far it went from left to right.

    Args:
        strategy: of denoising, for the names.
        steps: see `order_of`.
    """
    for number, block in enumerate(steps):
        order = block[block >= 0]
        # A step later than all before it, position by position: 1 is from left to right.
        later = np.array([step > order[:i].max() for i, step in enumerate(order) if i])
        name, count = f"unmasked/{strategy}/block_{number:02d}", int(order.max()) + 1
        yield make_row(f"{name}/steps", Estimate(count, count, count, 1), "steps", "lower")
        share = float(later.mean()) if later.size else 1.0
        estimate = Estimate(share, share, share, later.size)
        yield make_row(f"{name}/left_to_right", estimate, "share")
