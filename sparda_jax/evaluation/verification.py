"""Is a checkpoint what it should be, and computed as it should be: checks that end in a verdict.

For owners of weights that could not be had here. A record holds what one run saw: the fingerprint
of the weights, and what the model says to a fixed input. A later run, on another machine or
version, compares itself with it; transformers, where installed, is the independent judge.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparda_jax.checkpoints.forecast import model_fingerprint
from sparda_jax.config import EngineConfig, SamplingParams, SparseConfig
from sparda_jax.diffusion.masks import block_causal_mask
from sparda_jax.engine.generate import Engine
from sparda_jax.evaluation.agreement import equal_share
from sparda_jax.pretrained import Pretrained

VERSION = 1
# Of log-probabilities, against a record or transformers: bfloat16 on another device moves them.
TOLERANCE = 0.25


@dataclass(frozen=True)
class Record:
    """What a model says to a fixed input.

    Attributes:
        fingerprint: of its weights.
        dtype: it was computed in.
        prompt: token ids.
        tokens: the likeliest token after each position (block diffusion: at each position); then,
            of an autoregressive model, a greedy continuation.
        logprobs: of the prompt's likeliest tokens.
    """

    fingerprint: str
    dtype: str
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    version: int = VERSION


@dataclass
class Verdict:
    """Findings in order; verified if none of them failed."""

    lines: list[str] = field(default_factory=list)
    failures: int = 0

    def add(self, what: str, passed: bool | None, detail: str) -> None:
        """One finding; `passed` None where there was nothing to compare with."""
        mark = {True: "ok", False: "FAILED", None: "not compared"}[passed]
        self.lines.append(f"{what}: {mark}, {detail}")
        self.failures += passed is False


def fixed_prompt(vocab_size: int, count: int) -> list[int]:
    """The same ids everywhere: squares modulo a prime, inside any vocabulary."""
    return [(i * i * 7919 + 31 * i + 11) % 104729 % vocab_size for i in range(1, count + 1)]


def observe(loaded: Pretrained, *, prompt: list[int], new_tokens: int) -> Record:
    """Runs the fixed input."""
    model, config = loaded.model, loaded.config
    mask = None
    if config.diffusion is not None:
        mask = block_causal_mask(len(prompt), config.diffusion.block_size)

    @jax.jit
    def likeliest(model: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        logprobs = jax.nn.log_softmax(model(tokens, mask=mask)[0])
        return logprobs.argmax(-1), logprobs.max(-1)

    tokens, logprobs = jax.device_get(likeliest(model, jnp.asarray([prompt], jnp.int32)))
    said = tokens.tolist()
    if config.diffusion is None:
        settings = EngineConfig(mode="dense", max_length=len(prompt) + new_tokens)
        results, _ = Engine(model, config=settings).generate(
            [prompt], SamplingParams(max_new_tokens=new_tokens)
        )
        said += results[0].tokens
    return Record(
        model_fingerprint(model), model.dtype.name, prompt, said, logprobs.astype(float).tolist()
    )


def compare(verdict: Verdict, seen: Record, path: Path) -> None:
    """Compares with a record on disk.

    Raises:
        ValueError: the file is no record.
        NotImplementedError: of a later version.
    """
    try:
        known = Record(**json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a record: {error}") from None
    if known.version != VERSION:
        raise NotImplementedError(f"{path} has version {known.version}, only {VERSION} is known")
    same = known.fingerprint == seen.fingerprint
    verdict.add(
        "weights", same, f"fingerprint {seen.fingerprint[:12]}, recorded {known.fingerprint[:12]}"
    )
    if known.prompt != seen.prompt or len(known.tokens) != len(seen.tokens):
        verdict.add("continuation", False, f"{path} holds another input or length")
        return
    share = float(np.mean(np.array(known.tokens) == np.array(seen.tokens)))
    exact = known.dtype == seen.dtype == "float32"
    passed = share == 1.0 if exact else share >= 0.9
    verdict.add(
        "continuation",
        passed,
        f"{share:.1%} of tokens as recorded ({known.dtype} and {seen.dtype})",
    )
    _compare_logprobs(verdict, "log-probabilities", known.logprobs, seen.logprobs)


def _compare_logprobs(verdict: Verdict, what: str, known: list[float], seen: list[float]) -> None:
    worst = float(np.abs(np.array(known) - np.array(seen)).max())
    verdict.add(what, worst < TOLERANCE, f"largest difference {worst:.4f}, limit {TOLERANCE}")


def compare_transformers(verdict: Verdict, seen: Record, folder: Path) -> None:
    """Compares with transformers' own class for this checkpoint, in float32 on the CPU."""
    try:
        import torch
        from transformers import AutoModelForCausalLM  # type: ignore[import-not-found]
    except ImportError:
        verdict.add("transformers", None, "it and torch are not installed")
        return
    other = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    with torch.no_grad():
        logits = other(torch.tensor([seen.prompt])).logits[0].float().numpy()
    logprobs = np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))
    share = float(np.mean(logprobs.argmax(-1) == np.array(seen.tokens[: len(seen.prompt)])))
    verdict.add("transformers", share >= 0.9, f"{share:.1%} of likeliest tokens equal")
    _compare_logprobs(
        verdict, "transformers' log-probabilities", logprobs.max(-1).tolist(), seen.logprobs
    )


