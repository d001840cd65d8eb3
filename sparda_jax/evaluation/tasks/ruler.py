"""RULER's synthetic tasks, made from local text at any length (spec/evaluation.md, sec. 1).

The formats are the published ones, the instructions our own wording and the essays whatever text is
given: scores compare models and modes with one another, not with published tables.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from sparda_jax.evaluation.tasks import ruler_text as text
from sparda_jax.evaluation.tasks.base import Example, Scores, Sources, Task, generator
from sparda_jax.evaluation.tasks.metrics import match_all

# At least this share of the length is filled: below and above 4096 tokens.
_FILLED = (0.8, 0.9)
_SHORT = 4096  # below it the source takes smaller steps and frequencies


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A question of some size, not yet known to fit."""

    prompt: str
    prefix: str
    references: list[str]
    more: dict[str, Any]


# Makes a question of a size; the same generator state gives the same question, longer or shorter.
Make = Callable[[int, np.random.Generator], Drawn]


@dataclasses.dataclass(frozen=True)
class Fit:
    """How questions are brought to a length.

    Attributes:
        task: name.
        new_tokens: of the answer.
        step: size of the first try.
        least: smallest size that is a question at all.
        most: largest one that there is; None: there is no end.
        filled: too short a sample is an error; not where the text is the user's and may end.
    """

    task: str
    new_tokens: int
    step: int
    least: int = 1
    most: int | None = None
    filled: bool = True

    def examples(self, make: Make, sources: Sources) -> list[Example]:
        """As many questions as `sources` asks for, each as long as fits.

        Raises:
            ValueError: no length or count, or a length that leaves no room.
        """
        if not sources.samples or sources.samples < 0:
            raise ValueError(f"{self.task} is made, not read: samples {sources.samples} of it")
        stream = lambda index: generator(sources.seed, self.task, sources.length, index)
        small, large = (
            self._tokens(make(size, stream("size")), sources) for size in (self.step, 2 * self.step)
        )
        unit = max((large - small) / self.step, 0.1)
        size = self._largest(make, sources, unit, stream("size"))
        return [
            self._one(make, sources, index, size, unit, stream) for index in range(sources.samples)
        ]

    def _example(self, drawn: Drawn, index: int, more: dict[str, Any]) -> Example:
        return Example(
            id=str(index),
            prompt=drawn.prompt,
            prefix=drawn.prefix,
            references=tuple(drawn.references),
            max_new_tokens=self.new_tokens,
            more=drawn.more | more,
        )

    def _tokens(self, drawn: Drawn, sources: Sources) -> int:
        """Tokens of prompt, template and answer together."""
        return len(sources.encode(self._example(drawn, 0, {}))) + self.new_tokens

    def _largest(self, make: Make, sources: Sources, unit: float, rng: np.random.Generator) -> int:
        """The largest size of which one sample fits."""
        state = rng.bit_generator.state
        low = self.least
        high = max(int(3 * sources.length / unit), 2 * self.step, low + 1)
        high = high if self.most is None else min(high, self.most + 1)
        while low + 1 < high:
            rng.bit_generator.state = state
            middle = (low + high) // 2
            if self._tokens(make(middle, rng), sources) <= sources.length:
                low = middle
            else:
                high = middle
        return low

    def _one(
        self,
        make: Make,
        sources: Sources,
        index: int,
        size: int,
        unit: float,
        stream: Callable[[object], np.random.Generator],
    ) -> Example:
        length = sources.length
        while (total := self._tokens(drawn := make(size, stream(index)), sources)) > length:
            if size <= self.least:
                raise ValueError(
                    f"{self.task}: {length} tokens leave no room, the shortest sample has {total}"
                )
            size = max(self.least, size - max(1, math.ceil((total - length) / unit)))
        if self.filled and total < _FILLED[length > _SHORT] * length:
            raise ValueError(f"{self.task}: a sample fills {total} of {length} tokens")
        return self._example(drawn, index, {"tokens": total})


# Needles


