"""Answers end where a text or token ends them, whatever way they are generated."""

from types import SimpleNamespace

import pytest

from sparda_jax.config import SamplingParams
from sparda_jax.diffusion.generate import Block
from sparda_jax.evaluation.generation import BlockAnswerer, EngineAnswerer


class Generation:
    """Hands out what a script says; `cancel` ends a row as the engines do."""

    def __init__(self, tokens, width, reasons):
        self.tokens, self.width, self.reasons, self.cancelled = tokens, width, reasons, []
        report = {"decode_tokens": 7, "steps": {"2": 3} if width > 1 else 5, "free_blocks": 1}
        names = ("prefill_tokens", "prefill_seconds", "decode_seconds", "hit_blocks",
                 "fetched_runs", "cold_runs", "written_back_runs")  # fmt: skip
        report |= dict.fromkeys(names, 0)
        self.report, self.errors = SimpleNamespace(as_dict=lambda: report), {}
        self.decoding = False

    def prefill(self, progress):
        progress(1, 1)

    def __iter__(self):
        self.decoding = True
        for start in range(0, max(map(len, self.tokens)), self.width):
            for row, tokens in enumerate(self.tokens):
                part = tokens[start : start + self.width]
                if part and row not in self.cancelled:
                    yield (row, part[0]) if self.width == 1 else Block(row, part, 2)

    def cancel(self, row, reason="cancelled"):
        self.cancelled.append(row)

    def results(self):
        return [SimpleNamespace(finish_reason=reason) for reason in self.reasons]


@pytest.mark.parametrize("width", [1, 4])
def test_answers(default_tokenizer, width):
    encode = lambda text: default_tokenizer.encode(text, add_special=False)
    (end,) = default_tokenizer.encode("<|im_end|>", add_special=False)
    said = [
        encode("one two\nthree four five six"),
        [*encode("yes"), end, *encode("no")],
        encode("a b c"),
    ]
    generation = Generation(said, width, ["length"] * 3)
    asked = []

    def prepare(prompts, requests, *rest):
        asked.extend(requests)
        return generation

    make = EngineAnswerer if width == 1 else BlockAnswerer
    checks = []
    check = lambda: checks.append(generation.decoding)
    answer = make(SimpleNamespace(prepare=prepare), default_tokenizer, check=check)
    requests = [SamplingParams(stop_token_ids=(5,))] * 3
    found, counters = answer([[1]] * 3, requests, [("o\nth", "zzz"), (), ("b c d", "")])
    assert [(a.text, a.finish) for a in found] == [
        ("one tw", "stop"),  # a text that several tokens spell
        ("yes", "eos"),
        ("a b c", "length"),
    ]
    assert generation.cancelled == [0] and found[1].tokens == 2
    assert counters["decode_tokens"] == 7 and counters["steps"] == (5 if width == 1 else 6)
    assert all(set(r.stop_token_ids) == {5, *default_tokenizer.eos_token_ids} for r in asked)
    assert checks[:2] == [False, True]  # while prompts run, then for whatever comes
    generation.reasons[1] = "failed"
    with pytest.raises(FloatingPointError, match="prompt 1 of the batch failed"):
        answer([[1]] * 3, requests, [()] * 3)
    if width > 1:
        generation.errors[1] = "OSError: the worker died"
        with pytest.raises(FloatingPointError, match="failed: OSError: the worker died"):
            answer([[1]] * 3, requests, [()] * 3)
