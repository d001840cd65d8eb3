"""Needle retrieval in RULER's formats, scored without generating (spec/evaluation.md, sec. 1).

The prompts are our own wording of the published formats and the haystack is whatever text is given,
so the scores compare policies with one another, not with published ones. A value counts as found if
every one of its tokens is the likeliest after the true tokens before it: for the first value that
is what greedy decoding after the answer prefix does; for later ones it is greedy decoding after the
true earlier ones, in the order of the text. Beside `tasks/ruler.py`, which generates: here every
sample starts at another sentence of another text, and no lists of words are needed.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np

from sparda_jax.config import SparseConfig
from sparda_jax.evaluation.language import score_tokens
from sparda_jax.evaluation.policies import Policy, forward
from sparda_jax.evaluation.tasks import ruler_text
from sparda_jax.models.decoder import Decoder
from sparda_jax.tokenization import Tokenizer

Task = Literal["single", "multikey", "multivalue", "tracking"]
TASKS: tuple[Task, ...] = get_args(Task)

# Keys and values hidden; keys asked for are one.
_KEYS = {"single": 1, "multikey": 4, "multivalue": 1}
_VALUES = {"single": 1, "multikey": 1, "multivalue": 4}
_HOPS = 4
# Sentences of the haystack are dropped one by one until the prompt fits; this much is aimed at.
_FILL = 0.97

_ADJECTIVES = re.findall(
    r"\w+",
    "amber brave calm dusty eager faint gentle hollow icy jolly keen lively mellow noble odd pale "
    "quiet rapid silent tidy upper vivid warm young zesty bitter clever distant earnest frozen",
)
_NOUNS = re.findall(
    r"\w+",
    "anchor basket candle desert engine feather garden hammer island jacket kettle ladder meadow "
    "needle orchard pencil quarry river saddle tunnel umbrella valley window yard zipper bridge "
    "castle dragon forest guitar",
)


@dataclasses.dataclass(frozen=True)
class Sample:
    """One question about one text.

    Attributes:
        tokens: prompt and true answer.
        spans: `[start, stop)` of every value's tokens in `tokens`.
        depths: where in the haystack each needle stands, 0 to 1.
    """

    tokens: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    depths: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class _Quest:
    """What is hidden and asked: needle sentences, question, answer prefix, values, joints."""

    needles: tuple[str, ...]
    instruction: str
    question: str
    prefix: str
    values: tuple[str, ...]


def samples(
    task: Task,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    length: int,
    count: int,
    seed: int,
) -> list[Sample]:
    """Samples of a task, prompt and answer together at most `length` tokens.

    Args:
        task: see `TASKS`.
        tokenizer: of the model; its chat template wraps the prompt.
        texts: haystacks, taken in turn from a random sentence on.
        length: tokens.
        count: samples.
        seed: of everything drawn.

    Raises:
        ValueError: an unknown task; no haystack; a length that leaves no room for one.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}, expected one of {', '.join(TASKS)}")
    if not texts:
        raise ValueError("needles need at least one text to hide in")
    rng = np.random.default_rng((seed, TASKS.index(task), length))
    haystacks = [ruler_text.sentences(" ".join(text.split())) for text in texts]
    return [
        _sample(_quest(task, rng), tokenizer, haystacks[i % len(haystacks)], length, rng)
        for i in range(count)
    ]


def _quest(task: Task, rng: np.random.Generator) -> _Quest:
    if task == "tracking":
        return _tracking(rng)
    keys = [
        f"{_ADJECTIVES[i // len(_NOUNS)]}-{_NOUNS[i % len(_NOUNS)]}"
        for i in rng.choice(len(_ADJECTIVES) * len(_NOUNS), _KEYS[task], replace=False)
    ]
    numbers = rng.choice(9 * 10**6, (len(keys), _VALUES[task]), replace=False) + 10**6
    needles = [
        f"One of the special magic numbers for {key} is: {number}."
        for key, row in zip(keys, numbers, strict=True)
        for number in row
    ]
    key, values = keys[0], tuple(f" {number}" for number in numbers[0])
    many = len(values) > 1
    verb, plural = ("are", "s") if many else ("is", "")
    return _Quest(
        needles=tuple(needles),
        instruction="Some special magic numbers are hidden in the following text. Memorize them; "
        "I will ask you about them afterwards.",
        question=f"What {verb} {'all ' if many else ''}the special magic number{plural} for {key} "
        "mentioned in the text above?",
        prefix=f"The special magic number{plural} for {key} mentioned in the text {verb}:",
        values=values,
    )


def _tracking(rng: np.random.Generator) -> _Quest:
    names: list[str] = []
    while len(names) < _HOPS + 1:
        name = "".join(chr(65 + i) for i in rng.integers(0, 26, 5))
        if name not in names:
            names.append(name)
    value = int(rng.integers(10000, 99999))
    lines = [f"VAR {names[0]} = {value}."]
    lines += [f"VAR {b} = VAR {a}." for a, b in itertools.pairwise(names)]
    return _Quest(
        needles=tuple(lines),
        instruction="Memorize and track the chain of variable assignments hidden in the following "
        "text.",
        question=f"Find all variables that are assigned the value {value} in the text above.",
        prefix=f"In the text, {len(names)} variables are assigned the value {value}, they are:",
        values=tuple(f" {name}" for name in names),
    )