@dataclasses.dataclass(frozen=True)
class Needles:
    """A needle-in-a-haystack task.

    Attributes:
        haystack: "noise", "essay" or "needle" (distractors).
        keys: "words" or "uuids".
        values: "numbers" or "uuids".
        hidden: keys in the text.
        per_key: values of each.
        asked: keys asked for.
    """

    haystack: str
    keys: str = "words"
    values: str = "numbers"
    hidden: int = 1
    per_key: int = 1
    asked: int = 1

    @property
    def step(self) -> int:
        """Size of the first try: words, or lines."""
        return 500 if self.haystack == "essay" else 25

    def make(self, size: int, rng: np.random.Generator, *, sources: Sources, task: str) -> Drawn:
        """A question over `size` words or lines."""
        draws = {"words": text.draw_word, "numbers": text.draw_number, "uuids": text.draw_uuid}
        key, value = draws[self.keys], draws[self.values]
        sentence = f"One of the special magic {self.values} for {{}} is: {{}}."
        keys = text.distinct(lambda: key(rng), self.hidden)
        drawn = text.distinct(lambda: value(rng), self.hidden * self.per_key)
        rows = [drawn[i : i + self.per_key] for i in range(0, len(drawn), self.per_key)]
        needles = [sentence.format(k, v) for k, row in zip(keys, rows, strict=True) for v in row]
        # The same permutation for every sample, as published.
        order = generator(sources.seed, task, "order").permutation(len(needles))
        needles = [needles[i] for i in order]
        asked = [int(i) for i in rng.choice(self.hidden, self.asked, replace=False)]
        if self.haystack == "essay":
            depths = text.draw_depths(rng, len(needles))
            if not sources.texts:
                raise ValueError(f"{task} hides needles in an essay, but no text was given")
            source = sources.texts[int(rng.integers(len(sources.texts)))]
            context = text.insert_at_depths(text.essay(source, size), needles, depths)
        else:
            distractor = lambda: sentence.format(key(rng), value(rng))
            noise = self.haystack == "noise"
            lines = [text.NOISE] * size if noise else text.distinct(distractor, size)
            context, depths = text.insert_lines(lines, needles, rng)
        answers = [v for i in asked for v in rows[i]]
        return self._question(context, [keys[i] for i in asked], answers, depths)

    def _question(
        self, context: str, keys: list[str], answers: list[str], depths: list[int]
    ) -> Drawn:
        query = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"
        kind = self.values if len(answers) > 1 else self.values[:-1]
        if len(answers) > 1:
            some, every = f"Some special magic {kind} are", "What are all"
            prefix = f" The special magic {kind} for {query} mentioned in the provided text are"
        else:
            some, every = f"A special magic {kind} is", "What is"
            prefix = f" The special magic {kind} for {query} mentioned in the provided text is"
        prompt = (
            f"{some} hidden in the following text. Memorise what you read: I will quiz you about "
            f"the {kind} afterwards.\n{context}\n{every} the special magic {kind} for {query} "
            "mentioned in the provided text?"
        )
        place = prompt.index(f" is: {answers[0]}.")
        more = {"depths": depths, "answer_at": round(place / len(prompt), 4)}
        return Drawn(prompt, prefix, answers, more)


def _needles(task: str, needles: Needles, sources: Sources) -> list[Example]:
    fit = Fit(task, 128, needles.step, least=max(2, needles.hidden * needles.per_key))
    return fit.examples(partial(needles.make, sources=sources, task=task), sources)


# Variable tracking

_HOPS = 4


def _tracking(size: int, rng: np.random.Generator, letters: int, value: str) -> Drawn:
    names = text.distinct(lambda: text.draw_letters(rng, letters, "A"), _HOPS + 1)
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {name} = VAR {before}" for before, name in itertools.pairwise(names)]
    context, depths = text.insert_lines([text.NOISE] * size, chain, rng)
    prompt = (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        f"{context}\nQuestion: Find all variables that are assigned the value {value} in the text "
        "above."
    )
    prefix = (
        " Answer: According to the chain(s) of variable assignment in the text above, "
        f"{len(names)} variables are assigned the value {value}, they are: "
    )
    return Drawn(prompt, prefix, names, {"depths": depths})


