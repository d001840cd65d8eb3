"""HELMET-style rows become prompts, and answers are parsed and scored as published."""

import json

import pytest

from sparda_jax.evaluation.tasks import helmet
from sparda_jax.evaluation.tasks.base import Example, Sources, encode

LENGTH = 8192
DOCS = [{"title": f"T{i}", "text": f"Text of document {i}."} for i in range(3)]
RANKED = [{"id": str(i), "text": f"Passage {i}.", "label": i} for i in range(3)]
KILT = {"question": "Who?", "answers": ["Ann", "Annie"], "ctxs": DOCS}
MARCO = {"qid": 7, "query": "cats", "ctxs": RANKED}
NEEDLE = {
    "context": "One of them",
    "query": "k",
    "type_needle_v": "numbers",
    "answer": ["12", "34"],
}
FILES = {
    "ruler/niah_multivalue/validation_8192.jsonl": [NEEDLE],
    "json_kv/test_k105_dep6.jsonl": [
        {"context": '{"a": "1"}', "question": "a", "answer": "1", "demos": [["x", "y"], ["z", "w"]]}
    ],
    "kilt/nq-dev-multikilt_1000_k50_dep6.jsonl": [KILT, KILT],
    "kilt/nq-train-multikilt_1000_k3_dep6.jsonl": [
        KILT | {"question": f"demo {i}", "answers": [f"a{i}"]} for i in range(4)
    ],
    "kilt/popqa_test_1000_k50_dep6.jsonl": [KILT | {"s_pop": 10}, KILT | {"s_pop": 10**6}],
    "kilt/popqa_test_1000_k3_dep6.jsonl": [KILT, KILT | {"question": "other"}],
    "msmarco/test_reranking_data_k50_dep3.jsonl": [MARCO],
    "msmarco/test_reranking_data_k10_dep3.jsonl": [MARCO | {"qid": i} for i in (8, 9)],
    "icl/trec_coarse/train.jsonl": [{"text": f"t{i}", "label": i % 6} for i in range(18)],
    "icl/trec_coarse/test.jsonl": [{"text": f"q{i}", "label": i % 6} for i in range(12)],
    "infbench_choice.jsonl": [
        {"id": 1, "context": "A story.", "input": "Who?", "answer": ["Ann"],
         "options": ["Bob", "Ann", "Cid", "Dan"]}
    ],
    "alce/asqa_eval_gtr_top2000.json": [
        {"question": "Who?", "docs": DOCS, "qa_pairs": [{"short_answers": ["Ann"]},
                                                        {"short_answers": ["Bob", "Rob"]}]}
    ],
    "alce/asqa_default.json": {"demos": [{"question": "d", "docs": DOCS, "answer": "See [1]."}]},
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, rows in FILES.items():
        path = folder / "helmet" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.suffix == ".json"
        path.write_text(json.dumps(rows) if whole else "\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(scope="module")
def make(data, default_tokenizer):
    def examples(name, samples=None, length=LENGTH):
        sources = Sources(default_tokenizer, length, samples, 42, data=data)
        return helmet.TASKS[name].examples(sources)

    return examples


def scores(name, example, text):
    return helmet.TASKS[name].score(example, text)


def test_needles(make):
    (example,) = make("helmet_niah_mv")
    assert example.prompt.endswith(
        "The special magic numbers for k mentioned in the provided text are"
    )
    assert scores("helmet_niah_mv", example, " 12 and 35") == {"recall": 0.5}


def test_passages(make):
    first, second = make("kilt_nq")
    assert first.cluster == second.cluster == "Who?" and first.stop == ("\n",)
    assert (
        first.prompt.count("Document (Title: T0): Text of document 0.") == 3
    )  # two demonstrations
    assert first.prompt.count("Question: demo") == 2 and first.prompt.endswith(
        "Question: Who?\nAnswer:"
    )
    assert first.prompt == make("kilt_nq")[0].prompt
    assert scores("kilt_nq", first, " It was Annie!")["substring_match"] == 1
    assert scores("kilt_nq", first, " Ann")["exact_match"] == 1
    (popular,) = make("kilt_popqa")  # the one that few read of; not its own demonstration
    assert popular.prompt.count("Question: Who?") == 1


def test_pairs(make):
    (example,) = make("json_kv")
    order = [example.prompt.index(part) for part in ('{"a"', "Extract", "Key: x", "Key: a")]
    assert order == sorted(order) and example.prompt.endswith("Corresponding value:")


def test_ranking(make):
    (example,) = make("msmarco_rerank")
    assert "Ranking: 2 > 1 > 0" in example.prompt and example.prompt.endswith(
        "Query: cats\nRanking:"
    )
    assert scores("msmarco_rerank", example, " 2 > 1 > 0")["ndcg@10"] == pytest.approx(1)
    assert scores("msmarco_rerank", example, " 0 > 1 > 2")["mrr"] == 0.5


def test_labels(make):
    drawn = make("icl_trec_coarse", samples=6)
    assert len(drawn) == 6 and len({e.references for e in drawn}) > 1
    example = drawn[0]
    assert example.prompt.count("label: ") >= 400 and example.prompt.endswith("label:")
    (right,) = example.references
    assert scores("icl_trec_coarse", example, f" {right}\n\nnext")["exact_match"] == 1
    assert scores("icl_trec_coarse", example, f" {right} or 9")["exact_match"] == 0


def test_options(make):
    (example,) = make("infbench_choice")
    assert "B. Ann" in example.prompt and example.chat and not example.prompt.endswith("Answer:")
    for text, right in [("B", 1), ("Answer: B", 1), ("b. ann, I think", 1), ("A", 0), ("Ann", 0)]:
        assert scores("infbench_choice", example, text) == {"exact_match": right}, text


def test_citations(make):
    (example,) = make("alce_asqa")
    found = scores("alce_asqa", example, "Ann was there [1]. So was\nRob [2][9].")
    assert found["str_em"] == 1 and found["cite_coverage"] == 1
    assert found["cite_valid"] == pytest.approx(2 / 3) and found["cite_string_support"] == 0
    assert helmet.plain("a [1]\nb [2][3].") == "a b."


def test_a_long_context_is_cut_at_its_end(data, default_tokenizer):
    path = data / "helmet/ruler/niah_multikey_2/validation_8192.jsonl"
    path.parent.mkdir(exist_ok=True)
    text = " ".join(f"word{i}" for i in range(4000))
    path.write_text(json.dumps(NEEDLE | {"context": text, "answer": "12"}))
    sources = Sources(default_tokenizer, LENGTH, None, 42, data=data)
    (example,) = helmet.TASKS["helmet_niah_mk_2"].examples(sources)
    assert 0 <= LENGTH - len(encode(example, default_tokenizer, chat=True)) - 50 <= 2
    assert (
        example.more["cut"] > 0 and " word1 " in example.prompt and "word3999" not in example.prompt
    )
    assert example.prompt.endswith("mentioned in the provided text is")


def test_other_lengths_and_answers_that_are_no_option(make):
    with pytest.raises(
        ValueError, match="made for 8192, 16384, 32768, 65536, 131072 tokens, not 9"
    ):
        make("json_kv", length=9)
    odd = Example("0", "", ("Eve",), 1, more={"options": list("wxyz"), "lead_in": "Answer:"})
    with pytest.raises(ValueError, match="not one of the four options"):
        scores("infbench_choice", odd, "A")
