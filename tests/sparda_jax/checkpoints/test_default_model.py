"""The default model really speaks: its weights, RoPE order, tokenizer and template fit together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.assets import load_excerpt
from sparda_jax.checkpoints.assemble import assemble
from sparda_jax.checkpoints.gguf import GGUFCheckpoint
from sparda_jax.config import ModelConfig
from sparda_jax.tokenization import Tokenizer

LENGTH = 128
# Measured with this code, which agrees with independent JAX code on another text (15.8 for 1,024
# tokens of the tutorial, chapter on classes). With q and k rows as stored: about ten times as high.
PERPLEXITY = 24.4227
Logits = Callable[[list[int]], np.ndarray]


@pytest.fixture(scope="module")
def logits(default_checkpoint: GGUFCheckpoint) -> Logits:
    """Token ids -> logits [T, V], by one compiled program for up to LENGTH tokens."""
    config = ModelConfig.from_huggingface(default_checkpoint.config)
    model = assemble(config, default_checkpoint, dtype=jnp.float32)
    forward = jax.jit(lambda model, tokens: model(tokens)[0])

    def run(ids: list[int]) -> np.ndarray:
        tokens = np.zeros((1, LENGTH), np.int32)
        tokens[0, : len(ids)] = ids  # causal: what follows changes nothing
        return np.asarray(forward(model, jnp.asarray(tokens)))[: len(ids)]

    return run


@pytest.mark.smoke
def test_answers(logits: Logits, default_tokenizer: Tokenizer) -> None:
    question: list[dict[str, Any]] = [{"role": "user", "content": "What is the capital of France?"}]
    ids = default_tokenizer.encode_chat(question)
    answer: list[int] = []
    while len(answer) < 20 and not set(answer) & set(default_tokenizer.eos_token_ids):
        answer.append(int(logits(ids + answer)[-1].argmax()))
    assert default_tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.smoke
def test_perplexity_of_the_excerpt(logits: Logits, default_tokenizer: Tokenizer) -> None:
    ids = default_tokenizer.encode(load_excerpt()[:2000])[: LENGTH + 1]
    values = jax.nn.log_softmax(logits(ids[:-1]), axis=-1)
    taken = np.asarray(values)[np.arange(LENGTH), ids[1:]]
    assert np.exp(-taken.mean()) == pytest.approx(PERPLEXITY, rel=1e-3)
