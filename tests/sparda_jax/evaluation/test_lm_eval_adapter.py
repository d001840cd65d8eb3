"""The harness's requests against a direct forward, and tiny local tasks from end to end."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

lm_eval = pytest.importorskip("lm_eval", reason="the extra 'eval' is not installed")

from sparda_jax.config import EngineConfig  # noqa: E402
from sparda_jax.engine.generate import Engine  # noqa: E402
from sparda_jax.evaluation.lm_eval_adapter import SpardaLM  # noqa: E402
from tests.sparda_jax.evaluation.harness import (  # noqa: E402
    END,
    TEMPLATE,
    letters,
    local_tasks,
    requests,
)


@pytest.fixture(scope="module")
def tokenizer():
    return letters()


@pytest.fixture(scope="module")
def make(tiny, tokenizer):
    engines = {}

    def adapter(mode="dense", batch_size=3, **settings):
        if mode not in engines:
            config = EngineConfig(mode=mode, length_step=128, prefill_chunk=128, steps_per_call=4)
            engines[mode] = Engine(tiny.model, sparse=tiny.sparse, config=config)
        return SpardaLM(
            engine=engines[mode], tokenizer=tokenizer, batch_size=batch_size, **settings
        )

    return adapter


PAIRS = [("the cat", " sat."), ("", "hello"), ("a dog ", "runs"), ("b" * 60, "ye"), ("one", ".")]


@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_loglikelihood(make, tiny, tokenizer, mode):
    model = make(mode)
    found = model.loglikelihood(requests("loglikelihood", *PAIRS), disable_tqdm=True)
    alone = found
    if mode == "dense":  # and not a question of how many run together
        alone = make(batch_size=1).loglikelihood(requests("loglikelihood", *PAIRS), True)
    sparse = None if mode == "dense" else tiny.sparse
    forward = jax.jit(lambda tokens: jax.nn.log_softmax(tiny.model(tokens, sparse=sparse)))
    for (context, continuation), (log_p, greedy), (other, _) in zip(
        PAIRS, found, alone, strict=True
    ):
        ids = tokenizer.encode(context + continuation)
        ids = ids if context else [END, *ids]
        size = len(tokenizer.encode(context.rstrip() + continuation)) - len(context.rstrip())
        size += len(context) - len(context.rstrip())  # blanks belong to the continuation
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(ids)] = ids
        rows = np.asarray(forward(padded))[0, len(ids) - size - 1 : len(ids) - 1]
        targets = ids[-size:]
        assert log_p == pytest.approx(rows[np.arange(size), targets].sum(), abs=1e-4)
        assert greedy == (rows.argmax(-1) == targets).all()
        assert other == pytest.approx(log_p, abs=1e-4)


def test_the_context_is_cut_and_the_continuation_never(make, tiny):
    model = make()
    assert model.max_length == tiny.config.max_position_embeddings - 1 == 127
    ids = list(np.random.default_rng(1).integers(1, 40, 150))
    cut, whole = model._loglikelihood_tokens([(None, ids[:140], ids[140:])] * 2)
    (same,) = model._loglikelihood_tokens([(None, ids[22:140], ids[140:])])
    assert cut == whole == pytest.approx(same, abs=1e-5)
    with pytest.raises(ValueError, match="request 0 has 150 tokens, expected 1 to 127"):
        model._loglikelihood_tokens([(None, [1], ids)])


def test_rolling(make, tokenizer):
    """Every token once: in one window the sum of a log-likelihood after the end token."""
    model = make()
    text = "the cat sat on a mat. " * 10  # 220 tokens, two windows
    short, long = model.loglikelihood_rolling(requests("loglikelihood_rolling", ("cats",), (text,)))
    ((expected, _),) = model.loglikelihood(requests("loglikelihood", ("", "cats")), True)
    assert short == pytest.approx(expected, abs=1e-4)
    ids = tokenizer.encode(text)
    parts = [(None, [END], ids[:127]), (None, ids[92:127], ids[127:])]
    assert long == pytest.approx(sum(p for p, _ in model._loglikelihood_tokens(parts)), abs=1e-3)


def test_generate_until(make):
    model, limit = make(), {"max_gen_toks": 12}
    asked = [("the cat", limit), ("a", limit), ("dogs run", limit), ("b" * 30, limit)]
    free = model.generate_until(requests("generate_until", *asked))
    assert free == model.generate_until(requests("generate_until", *asked))
    assert free[3] != free[0] and all(0 < len(text) <= 12 for text in free)
    wild = {**limit, "do_sample": True, "temperature": 1e4}
    one, two = model.generate_until(requests("generate_until", *[("the cat", wild)] * 2))
    assert one != two and free[0] not in (one, two)
    stop = one[4:6]
    (cut,) = model.generate_until(requests("generate_until", ("the cat", {**wild, "until": stop})))
    assert cut == one.split(stop)[0]
    with pytest.raises(NotImplementedError, match="generation setting num_beams=4, known are"):
        model.generate_until(requests("generate_until", ("a", {"num_beams": 4})))
    long = requests("generate_until", ("the cat" * 20, limit))
    with pytest.raises(ValueError, match="140 tokens and asks for 12 more: 152 exceed the limit"):
        model.generate_until(long)
    assert len(make(allow_truncation=True).generate_until(long)) == 1


def test_chat_and_settings(make, tiny, tokenizer):
    model = make()
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "it is"}]
    assert model.apply_chat_template(turns[:1]) == "<user>hi<reply>"
    assert model.apply_chat_template(turns, add_generation_prompt=False) == "<user>hi<reply>it is"
    assert model.chat_template(True) == TEMPLATE and len(model.tokenizer_name) == 16
    with pytest.raises(NotImplementedError, match="batch_size 'auto'"):
        make(batch_size="auto")
    with pytest.raises(NotImplementedError, match="device 'tpu'"):
        make(device="tpu")
    with pytest.raises(ValueError, match="an engine comes with its tokenizer"):
        SpardaLM(engine=SimpleNamespace())


def test_local_tasks_from_end_to_end(make, tmp_path, monkeypatch):
    from lm_eval.tasks import TaskManager

    rows = [{"q": "the cat", "choices": ["sat", "ran"], "gold": 0},
            {"q": "a dog", "choices": ["sat", "ran"], "gold": 1}]  # fmt: skip
    shared, choose, say = local_tasks(rows, tmp_path, monkeypatch)
    read = {"task": "read", "output_type": "loglikelihood_rolling", "doc_to_text": "",
            "doc_to_target": "{{q}}", "metric_list": [{"metric": "bits_per_byte"}]}  # fmt: skip
    model = make()
    found = lm_eval.simple_evaluate(
        model=model, tasks=[choose, say, shared | read], bootstrap_iters=0, log_samples=True,
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
    )  # fmt: skip
    assert found["results"]["choose"]["acc,none"] in (0, 0.5, 1)
    pairs = [(row["q"], " " + choice) for row in rows for choice in row["choices"]]
    scores = [p for p, _ in model.loglikelihood(requests("loglikelihood", *pairs), True)]
    right = [scores[0] > scores[1], scores[3] > scores[2]]
    assert found["results"]["choose"]["acc,none"] == np.mean(right)
    said = [sample["resps"][0][0] for sample in found["samples"]["say"]]
    limit = {"max_gen_toks": 12}
    assert said == model.generate_until(
        requests("generate_until", ("the cat", limit), ("a dog", limit))
    )
    bits = found["results"]["read"]["bits_per_byte,none"]
    texts = [(row["q"],) for row in rows]
    total = sum(model.loglikelihood_rolling(requests("loglikelihood_rolling", *texts)))
    assert bits == pytest.approx(-total / np.log(2) / sum(len(t) for (t,) in texts))
