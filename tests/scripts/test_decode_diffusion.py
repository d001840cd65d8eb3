"""`scripts/decode.py --diffusion` on a tiny checkpoint with an adapter that changes little."""

import jax
import jax.numpy as jnp
import pytest

from sparda_jax.checkpoints.load import load_pretrained
from sparda_jax.config import DiffusionConfig
from sparda_jax.diffusion.adapter import LoraConfig, lora_weights
from sparda_jax.diffusion.files import save_adapter

from .conftest import call

TEXT = "A block of tokens is denoised together."


@pytest.fixture(scope="module")
def decode(checkpoint, tmp_path_factory):
    """Blocks of 8 tokens in sub-blocks of 4; the same arguments again cost nothing."""
    model, _ = load_pretrained(checkpoint)
    lora = LoraConfig(2)
    weights = jax.tree.map(lambda leaf: leaf + 0.05, lora_weights(model, lora, 0))
    path = tmp_path_factory.mktemp("adapter") / "adapter.safetensors"
    save_adapter(path, weights, model, lora, DiffusionConfig(8, 5, True), dtype=jnp.float32)
    fixed = ("--model", str(checkpoint), "--adapter", str(path), "--prompt", TEXT)
    outcomes = {}

    def run(*arguments):
        if arguments not in outcomes:
            outcomes[arguments] = call(*fixed, "--diffusion", "--max-new-tokens=20", *arguments)
        return outcomes[arguments]

    return run


@pytest.mark.smoke
def test_blocks_are_streamed_with_their_steps(decode):
    plain = decode("--threshold=0.9")
    assert plain.code == 0, plain.err
    assert "1 x 39 tokens, blocks of 8, threshold_or_first, threshold 0.9" in plain.err
    text, _, counters = plain.out.rpartition("\n\nprefill ")
    assert len(set(text)) > 2
    assert "denoising forwards each, and one commit" in counters
    lines = [line for line in plain.err.splitlines() if line.startswith("  [block ")]
    # 39 tokens: the last of a block, then whole ones.
    assert lines[0].startswith("  [block 1: ") and lines[1].startswith("  [block 2: ")
    counts = [int(line.split(": ")[1].split()[0]) for line in lines]
    assert sum(counts) == 20 and max(counts) <= 9


def test_a_stop_string_ends_the_text(decode):
    whole = decode("--threshold=0.9").out.rpartition("\n\nprefill ")[0]
    stop = whole[2:4]
    outcome = decode("--threshold=0.9", "--json", f"--stop={stop}")
    (result,) = outcome.json["results"]
    assert result["text"] == whole[: whole.find(stop)]
    assert result["finish_reason"] == "stop"
    assert outcome.json["report"]["blocks"] == sum(outcome.json["report"]["steps"].values())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--threshold=1.5",), "threshold must be in (0, 1], got 1.5"),
        (("--denoising-steps=9",), "9 denoising steps exceed the block size of 8"),
        (("--diffusion-block=16",), "trained for blocks of 8 tokens, not 16"),
        (("--edit-threshold=0.5",), "token editing (LLaDA2.1) is not supported"),
        (("--dual-cache",), "--dual-cache runs sub-blocks alone: state their size"),
        (("--strategy=best",), "unknown strategy 'best'"),
    ],
)
def test_mistakes_are_one_line(decode, arguments, words):
    outcome = decode(*arguments)
    assert outcome.code == 1 and not outcome.out
    assert words in outcome.err.splitlines()[-1]