def variable_tracking(sources: Sources) -> list[Example]:
    """vt: a chain of five variables in noise, after a worked example of some 500 tokens."""
    count = lambda drawn: len(sources.tokenizer.encode(_solved(drawn), add_special=False))
    shown = _HOPS + 1
    rng = lambda: generator(sources.seed, "vt", "shown")
    while count(_tracking(shown + 1, rng(), 3, "12345")) <= min(500, sources.length // 2):
        shown += 1

    def make(size: int, rng: np.random.Generator) -> Drawn:
        solved = _tracking(shown, rng, 3, str(rng.integers(10000, 99999)))
        drawn = _tracking(size, rng, 5, str(rng.integers(10000, 99999)))
        return dataclasses.replace(drawn, prompt=f"{_solved(solved)}\n{drawn.prompt}")

    return Fit("vt", 30, 10, least=_HOPS + 1).examples(make, sources)


def _solved(drawn: Drawn) -> str:
    return f"{drawn.prompt}{drawn.prefix}{' '.join(drawn.references)}\n"


# Aggregation

_COMMON = 10


def _word_list(
    size: int, rng: np.random.Generator, words: list[str], times: tuple[int, int]
) -> Drawn:
    common, other = times
    listed = [word for word in words[:_COMMON] for _ in range(common)]
    listed += [word for word in words[_COMMON:size] for _ in range(other)]
    numbered = (f"{n}. {listed[i]}" for n, i in enumerate(rng.permutation(len(listed)), 1))
    prompt = (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        f"Memorize the ones that appear most often.\n{' '.join(numbered)}\n"
        f"Question: What are the {_COMMON} most common words in the above list?"
    )
    prefix = f" Answer: The top {_COMMON} words that appear most often in the list are:"
    return Drawn(prompt, prefix, words[:_COMMON], {})


def common_words(sources: Sources) -> list[Example]:
    """cwe: ten words that come more often than the others, after a worked example."""
    short = sources.length < _SHORT
    times, shown, shown_times = ((6, 1), 20, (3, 1)) if short else ((30, 3), 40, (10, 3))
    known = text.vocabulary()

    def draw(size: int, rng: np.random.Generator, times: tuple[int, int]) -> Drawn:
        words = [known[i] for i in rng.choice(len(known), size, replace=False)]
        return _word_list(size, rng, words, times)

    def make(size: int, rng: np.random.Generator) -> Drawn:
        solved, drawn = draw(shown, rng, shown_times), draw(size, rng, times)
        answer = " ".join(f"{n}. {word}" for n, word in enumerate(solved.references, 1))
        prompt = f"{solved.prompt}{solved.prefix} {answer}\n{drawn.prompt}"
        return dataclasses.replace(drawn, prompt=prompt)

    return Fit("cwe", 120, 10, least=_COMMON + 1, most=len(known)).examples(make, sources)


_ALPHA, _ZETA = 2.0, math.pi**2 / 6


def frequent_words(sources: Sources) -> list[Example]:
    """fwe: coded words whose counts fall as 1 / rank^2; the commonest is shown as dots.

    The three that follow it are asked for. A size is a number of words.
    """
    budget = sources.length - 50
    kinds = max(4, budget // 50)

    def make(size: int, rng: np.random.Generator) -> Drawn:
        words = text.distinct(lambda: text.draw_letters(rng, 6, "a"), kinds)
        counts = [int(size * rank**-_ALPHA / _ZETA) for rank in range(1, kinds + 1)]
        shown = ["...", *words[1:]]
        every = [word for word, count in zip(shown, counts, strict=True) for _ in range(count)]
        coded = " ".join(every[i] for i in rng.permutation(len(every)))
        prompt = (
            "Read the following coded text and track the frequency of each coded word. Find the "
            f"three most frequently appeared coded words. {coded}\n"
            "Question: Do not provide any explanation. Please ignore the dots '....'. What are the "
            "three most frequently appeared words in the above coded text?"
        )
        prefix = (
            " Answer: According to the coded text above, the three most frequently appeared words "
            "are:"
        )
        return Drawn(prompt, prefix, words[1:4], {})

    # Fewer words and the third and fourth rank come equally often.
    return Fit("fwe", 50, max(60, budget // 6), least=60).examples(make, sources)


def _score(example: Example, answer: str) -> Scores:
    return {"string_match": match_all(clean(answer), example.references)}


def clean(answer: str) -> str:
    """Without blanks around it, control characters as line ends."""
    answer = answer.strip()
    return "".join("\n" if ord(c) < 32 else c for c in answer).strip()


NEEDLES = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", values="uuids"),
    "niah_multikey_1": Needles("essay", hidden=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", keys="uuids", values="uuids"),
    "niah_multivalue": Needles("essay", per_key=4),
    "niah_multiquery": Needles("essay", hidden=4, asked=4),
}
_MAKERS: dict[str, Callable[[Sources], list[Example]]] = {
    **{name: partial(_needles, name, needles) for name, needles in NEEDLES.items()},
    "vt": variable_tracking,
    "cwe": common_words,
    "fwe": frequent_words,
}
# One value to find: the score is 0 or 1.
_BINARY = {name for name, n in NEEDLES.items() if n.asked * n.per_key == 1}

_PARTS = {
    "niah_single": ("niah_single_1", "niah_single_2", "niah_single_3"),
    "niah_multikey": ("niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    "niah_other": ("niah_multivalue", "niah_multiquery"),
    "tracking": ("vt",),
    "aggregation": ("cwe", "fwe"),
}

TASKS = {
    name: Task(
        name, ("ruler", f"ruler/{part}"), _MAKERS[name], _score, binary=name in _BINARY, sized=True
    )
    for part, names in _PARTS.items()
    for name in names
}
