"""Which blocks every layer and KV head attends while tokens are generated, as a results file.

    python -m sparda_jax.evaluation.attended --mode sparda --json results/cpu/attended.json

`scripts/report.py` draws it. The tokens are the engine's; what they attend is read off a forward
pass over all of them, whose selections are those of decode (spec: decode == whole sequence).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from sparda_jax import cli
from sparda_jax.config import EngineConfig, SamplingParams, SparseConfig
from sparda_jax.demo import DEMO, prompt_text
from sparda_jax.evaluation import policies
from sparda_jax.evaluation.policies import LayerStep, Policy
from sparda_jax.models.decoder import Decoder


def attended_blocks(
    model: Decoder,
    policy: Policy,
    tokens: Sequence[int],
    sparse: SparseConfig,
    steps: int,
) -> np.ndarray:
    """Blocks that the last tokens of a sequence attend.

    Args:
        model: the decoder.
        policy: says what every layer attends; dense attends all and has no picture.
        tokens: prompt and what was generated.
        sparse: selection rules.
        steps: how many of the last tokens.

    Returns:
        `bool[L, K, steps, M]`.

    Raises:
        ValueError: dense attention, or fewer tokens than steps.
    """
    if not policy.layers:
        raise ValueError("dense attention attends all blocks: there is nothing to show")
    if not 1 <= steps <= len(tokens):
        raise ValueError(f"{steps} steps of a sequence of {len(tokens)} tokens")
    last = jnp.arange(len(tokens) - steps, len(tokens))
    budgets, masks = jnp.full((1,), sparse.budget_blocks, jnp.int32), []

    def look(step: LayerStep) -> None:
        masks.append(np.asarray(step.at(last).mask(policy, budgets, sparse))[0])

    row = jnp.asarray(tokens, jnp.int32)[None]
    policies.forward(model, policy, row, sparse, visit=look)
    return np.stack(masks)


def as_document(blocks: np.ndarray) -> dict[str, Any]:
    """The mask as it stands in a results file; see `report.blocks_of`."""
    ids = [[[np.flatnonzero(s).tolist() for s in head] for head in layer] for layer in blocks]
    return {"blocks": blocks.shape[-1], "ids": ids}


def main(argv: Sequence[str] | None = None) -> None:
    """Generates with the default model from the demo's prompt and keeps what was attended."""
    from sparda_jax.engine.generate import Engine
    from sparda_jax.evaluation.kernel_benchmarks.harness import results_document
    from sparda_jax.evaluation.run import write_whole
    from sparda_jax.evaluation.statistics import Estimate
    from sparda_jax.evaluation.tables import make_row

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=("sparse", "sparda"), default="sparda")
    parser.add_argument("--tokens", type=int, default=DEMO.document_tokens, help="of the prompt")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args(argv)
    forecast = "default" if args.mode == "sparda" else None
    model, tokenizer = cli.load_model("default")
    selector = cli.load_selector(args.mode, model, tokenizer, forecast)
    sparse = SparseConfig()
    prompt = tokenizer.encode(prompt_text(tokenizer))[-args.tokens :]
    engine = Engine(model, sparse=sparse, config=EngineConfig(mode=args.mode), **selector)
    ((result,), _) = engine.generate([prompt], SamplingParams(max_new_tokens=args.steps))
    count = len(model.layers)
    policy = (
        policies.sparda_policy(selector["forecast"]) if forecast else policies.sparse_policy(count)
    )
    blocks = attended_blocks(model, policy, [*prompt, *result.tokens], sparse, args.steps)
    rows = []
    for layer, mask in enumerate(blocks):
        changed = 1 - (mask[:, 1:] & mask[:, :-1]).sum(-1) / mask[:, 1:].sum(-1)
        value, low, high = changed.mean(), changed.min(), changed.max()
        estimate = Estimate(float(value), float(low), float(high), changed.size)
        name = f"attended/{args.mode}/changed/layer_{layer:02d}"
        rows.append(make_row(name, estimate, "share", "lower"))
    command = f"python -m sparda_jax.evaluation.attended --mode {args.mode} --tokens {args.tokens} "
    command += f"--steps {args.steps} --json {args.json}"
    notes = (
        "Blocks that the last tokens attend, default model and policy, the demo's prompt. changed: "
        "share of a step's blocks that the step before did not attend, mean over KV heads and "
        "steps; spread: least and most."
    )
    document = results_document(command, rows, notes) | {"attended": as_document(blocks)}
    write_whole(args.json, json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
