"""What `scripts/decode.py` does without arguments: a question about a long text that ships."""

from __future__ import annotations

import dataclasses

from sparda_jax.assets import load_excerpt
from sparda_jax.tokenization import Tokenizer


@dataclasses.dataclass(frozen=True)
class Demo:
    """A question whose answer stands in a text.

    Attributes:
      document_tokens: how much of the excerpt is read.
      question: put after the text.
      evidence: the sentence of the text that answers it.
      answer: words that a right answer holds.
    """

    document_tokens: int
    question: str
    evidence: str
    answer: tuple[str, ...]


# Chosen because sparda answers it and stops: so small a model does not find everything. Of eight
# wordings tried on both, sparda answers this one cleanly and dense attention two others.
DEMO = Demo(
    document_tokens=5900,
    question="Which two production-ready versions of Python are there? Answer in one line.",
    evidence="There are two production-ready versions\nof Python: 2.x and 3.x.",
    answer=("Python 2.x", "Python 3"),
)


def document(tokenizer: Tokenizer, tokens: int) -> str:
    """The first lines of the excerpt, at most ``tokens`` tokens, cut at a line's end."""
    ids = tokenizer.encode(load_excerpt(), add_special=False)[:tokens]
    text = tokenizer.decode(ids)
    return text[: text.rindex("\n")]


def prompt_text(tokenizer: Tokenizer, demo: Demo = DEMO) -> str:
    """Text, then question."""
    return f"{document(tokenizer, demo.document_tokens)}\n\n{demo.question}"


def evidence_position(tokenizer: Tokenizer, demo: Demo = DEMO) -> int:
    """Token of the document at which the sentence that answers begins.

    Raises:
      ValueError: it does not stand in the document.
    """
    before, found, _ = document(tokenizer, demo.document_tokens).partition(demo.evidence)
    if not found:
        raise ValueError(f"the text does not say {demo.evidence!r}")
    return len(tokenizer.encode(before, add_special=False))
