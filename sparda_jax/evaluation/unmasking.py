"""The order in which a block-diffusion model unmasked positions, as a results file.

    python -m sparda_jax.evaluation.unmasking --json results/cpu/unmasked.json

`scripts/report.py` draws it. The forwards are those of the engine, one a call, so that what each of
them decided can be looked at.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from sparda_jax import cli
from sparda_jax.config import SamplingParams
from sparda_jax.diffusion import decode
from sparda_jax.diffusion.config import DenoiseParams
from sparda_jax.diffusion.files import load_adapter
from sparda_jax.diffusion.generate import BlockEngine


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


def main(argv: Sequence[str] | None = None) -> None:
    """Generates with the default model and its adapter, and keeps the order."""
    from sparda_jax.demo import prompt_text
    from sparda_jax.evaluation.kernel_benchmarks.harness import results_document
    from sparda_jax.evaluation.run import write_whole
    from sparda_jax.evaluation.statistics import Estimate
    from sparda_jax.evaluation.tables import make_row

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threshold", type=float, help="confidence above which a token is decided")
    parser.add_argument("--tokens", type=int, default=1000, help="of the prompt: the demo's end")
    parser.add_argument("--new-tokens", type=int, default=192)
    parser.add_argument("--json", type=Path, required=True)
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    model, tokenizer = cli.load_model("default")
    model = load_adapter("default", model)
    rule = DenoiseParams.of_family(model.config)
    if args.threshold is not None:
        rule = dataclasses.replace(rule, threshold=args.threshold)
    prompt = tokenizer.encode(prompt_text(tokenizer))[-args.tokens :]
    steps = order_of(
        BlockEngine(model), prompt, SamplingParams(max_new_tokens=args.new_tokens), rule
    )
    rows = []
    for number, block in enumerate(steps):
        order = block[block >= 0]
        # A step later than all before it, position by position: 1 is from left to right.
        later = np.array([step > order[:i].max() for i, step in enumerate(order) if i])
        name, count = f"unmasked/{rule.strategy}/block_{number:02d}", int(order.max()) + 1
        rows.append(make_row(f"{name}/steps", Estimate(count, count, count, 1), "steps", "lower"))
        share = float(later.mean()) if later.size else 1.0
        estimate = Estimate(share, share, share, later.size)
        rows.append(make_row(f"{name}/left_to_right", estimate, "share"))
    command = f"python -m sparda_jax.evaluation.unmasking {shlex.join(map(str, argv))}"
    notes = (
        "Default model with its adapter, greedy, continuing the demo's text. steps: denoising "
        "forwards of a block. left_to_right: share of its positions decided later than all before "
        "them."
    )
    document = results_document(command, rows, notes) | {"unmasked": steps.tolist()}
    write_whole(args.json, json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
