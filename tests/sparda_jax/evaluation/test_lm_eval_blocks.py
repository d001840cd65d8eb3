"""A block-diffusion model in the harness: choices by bounds, answers, and what is refused."""

import pytest

lm_eval = pytest.importorskip("lm_eval", reason="the extra 'eval' is not installed")

from sparda_jax.diffusion.generate import BlockEngine  # noqa: E402
from sparda_jax.diffusion.plan import BlockEngineConfig  # noqa: E402
from sparda_jax.evaluation.lm_eval_blocks import BlockLM  # noqa: E402
from tests.sparda_jax.evaluation.harness import letters, local_tasks, requests  # noqa: E402


@pytest.fixture(scope="module")
def model(block_model):
    config = BlockEngineConfig(kv_block=16, prefill_chunk=32)
    return BlockLM(
        engine=BlockEngine(block_model(8), config=config),
        tokenizer=letters(),
        batch_size=2,
        draws=16,
        most_draws=32,
    )


def test_choices_and_answers(model, tmp_path, monkeypatch):
    rows = [{"q": "the cat", "choices": ["sat", "ran off"], "gold": 0},
            {"q": "a dog", "choices": ["sat", "ran off"], "gold": 1}]  # fmt: skip
    _, *tasks = local_tasks(rows, tmp_path, monkeypatch)
    found = lm_eval.simple_evaluate(model=model, tasks=tasks, bootstrap_iters=0, log_samples=True)
    pairs = [(row["q"], " " + choice) for row in rows for choice in row["choices"]]
    ids = [model._pair(*pair) for pair in pairs]
    few, more = ([b.value for b in model.scorer(ids, draws=draws)] for draws in (16, 32))
    said = [float(r[0][0]) for sample in found["samples"]["choose"] for r in sample["resps"]]
    for value, either in zip(said, zip(few, more, strict=True), strict=True):
        assert min(abs(value - bound) for bound in either) < 1e-3
    best = [said[0] > said[1], said[3] > said[2]]
    assert found["results"]["choose"]["acc,none"] == sum(best) / 2
    info = found["config"]
    assert info["loglikelihood"] == "mc_bound(16 to 32)" and info["documents_compared"] == 2
    assert 0 <= info["documents_undecided"] <= 2 and info["bound_standard_error"] > 0
    texts = [sample["resps"][0][0] for sample in found["samples"]["say"]]
    assert all(0 < len(text) <= 12 for text in texts) and info["denoising_steps"] > 0


def test_what_needs_exact_values_is_refused(model):
    with pytest.raises(NotImplementedError, match="one log-likelihood with no other to compare"):
        model.loglikelihood(requests("loglikelihood", ("the", " cat")), True)
    both = requests("loglikelihood", ("the", " cat"), ("", " cat"), document=0)
    with pytest.raises(NotImplementedError, match="acc_mutual_info takes the difference of two"):
        model.loglikelihood(both, True)
    with pytest.raises(NotImplementedError, match="perplexities need exact log-likelihoods"):
        model.loglikelihood_rolling(requests("loglikelihood_rolling", ("the cat",)))
    with pytest.raises(NotImplementedError, match="generation setting num_return_sequences=2"):
        model.generate_until(requests("generate_until", ("a", {"num_return_sequences": 2})))
