"""Every published decode trajectory, forward by forward; all of a family run as one batch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from sparda_jax.diffusion.generate import BlockEngine
from sparda_jax.diffusion.plan import BlockEngineConfig

from .conftest import load_case_model, request, run_cases, trajectories

ROOT = Path(__file__).parents[2] / "data" / "block_diffusion"
GROUPS = [
    ("sdar_tiny", 4, None),
    ("sdar_tiny", 32, None),
    ("fast_dllm_v2_tiny", 32, None),
    ("fast_dllm_v2_tiny", 32, 8),
    ("llada2_tiny", 32, None),
]


def group_names(family: str, width: int, dual: int | None) -> list[str]:
    metas = trajectories(ROOT / family)
    return [
        name
        for name, meta in metas.items()
        if meta["block_size"] == width and bool(meta.get("use_block_cache")) == bool(dual)
    ]


CASES = [(group, name) for group in GROUPS for name in group_names(*group)]


@functools.lru_cache(maxsize=1)
def runs(family: str, width: int, dual: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
    model = load_case_model(ROOT / family, width)
    names = group_names(family, width, dual)
    with jax.default_matmul_precision("highest"):
        return run_cases(model, ROOT / family, names, dual_cache=dual)


def commits(case: Any) -> np.ndarray:
    """Which of the reference's forwards are commits; LLaDA2's has none."""
    if "step_is_commit" in case:
        return case["step_is_commit"].astype(bool)
    if "step_kind" in case:
        return case["step_kind"] == 4
    return np.zeros(len(case["step_block"]), bool)


@pytest.mark.parametrize(("group", "name"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_trajectory(group, name):
    case, (steps, cached) = np.load(ROOT / group[0] / name), (one[name] for one in runs(*group))
    denoised = [step for step in steps if not step["output"].committed]
    expected = np.flatnonzero(~commits(case))
    assert len(denoised) == len(expected)
    for step, index in zip(denoised, expected, strict=True):
        output, known = step["output"], ~step["masked"]
        decided = case["step_transfer"][index]
        assert step["start"] // group[1] == case["step_block"][index]
        np.testing.assert_array_equal(step["tokens"][known], case["step_tokens"][index][known])
        np.testing.assert_array_equal(output.decided, decided)
        np.testing.assert_array_equal(output.token[decided], case["step_argmax"][index][decided])
        np.testing.assert_allclose(
            output.probability[decided], case["step_prob"][index][decided], atol=2e-5, rtol=0
        )
        alone = "step_kind" in case and case["step_kind"][index] == 3  # the sub-block's rows alone
        assert output.ran == (8 if alone else group[1])
    # Ours commits every block that was finished, and no other.
    finished = sum(not step["output"].ended for step in steps if _last_of_block(step))
    assert sum(bool(step["output"].committed) for step in steps) == finished
    for kind, committed in enumerate(("committed_k", "committed_v")):
        if committed in case:  # of the last layer, in one file
            theirs = case[committed][0]
            ours = cached[:, kind, : theirs.shape[1]]
            np.testing.assert_allclose(ours, theirs, atol=2e-4, rtol=1e-4)
    if "handover" in case and len(case["prompt_ids"]) % 32:
        handed = [int(s["output"].handover) for s in steps if s["output"].committed]
        assert handed == case["handover"].tolist()


def _last_of_block(step: dict[str, Any]) -> bool:
    left = step["masked"] & ~step["output"].decided
    return not step["output"].committed and not left.any()


def test_what_the_user_gets():
    """Cut at the stop token and at the tokens asked for; several blocks a call."""
    family, width, dual = GROUPS[3]
    names, metas = group_names(family, width, dual), trajectories(ROOT / family)
    cases = {name: np.load(ROOT / family / name) for name in names}
    settings = [request(metas[name], cases[name]["prompt_ids"]) for name in names]
    prompts = [cases[name]["prompt_ids"].tolist() for name in names]
    model = load_case_model(ROOT / family, width)
    engine = BlockEngine(model, config=BlockEngineConfig(dual_cache=dual, blocks_per_call=2))
    with jax.default_matmul_precision("highest"):
        results, report = engine.generate(
            prompts, [s for s, _ in settings], [r for _, r in settings]
        )
    for name, prompt, result, (sampling, _) in zip(names, prompts, results, settings, strict=True):
        canvas = cases[name]["final_ids"][len(prompt) :].tolist()[: sampling.max_new_tokens]
        stops = [i for i, token in enumerate(canvas) if token in sampling.stop_token_ids]
        assert result.tokens == (canvas[: stops[0] + 1] if stops else canvas), name
        assert result.finish_reason == ("stop" if stops else "length")
    assert report.decode_tokens == sum(len(result.tokens) for result in results)