def measure_sparse(
    verdict: Verdict, loaded: Pretrained, sparse: SparseConfig, *, length: int, new_tokens: int
) -> None:
    """Share of greedy tokens that sparse attention, and SparDA's, draw as dense attention does."""
    prompt = fixed_prompt(loaded.config.vocab_size, length)
    sampling = SamplingParams(max_new_tokens=new_tokens)

    def run(mode: Any) -> list[list[int]]:
        engine = Engine(
            loaded.model,
            sparse=sparse,
            config=EngineConfig(mode=mode, max_length=length + new_tokens),
            forecast=loaded.forecast if mode == "sparda" else None,
        )
        return [result.tokens for result in engine.generate([prompt], sampling)[0]]

    dense = run("dense")
    modes = ["sparse"] if loaded.forecast is None else ["sparse", "sparda"]
    for mode in modes:
        share = equal_share(run(mode), dense)
        detail = f"{share:.1%} of {new_tokens} tokens as dense, {length} tokens of context"
        verdict.add(f"{mode} attention", None, detail)


def verify(
    loaded: Pretrained,
    folder: Path,
    *,
    record: Path | None,
    transformers: bool,
    sparse: SparseConfig | None,
    context: int,
    new_tokens: int,
    say: Callable[[str], None] = lambda line: None,
) -> Verdict:
    """All checks of a checkpoint that has loaded, so whose names, shapes and types are right.

    Args:
        loaded: the checkpoint.
        folder: where from.
        record: file to compare with; written where it does not exist.
        transformers: compare with transformers too.
        sparse: policy of the sparse modes; None: they are not run.
        context: tokens of the sparse modes' prompt.
        new_tokens: of every continuation.
        say: called with each finding.
    """
    verdict = Verdict()
    count = sum(leaf.size for leaf in jax.tree.leaves(loaded.model))
    verdict.add("names, shapes, types", True, f"{count:,} parameters, {loaded.report}")
    seen = observe(loaded, prompt=fixed_prompt(loaded.config.vocab_size, 64), new_tokens=new_tokens)
    if record is not None and record.exists():
        compare(verdict, seen, record)
    elif record is not None:
        record.write_text(json.dumps(asdict(seen)), "utf-8")
        verdict.add("record", None, f"written to {record}")
    if transformers:
        compare_transformers(verdict, seen, folder)
    if sparse is not None and loaded.config.diffusion is None:
        measure_sparse(verdict, loaded, sparse, length=context, new_tokens=new_tokens)
    for line in verdict.lines:
        say(line)
    return verdict