def _sample(
    quest: _Quest,
    tokenizer: Tokenizer,
    haystack: list[str],
    length: int,
    rng: np.random.Generator,
) -> Sample:
    """The largest haystack that fits, with the needles at random depths, in their order."""
    encode = partial(tokenizer.encode, add_special=False)
    joint = encode(",")
    values = [encode(value) for value in quest.values]
    answer = sum(map(len, values)) + len(joint) * (len(values) - 1)
    start = int(rng.integers(len(haystack)))
    depths = tuple(sorted(float(d) for d in rng.uniform(0, 1, len(quest.needles))))
    # Needles of one key keep their order; those of other keys are told apart by it anyway.
    order = quest.needles
    if len(quest.values) == 1:
        order = tuple(order[i] for i in rng.permutation(len(order)))
    prompt = lambda sentences: _prompt(quest, tokenizer, sentences, order, depths)
    empty = len(prompt([]))
    room = length - answer
    text: list[str] = []
    total = empty
    for i in range(10**6):
        sentence = haystack[(start + i) % len(haystack)]
        total += len(encode(" " + sentence))
        if total > room * _FILL and text:
            break
        text.append(sentence)
    while len(tokens := prompt(text)) > room:
        if not text:
            raise ValueError(f"{length} tokens leave no room: the question alone takes {empty}")
        text.pop()
    spans = []
    for i, value in enumerate(values):
        tokens = [*tokens, *(joint if i else []), *value]
        spans.append((len(tokens) - len(value), len(tokens)))
    return Sample(tuple(tokens), tuple(spans), depths)


def _prompt(
    quest: _Quest,
    tokenizer: Tokenizer,
    sentences: list[str],
    needles: Sequence[str],
    depths: Sequence[float],
) -> list[int]:
    """Chat tokens up to and with the answer prefix."""
    parts, places = [], [round(depth * len(sentences)) for depth in depths]
    for i in range(len(sentences) + 1):
        parts += [needle for needle, place in zip(needles, places, strict=True) if place == i]
        parts += sentences[i : i + 1]
    content = f"{quest.instruction}\n\n{' '.join(parts)}\n\n{quest.question}"
    chat = tokenizer.encode_chat([{"role": "user", "content": content}])
    return [*chat, *tokenizer.encode(quest.prefix, add_special=False)]


def found(
    model: Decoder,
    policy: Policy,
    batch: Sequence[Sample],
    length: int,
    sparse: SparseConfig,
    budgets: Sequence[int],
) -> tuple[np.ndarray, np.ndarray]:
    """Which values each sample's policy run finds, and how likely it holds them.

    Args:
        model: the decoder.
        policy: what to run.
        batch: samples of one task.
        length: tokens that samples are padded to.
        sparse: grid and forced blocks; its budget is at least the largest of `budgets`.
        budgets: blocks selected, forced ones included; all run side by side.

    Returns:
        `[len(budgets), len(batch)]` each: share of the values found, and mean log-probability of
        a value (summed over its tokens).
    """
    budgets = budgets if policy.layers else budgets[:1]
    rows = np.zeros((len(batch), length), np.int32)
    for row, sample in zip(rows, batch, strict=True):
        row[: len(sample.tokens)] = sample.tokens
    lengths = np.array([len(sample.tokens) for sample in batch], np.int32)
    # What predicts a token stands one before it.
    picked = [[i - 1 for span in sample.spans for i in range(*span)] for sample in batch]
    width = max(map(len, picked))
    at = np.array([row + [0] * (width - len(row)) for row in picked])
    tile = lambda array: jnp.asarray(np.concatenate([array] * len(budgets)))
    limits = jnp.asarray(np.repeat(np.asarray(budgets, np.int32), len(batch)))
    x = forward(model, policy, tile(rows), sparse, budgets=limits, lengths=tile(lengths))
    x = jnp.take_along_axis(x, tile(at)[:, :, None], axis=1)
    targets = tile(np.take_along_axis(rows, at + 1, axis=1))
    log_p, _, likeliest = (np.asarray(part) for part in score_tokens(model, x, x, targets))
    right, likely = [], []
    for line in range(len(log_p)):
        spans = batch[line % len(batch)].spans
        ends = np.cumsum([stop - start for start, stop in spans])
        pieces = [slice(end - (b - a), end) for end, (a, b) in zip(ends, spans, strict=True)]
        right.append(np.mean([likeliest[line, piece].all() for piece in pieces]))
        likely.append(np.mean([log_p[line, piece].sum() for piece in pieces]))
    shape = (len(budgets), len(batch))
    return np.reshape(right, shape), np.reshape(likely, shape)


def batches(items: Sequence[Sample], size: int) -> Iterator[Sequence[Sample]]:
    """The samples in groups of at most `size`, as equal as can be: few shapes to compile."""
    groups = -(-len(items) // size)
    for group in range(groups):
        yield items[len(items) * group // groups : len(items) * (group + 1) // groups]
