"""The demo's claims about its own text: the answer stands where only selection finds it."""

import dataclasses
import json

import pytest

from scripts import decode
from sparda_jax import demo
from sparda_jax.assets import load_excerpt
from sparda_jax.config import SparseConfig


@pytest.fixture(scope="module")
def prompt_ids(default_tokenizer):
    text = demo.prompt_text(default_tokenizer)
    return default_tokenizer.encode_chat([{"role": "user", "content": text}])


def test_document_is_the_start_of_the_excerpt_cut_at_a_line(default_tokenizer):
    text = demo.document(default_tokenizer, demo.DEMO.document_tokens)
    excerpt = load_excerpt()
    assert excerpt.startswith(text + "\n")
    count = len(default_tokenizer.encode(text, add_special=False))
    assert 0.98 * demo.DEMO.document_tokens < count <= demo.DEMO.document_tokens
    short = demo.document(default_tokenizer, 300)
    assert text.startswith(short) and excerpt.startswith(short + "\n")


def test_question_follows_the_text(default_tokenizer, prompt_ids):
    text = demo.prompt_text(default_tokenizer)
    assert text.endswith(f"\n\n{demo.DEMO.question}")
    assert 5_800 < len(prompt_ids) < 6_200


def test_question_does_not_give_the_answer_away():
    assert not any(word in demo.DEMO.question for word in ("2", "3"))
    assert load_excerpt().count(demo.DEMO.question) == 0


def test_evidence_stands_once_outside_the_forced_blocks(default_tokenizer, prompt_ids):
    """Neither in the init block nor in the local ones of any new token."""
    text = demo.document(default_tokenizer, demo.DEMO.document_tokens)
    assert text.count(demo.DEMO.evidence) == 1
    position = demo.evidence_position(default_tokenizer)
    end = position + len(default_tokenizer.encode(demo.DEMO.evidence, add_special=False))
    rules = SparseConfig()
    size = rules.geometry.block_size
    # The chat template puts a system prompt before the document.
    shift = len(prompt_ids) - len(default_tokenizer.encode(demo.prompt_text(default_tokenizer)))
    assert position > rules.init_blocks * size
    assert end + shift < len(prompt_ids) - (rules.local_blocks + 1) * size
    # The budget binds: most of the text is not attended.
    assert rules.budget_tokens < len(prompt_ids) / 3


def test_evidence_position_is_that_of_the_text(default_tokenizer):
    position = demo.evidence_position(default_tokenizer)
    text = demo.document(default_tokenizer, demo.DEMO.document_tokens)
    ids = default_tokenizer.encode(text, add_special=False)
    assert demo.DEMO.evidence in default_tokenizer.decode(ids[position - 1 : position + 30])


def test_evidence_that_is_not_in_the_text(default_tokenizer):
    absent = dataclasses.replace(demo.DEMO, document_tokens=200)
    with pytest.raises(ValueError, match="the text does not say 'There are two"):
        demo.evidence_position(default_tokenizer, absent)


@pytest.mark.slow
def test_demo_answers_with_a_third_of_the_kv(default_model_path, capsys):
    """What `make decode` shows: minutes on two cores."""
    arguments = ["--model", str(default_model_path), "--json", "--forecast=default"]
    assert decode.main(arguments) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["mode"] == "sparda"
    result, report = output["results"][0], output["report"]
    assert all(words in result["text"] for words in demo.DEMO.answer)
    assert result["finish_reason"] == "stop"
    assert report["device_kv_bytes"] < report["full_kv_bytes"] / 3
    assert report["host_kv_bytes"] == report["full_kv_bytes"]
    assert 0.3 < report["hit_rate"] < 1
