"""Runs the published decode trajectories through the block engine, all of a family in one batch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from sparda_jax.checkpoints.safetensors import load_safetensors
from sparda_jax.config import SamplingParams
from sparda_jax.diffusion.config import DenoiseParams
from sparda_jax.diffusion.decode import forward
from sparda_jax.diffusion.generate import BlockEngine
from sparda_jax.diffusion.masks import training_mask
from sparda_jax.diffusion.plan import BlockEngineConfig
from sparda_jax.models.decoder import Decoder

FAMILIES = ("sdar_tiny", "fast_dllm_v2_tiny", "llada2_tiny")

VARIANTS = ("_fixed", "_clamped", "_prefilled", "")


def with_diffusion(model: Decoder, **facts: Any) -> Decoder:
    """The same weights with other facts about block diffusion."""
    diffusion = dataclasses.replace(model.config.diffusion, **facts)
    model.config = dataclasses.replace(model.config, diffusion=diffusion)
    return model


def load_case_model(folder: Path, block_size: int, dtype: Any = "float32") -> Decoder:
    model = load_safetensors(folder, dtype=dtype)
    return with_diffusion(model, mask_token_id=250, block_size=block_size)


def packed_training_mask(lengths: Sequence[int], block_size: int) -> np.ndarray:
    """Of `[noisy_1; clean_1; noisy_2; clean_2; ...]`; positions begin anew in each sample."""
    masks = [training_mask(length, block_size) for length in lengths]
    return np.asarray(jax.scipy.linalg.block_diag(*masks), bool)


def trajectories(folder: Path) -> dict[str, dict[str, Any]]:
    """Metadata of every decode file that counts: of variants of a case the first that exists."""
    files = json.loads((folder / "case.json").read_text())["files"]
    stem = lambda name: next(
        name.removesuffix(".npz").removesuffix(v) for v in VARIANTS if name.endswith(f"{v}.npz")
    )
    found = {}
    for base in sorted({stem(name) for name in files if name.startswith("decode_")}):
        name = next(f"{base}{v}.npz" for v in VARIANTS if f"{base}{v}.npz" in files)
        found[name] = files[name]
    return found


def request(meta: dict[str, Any], prompt: np.ndarray) -> tuple[SamplingParams, DenoiseParams]:
    """A case's settings in ours."""
    width = meta["block_size"]
    if "denoising_steps" in meta:  # SDAR
        rule = DenoiseParams(meta["strategy"], meta["denoising_steps"], meta["threshold"] or 0.9)
        stops, count = meta["stop_ids"] or (), meta["gen_length"]
    elif "sub_block" in meta:  # Fast-dLLM v2 counts blocks, from the one that holds the tail
        rule = DenoiseParams(
            "threshold_or_best",
            threshold=meta["threshold"],
            sub_block=meta["sub_block"],
            early_stop=True,
        )
        blocks = meta["max_new_tokens"] // width
        stops, count = (meta["stop_id"],), width * blocks - len(prompt) % width + 1
    else:  # LLaDA2
        count = meta["gen_length"]
        rule = DenoiseParams(
            "low_confidence_dynamic",
            min(meta["steps"], count),
            meta["threshold"],
            early_stop=meta["eos_early_stop"],
        )
        stops = (meta["eos_id"],)
    return SamplingParams(max_new_tokens=count, stop_token_ids=tuple(stops)), rule


def run_cases(
    model: Decoder, folder: Path, names: list[str], *, dual_cache: int | None = None
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, np.ndarray]]:
    """Decodes all named cases as one batch, forward by forward.

    Returns:
        What each forward saw and did, and the KV of the last layer at the end, `[K, 2, S, H]`.
    """
    metas, arrays = trajectories(folder), {n: np.load(folder / n) for n in names}
    prompts = [arrays[n]["prompt_ids"].tolist() for n in names]
    settings = [request(metas[n], arrays[n]["prompt_ids"]) for n in names]
    engine = BlockEngine(model, config=BlockEngineConfig(dual_cache=dual_cache))
    sampling, rules = [s for s, _ in settings], [r for _, r in settings]
    generation = engine.prepare(prompts, sampling, rules)
    generation.prefill()
    state = generation.state
    step = engine.programs.on_model(forward, sub_block=dual_cache)
    found: dict[str, list[dict[str, Any]]] = {n: [] for n in names}
    while np.any(before := jax.device_get(state.active)):
        old = jax.device_get((state.start, state.tokens, state.masked))
        state, output = step(engine.parameters.arrays, engine.rope, state)
        output = jax.device_get(output)
        for row in np.flatnonzero(before & (output.ran > 0)):
            start, tokens, masked = (array[row] for array in old)
            own = jax.tree.map(lambda array, row=row: array[row], output)
            record = {"start": int(start), "tokens": tokens, "masked": masked, "output": own}
            found[names[row]].append(record)
    cache = np.moveaxis(np.asarray(state.layers[-1]), 3, 2)
    cache = cache.reshape(*cache.shape[:3], -1, cache.shape[-1])
    return found, dict(zip(names, cache, strict=True))


@pytest.fixture(autouse=True, scope="module")
def quick_compilation() -> Iterator[None]:
    """These programs run for milliseconds and compile for seconds: XLA's cheap passes will do."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
