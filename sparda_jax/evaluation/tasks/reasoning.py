"""Mathematical reasoning: problems from files, the final answer of a solution, its equality.

spec/evaluation.md, sec. 4. Files: `math/<task>.jsonl` with `problem` (or `question`) and `answer`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from math import comb

from sparda_jax.evaluation.tasks.base import (
    Example,
    Scores,
    Sources,
    Task,
    chosen,
    read_rows,
)

_INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
_INTEGER = " The answer is an integer between 0 and 999."
_THOUGHT_END = re.compile(r"</think(?:ing)?>")
_THOUGHT = re.compile(r"<think(?:ing)?>.*?(?:</think(?:ing)?>|$)", re.DOTALL)


def last_boxed(text: str) -> str | None:
    """What the last closed box holds, braces matched by depth; None without one.

    A box that never closes, of an output that was cut off, holds no answer. A frame (`fbox`) counts
    only where there is no box.
    """
    for command in (r"\boxed", r"\fbox"):
        found = None
        for start in re.finditer(re.escape(command) + r"\s*\{", text):
            depth = 1
            for at in range(start.end(), len(text)):
                depth += {"{": 1, "}": -1}.get(text[at], 0)
                if not depth:
                    found = text[start.end() : at]
                    break
        if found is not None:
            return found
    return None


def visible(text: str) -> str:
    """What follows the thoughts; where nothing does, the text without them."""
    *thoughts, rest = _THOUGHT_END.split(text)
    if thoughts and rest.strip():
        return rest.strip()
    return _THOUGHT.sub("", text).strip()


def final_answer(text: str, *, integer: bool) -> tuple[str | None, str]:
    """The answer that a solution ends with, and where it was found.

    In this order: the last box behind the thoughts, the last box anywhere, the last line "final
    answer: ...", then the last integer that stands alone, or the last line.

    Args:
        text: the solution.
        integer: the answer is one, as in AIME.

    Returns:
        The answer, or None; "box", "box_in_thoughts", "line", "last_integer", "last_line", "none".
    """
    shown = visible(text)
    if (answer := last_boxed(shown)) is not None:
        return answer, "box"
    if (answer := last_boxed(text)) is not None:
        return answer, "box_in_thoughts"
    # An output that was cut off inside its box has not answered.
    if "\\boxed" in shown:
        return None, "none"
    lines = re.findall(r"final answer\s*:\s*(.+)", shown, re.IGNORECASE)
    if lines:
        return lines[-1].strip().rstrip("."), "line"
    if integer:
        numbers = re.findall(r"(?<![\w.\-])\d+(?![\w]|\.\d)", shown)
        return (numbers[-1], "last_integer") if numbers else (None, "none")
    rest = [line.strip() for line in shown.splitlines() if line.strip()]
    return (rest[-1], "last_line") if rest else (None, "none")


def exact(answer: str, reference: str) -> bool:
    """Whether both are the same without blanks, dollars, thin spaces and one pair of braces."""

    def bare(text: str) -> str:
        text = re.sub(r"\\,|[$\s]", "", text)
        return text[1:-1] if text.startswith("{") and text.endswith("}") else text

    return bare(answer) == bare(reference)


def same_integer(answer: str, reference: str) -> bool:
    """Whether both are integers, and the same one: 027 is 27."""
    try:
        return int(answer.strip().strip("$")) == int(reference)
    except ValueError:
        return False


def equivalent(answer: str, reference: str) -> bool:
    """Whether both mean the same, by `math-verify`.

    A number with a base is compared to a number with the same base only, which the library loses.

    Raises:
        ImportError: `math-verify` is not installed.
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ImportError("equality of formulas needs math-verify: install the extra 'eval'") from (
            error
        )
    if not answer.strip() or not reference.strip():
        return False
    bases = [re.findall(r"_\{?(?:\\text\{)?(\w+)", text) for text in (reference, answer)]
    if bases[0] and bases[0] != bases[1]:
        return False
    # Parsing the whole output would merge several boxes into a set.
    gold, ours = parse(f"${reference}$"), parse(f"$\\boxed{{{answer}}}$")
    return bool(verify(gold, ours))


def _examples(name: str, integer: bool, sources: Sources) -> list[Example]:
    examples = []
    rows = list(read_rows(sources, f"math/{name}.jsonl", ("answer",)))
    for number, row in chosen(sources, name, rows):
        problem = row.get("problem", row.get("question"))
        if not problem:
            raise ValueError(f"math/{name}.jsonl, row {number}: no field 'problem' or 'question'")
        if not (answer := str(row["answer"]).strip()):
            raise ValueError(f"math/{name}.jsonl, row {number}: 'answer' is empty")
        if integer and not (answer.isdigit() and int(answer) <= 999):
            raise ValueError(
                f"math/{name}.jsonl, row {number}: answer {answer!r}, expected 0 to 999"
            )
        examples.append(
            Example(
                id=str(number),
                prompt=f"{_INSTRUCTION}{_INTEGER if integer else ''}\n\n{problem}",
                references=(answer,),
                max_new_tokens=8192,
            )
        )
    return examples


def _score(integer: bool, example: Example, text: str) -> Scores:
    answer, where = final_answer(text, integer=integer)
    (reference,) = example.references
    if integer:
        right = answer is not None and same_integer(answer, reference)
        scores = {"accuracy": float(right)}
    else:
        scores = {
            "equivalent": float(answer is not None and equivalent(answer, reference)),
            "exact": float(answer is not None and exact(answer, reference)),
        }
    return scores | {"answered": float(answer is not None), "boxed": float(where == "box")}


def pass_at(samples: int, right: int, k: int) -> float:
    """Chance that one of k of the samples is right: 1 - C(n - c, k) / C(n, k).

    Raises:
        ValueError: k is not in 1 .. samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples")
    return 1 - comb(samples - right, k) / comb(samples, k)


def majority(answers: Sequence[str | None]) -> str | None:
    """The answer given most often, of several the first; None where none was given."""
    given = Counter(answer for answer in answers if answer is not None)
    return given.most_common(1)[0][0] if given else None


def _task(name: str, integer: bool) -> Task:
    return Task(
        name, ("math",), partial(_examples, name, integer), partial(_score, integer), binary=True
    )


TASKS = {
    name: _task(name, integer)
    for name, integer in (("math500", False), ("aime24", True), ("aime25", True))
}
