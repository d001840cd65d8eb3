"""What RULER's texts are made of: words, noise, needles at given depths (spec/evaluation.md, 1)."""

from __future__ import annotations

import functools
import re
import uuid
from collections.abc import Callable, Sequence

import numpy as np

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
# What is no prose has few ends of sentences, so a piece has no more words than this either.
SENTENCE_WORDS = 25
SPLITTER = f"[.!?] before a blank and a capital or quote; at most {SENTENCE_WORDS} words"
_DEPTHS = np.linspace(0, 100, 40).round().astype(int)


@functools.cache
def word_list(kind: str) -> tuple[str, ...]:
    """Words of the package `wonderwords`.

    Args:
        kind: "ADJECTIVES", "NOUNS" or "VERBS".

    Raises:
        ImportError: the package is not installed.
    """
    try:
        from wonderwords import Defaults, RandomWord
    except ImportError as error:
        raise ImportError(
            "RULER's words need the package wonderwords: install the extra 'eval'"
        ) from error
    return tuple(RandomWord(words=Defaults[kind]).filter(include_categories=["words"]))


@functools.cache
def vocabulary() -> tuple[str, ...]:
    """All distinct words, sorted."""
    kinds = ("NOUNS", "ADJECTIVES", "VERBS")
    return tuple(sorted({word for kind in kinds for word in word_list(kind)}))


def draw_word(rng: np.random.Generator) -> str:
    """An adjective and a noun with a hyphen between them."""
    pair = (word_list("ADJECTIVES"), word_list("NOUNS"))
    return "-".join(words[int(rng.integers(len(words)))] for words in pair)


def draw_number(rng: np.random.Generator) -> str:
    """Seven digits."""
    return str(rng.integers(10**6, 10**7))


def draw_uuid(rng: np.random.Generator) -> str:
    """A version-4 UUID."""
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def draw_letters(rng: np.random.Generator, count: int, first: str) -> str:
    """`count` letters; `first` is "a" or "A"."""
    return "".join(chr(ord(first) + int(i)) for i in rng.integers(0, 26, count))


def distinct(draw: Callable[[], str], count: int) -> list[str]:
    """Draws until there are so many different ones."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw()] = None
    return list(found)


@functools.lru_cache(maxsize=8)
def essay_words(text: str) -> tuple[str, ...]:
    """A text's words.

    Raises:
        ValueError: it has none.
    """
    words = tuple(text.split())
    if not words:
        raise ValueError("a haystack is empty")
    return words


def essay(text: str, count: int) -> str:
    """The first `count` words of a text, from the start again where it ends."""
    words = essay_words(text)
    return " ".join((words * (count // len(words) + 1))[:count])


def sentences(text: str) -> list[str]:
    """See `SPLITTER`."""
    pieces = []
    for sentence in re.split(r"(?<=[.!?]) (?=[A-Z\"'])", text):
        words = sentence.split(" ")
        pieces += [
            " ".join(words[i : i + SENTENCE_WORDS]) for i in range(0, len(words), SENTENCE_WORDS)
        ]
    return pieces


def draw_depths(rng: np.random.Generator, count: int) -> list[int]:
    """Different depths in per cent, ascending."""
    return sorted(int(depth) for depth in rng.choice(_DEPTHS, count, replace=False))


def insert_at_depths(text: str, needles: Sequence[str], depths: Sequence[int]) -> str:
    """Needles between the sentences of a text: 0 before the first, 100 behind the last."""
    pieces = sentences(text)
    places = [int(len(pieces) * depth / 100) for depth in depths]
    parts, done = [], 0
    for place, needle in zip(places, needles, strict=True):
        parts += [*pieces[done:place], needle]
        done = place
    return " ".join([*parts, *pieces[done:]])


def insert_lines(
    lines: Sequence[str], needles: Sequence[str], rng: np.random.Generator
) -> tuple[str, list[int]]:
    """Needles, in their order, before different lines.

    Returns:
        The text, and each needle's depth in per cent of the lines.

    Raises:
        ValueError: fewer lines than needles.
    """
    if len(lines) < len(needles):
        raise ValueError(f"{len(needles)} needles do not fit between {len(lines)} lines")
    places = sorted(int(i) for i in rng.choice(len(lines), len(needles), replace=False))
    text = list(lines)
    for place, needle in reversed(list(zip(places, needles, strict=True))):
        text.insert(place, needle)
    return "\n".join(text), [round(100 * place / len(lines)) for place in places]
