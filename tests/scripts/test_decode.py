"""`scripts/decode.py` on a tiny checkpoint: what it reads, what it prints, what it counts."""

import json
import re
import shutil
import signal

import pytest

from pallas_kernels.geometry import BlockGeometry
from scripts import decode
from sparda_jax import demo
from sparda_jax.checkpoints.load import load_pretrained
from sparda_jax.config import SparseConfig
from sparda_jax.engine import generate, prompts
from sparda_jax.evaluation.agreement import equal_share
from sparda_jax.forecast.files import save_forecast
from sparda_jax.forecast.projection import Forecast

from .conftest import CONFIG, SMALL, call

HEAD, QUESTION = "Blocks of keys wait on the host; " * 2, "and those a query asks for are fetched."
PROMPT = f"{HEAD}\n\n{QUESTION}"
OTHER = "a shorter prompt of the batch\fwith a form feed"
NEW_TOKENS = 24


def report_of(outcome):
    return outcome.json["report"]


@pytest.mark.smoke
def test_streamed_text_is_the_json_text(run):
    plain, parsed = run("--prompt", PROMPT), run("--prompt", PROMPT, "--json")
    assert (plain.code, parsed.code) == (0, 0)
    (result,) = parsed.json["results"]
    assert len(result["tokens"]) == NEW_TOKENS
    assert len(set(result["tokens"])) > 5
    assert result["finish_reason"] == "length"
    text, _, counters = plain.out.rpartition("\n\nprefill ")
    assert text == result["text"]
    assert len(counters.splitlines()) == 7
    assert parsed.err == ""
    assert not parsed.json["interrupted"]


def test_progress_of_prefill_is_shown(run, checkpoint):
    assert "1 x 107 tokens, sparse, KV host" in run("--prompt", PROMPT).err
    assert run("--prompt", PROMPT).err.endswith("prefill 100 %\n")
    terminal = call("--model", str(checkpoint), *SMALL, "--prompt", PROMPT, terminal=True)
    assert "\rprefill  50 %\r" in terminal.err
    assert terminal.err.endswith("\rprefill 100 %\n")


def test_a_longer_maximum_than_the_models_is_said(run, checkpoint, monkeypatch):
    """It is allowed: RoPE goes on. But nobody should meet the result unawares."""
    monkeypatch.setattr(decode, "stream", lambda *_, **__: False)
    longer = ("--prompt", PROMPT, "--max-length=70000")
    outcome = call("--model", str(checkpoint), *SMALL, *longer)
    assert "--max-length 70000 exceeds the 65536 tokens the model was made for" in outcome.err
    assert "made for" not in run("--prompt", PROMPT).err


@pytest.mark.smoke
@pytest.mark.parametrize("how", [["--offload=none"], ["--fetch=eager"], ["--offload=host"]])
def test_same_text_wherever_the_kv_lives(run, how):
    default = run("--prompt", PROMPT, "--json")
    other = run("--prompt", PROMPT, "--json", *how)
    assert other.tokens == default.tokens
    offloaded = how != ["--offload=none"]
    assert other.json["offload"] == ("host" if offloaded else "none")
    assert (report_of(other)["host_kv_bytes"] > 0) == offloaded
    assert (report_of(other)["fetched_runs"] > 0) == offloaded


def test_placement_is_printed(run):
    """The budget holds all layers, so nothing is offloaded, however the host would keep it."""
    outcome = run("--prompt", PROMPT, "--offload=auto", "--device-kv-gb=1", "--host-kv-dtype=int8")
    assert "KV of 2 of 2 layers stays on the device" in outcome.err
    assert "limit 1.00 GiB); predicted step" in outcome.err
    assert "KV on the host              0 B" in outcome.out


def test_counters(run):
    report = report_of(run("--prompt", PROMPT, "--json"))
    prompt = len(PROMPT)
    assert report["prefill_tokens"] == prompt
    # The first token is prefill's.
    assert report["decode_tokens"] == report["steps"] == NEW_TOKENS - 1
    assert report["context_tokens"] == prompt + NEW_TOKENS - 1
    run_bytes = 2 * 8 * CONFIG["head_dim"] * 4
    blocks = -(-(prompt + NEW_TOKENS) // 8)
    runs = CONFIG["num_hidden_layers"] * CONFIG["num_key_value_heads"]
    assert report["run_bytes"] == run_bytes
    assert report["full_kv_bytes"] == report["host_kv_bytes"] == blocks * runs * run_bytes
    assert report["device_kv_bytes"] < report["full_kv_bytes"]
    filled = (prompt + NEW_TOKENS - 1) // 8 - prompt // 8
    assert report["written_back_runs"] == filled * runs
    moved = report["fetched_runs"] + report["cold_runs"] + report["written_back_runs"]
    assert report["bytes_per_token"] == pytest.approx(moved * run_bytes / (NEW_TOKENS - 1))
    assert report["hit_rate"] == pytest.approx(1 - report["fetched_runs"] / report["free_blocks"])
    assert 0 < report["hit_rate"] < 1
    text = run("--prompt", PROMPT).out
    assert f"({prompt} tokens" in text
    assert f"({NEW_TOKENS - 1} tokens" in text
    assert re.search(rf"context +{prompt + NEW_TOKENS - 1} tokens", text)
    assert f"{100 * report['hit_rate']:.1f} %" in text


def test_dense_mode_keeps_everything_on_the_device(run):
    outcome = run("--prompt", PROMPT, "--json", "--mode=dense")
    report = report_of(outcome)
    assert (outcome.json["mode"], outcome.json["offload"]) == ("dense", "none")
    assert report["device_kv_bytes"] == report["full_kv_bytes"]
    assert report["host_kv_bytes"] == report["bytes_per_token"] == 0
    assert report["hit_rate"] is None
    assert outcome.tokens != run("--prompt", PROMPT, "--json").tokens


@pytest.fixture(scope="session")
def forecast(tmp_path_factory, checkpoint):
    """Forecast weights of the tiny checkpoint, for the blocks of `SMALL`."""
    model, _ = load_pretrained(checkpoint, dtype="float32")
    path = tmp_path_factory.mktemp("forecast") / "forecast.safetensors"
    rules = SparseConfig(BlockGeometry(8, 4, 2), local_blocks=2, budget_blocks=6)
    save_forecast(path, Forecast.random(model.config, seed=2), model, rules)
    return path


def test_forecast_weights_make_the_mode_sparda_and_bring_their_rules(run, checkpoint, forecast):
    named = run("--prompt", PROMPT, "--json", f"--forecast={forecast}")
    assert named.json["mode"] == "sparda"
    rules = [option for option in SMALL if not re.match("--(block|kernel|local|budget)", option)]
    arguments = ["--model", str(checkpoint), *rules, "--prompt", PROMPT, "--json"]
    own = call(*arguments, f"--forecast={forecast}")
    assert own.tokens == named.tokens
    assert own.tokens != run("--prompt", PROMPT, "--json").tokens
    resident = run("--prompt", PROMPT, "--json", f"--forecast={forecast}", "--offload=none")
    assert resident.tokens == own.tokens
    assert run("--prompt", PROMPT, "--json").json["mode"] == "sparse"


def test_infinigen_calibrates_itself(run):
    outcome = run("--prompt", PROMPT, "--json", "--mode=infinigen")
    assert (outcome.json["mode"], outcome.json["offload"]) == ("infinigen", "host")
    resident = run("--prompt", PROMPT, "--json", "--mode=infinigen", "--offload=none")
    assert resident.tokens == outcome.tokens != run("--prompt", PROMPT, "--json").tokens


def test_compare_dense(run):
    sparse = run("--prompt", PROMPT, "--json", "--compare-dense")
    dense = run("--prompt", PROMPT, "--json", "--mode=dense")
    share = equal_share([sparse.tokens], [dense.tokens])
    assert sparse.json["equal_to_dense"] == share < 1
    plain = run("--prompt", PROMPT, "--compare-dense")
    assert plain.out.endswith(f"equal to dense   {100 * share:9.1f} %       of greedy tokens\n")
    assert plain.err.count("prefill 100 %") == 2
    same = run("--prompt", PROMPT, "--json", "--compare-dense", "--mode=dense")
    assert same.json["equal_to_dense"] == 1
    assert run("--prompt", PROMPT, "--json").json["equal_to_dense"] is None


def test_sampling_is_reproducible_by_seed(run):
    def draw(*options):
        return run("--prompt", PROMPT, "--json", *options).tokens

    greedy, hot = draw(), draw("--temperature=2", "--seed=3")
    assert hot == draw("--seed=3", "--temperature=2.0")
    assert hot != draw("--temperature=2", "--seed=4")
    assert hot != greedy
    assert draw("--temperature=2", "--top-k=1") == greedy
    assert draw("--temperature=2", "--top-p=0.0001") == greedy
    compared = run("--prompt", PROMPT, "--temperature=2", "--compare-dense")
    assert compared.out.endswith("of tokens drawn with the same seed\n")


def test_prompt_file_comes_before_the_prompt(run, tmp_path):
    file = tmp_path / "document.txt"
    file.write_bytes(HEAD.encode("utf-8-sig"))
    both = run("--prompt-file", str(file), "--prompt", QUESTION, "--json")
    assert both.tokens == run("--prompt", PROMPT, "--json").tokens
    file.write_text(PROMPT)
    alone = run("--json", "--prompt-file", str(file))
    assert alone.tokens == both.tokens


def test_chat_wraps_the_prompt(run):
    text = PROMPT[:-2]  # as many tokens with the template's two
    chat = run("--prompt", text, "--json", "--chat")
    assert chat.json["results"][0]["prompt_tokens"] == len(PROMPT)
    assert chat.tokens == run("--prompt", f"<|user|>{text}<|assistant|>", "--json").tokens
    assert chat.tokens != run("--prompt", PROMPT, "--json").tokens


def test_without_a_prompt_it_is_the_demo_in_chat(run, monkeypatch):
    monkeypatch.setattr(demo, "prompt_text", lambda tokenizer: PROMPT[:-2])
    monkeypatch.setattr(demo, "evidence_position", lambda tokenizer: 17)
    shown = run()
    assert shown.code == 0
    assert f"its question: {demo.DEMO.question} (the text says it at token 17)" in shown.err
    chat = run("--prompt", PROMPT[:-2], "--json", "--chat").json["results"][0]["text"]
    assert shown.out.startswith(chat + "\n\nprefill ")
    plain = run("--json", "--no-chat")
    assert plain.json["results"][0]["prompt_tokens"] == len(PROMPT) - 2


@pytest.fixture
def batch(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text(f"\n{PROMPT.replace(chr(10), ' ')}\n  \n{OTHER}\n\n")
    return str(file)


def test_batch_of_ragged_prompts(run, batch):
    outcome = run("--batch", batch, "--json")
    first, second = outcome.json["results"]
    assert (first["prompt_tokens"], second["prompt_tokens"]) == (len(PROMPT), len(OTHER))
    assert first["tokens"] == run("--prompt", PROMPT.replace("\n", " "), "--json").tokens
    assert outcome.json["report"]["decode_tokens"] == 2 * (NEW_TOKENS - 1)
    plain = run("--batch", batch)
    shown = f"[0] (length) {first['text']}\n[1] (length) {second['text']}\n\nprefill "
    assert plain.out.startswith(shown)
    assert "2 x 107 tokens" in plain.err


def test_prompts_of_a_batch_have_their_own_seeds(run, tmp_path):
    file = tmp_path / "same.txt"
    text = PROMPT.replace("\n", " ")
    file.write_text(f"{text}\n{text}\n")
    first, second = run("--batch", str(file), "--json", "--temperature=2").json["results"]
    assert first["tokens"] != second["tokens"]
    alone = run("--prompt", text, "--json", "--temperature=2", "--seed=1")
    assert second["tokens"] == alone.tokens


def test_end_token_stops_unless_ignored(run, checkpoint, tmp_path):
    tokens = run("--prompt", PROMPT, "--json").tokens
    at = next(i for i in range(5, NEW_TOKENS) if tokens[i] not in tokens[:i])
    folder = shutil.copytree(checkpoint, tmp_path / "stops")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokens[at]}))
    (folder / "tokenizer_config.json").unlink()
    options = ["--model", str(folder), *SMALL, "--prompt", PROMPT]
    assert json.loads(call(*options, "--json").out)["results"][0]["tokens"] == tokens
    options.remove("--ignore-eos")
    (result,) = call(*options, "--json").json["results"]
    assert result["finish_reason"] == "stop"
    assert result["tokens"] == tokens[: at + 1]
    # The end token is not text.
    streamed = call(*options).out.rpartition("\n\nprefill ")[0]
    assert streamed == result["text"]
    assert len(streamed) <= at


def interrupt_after(monkeypatch, count):
    """Ctrl-C after so many tokens; at 0, in the middle of prefill."""
    if count == 0:
        on_chunk = prompts.PromptRun._layer

        def layer(self, index, *rest):
            if index == 1:
                signal.raise_signal(signal.SIGINT)
            return on_chunk(self, index, *rest)

        monkeypatch.setattr(prompts.PromptRun, "_layer", layer)
        return
    tokens = generate.Generation.__iter__

    def interrupted(self):
        for drawn, token in enumerate(tokens(self), 1):
            yield token
            if drawn == count:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(generate.Generation, "__iter__", interrupted)


@pytest.mark.parametrize("count", [0, 1, 10])
def test_interrupted_json_is_one_object(run, checkpoint, monkeypatch, count):
    whole = run("--prompt", PROMPT, "--json").tokens
    interrupt_after(monkeypatch, count)
    outcome = call("--model", str(checkpoint), *SMALL, "--prompt", PROMPT, "--json")
    assert (outcome.code, outcome.err) == (130, "")
    assert outcome.json["interrupted"]
    (result,) = outcome.json["results"]
    assert result["finish_reason"] == "interrupted"
    assert len(result["tokens"]) >= count
    assert result["tokens"] == whole[: len(result["tokens"])]
    report = report_of(outcome)
    assert report["decode_tokens"] == max(len(result["tokens"]) - 1, 0)
    assert report["prefill_tokens"] == (len(PROMPT) if count else 0)
    assert report["context_tokens"] == report["prefill_tokens"] + report["decode_tokens"]
    assert report["prefill_seconds"] > 0
    assert report["host_kv_bytes"] > 0


@pytest.mark.parametrize("count", [0, 10])
def test_interrupted_text_ends_with_the_counters(run, checkpoint, monkeypatch, count):
    text = run("--prompt", PROMPT).out.rpartition("\n\nprefill ")[0]
    interrupt_after(monkeypatch, count)
    arguments = ("--model", str(checkpoint), *SMALL, "--prompt", PROMPT)
    outcome = call(*arguments, terminal=True)
    assert outcome.code == 130
    partial, found, _ = outcome.out.rpartition("\nprefill ")
    assert found
    assert "moved per token" in outcome.out
    if count:
        # A character whose bytes were cut shows as U+FFFD.
        assert partial.rstrip("\n\ufffd") and text.startswith(partial.rstrip("\n\ufffd"))
        assert outcome.err.endswith("\ninterrupted during decode\n")
    else:
        assert partial == ""
        assert re.search(r"prefill +\d+ %\ninterrupted during prefill\n$", outcome.err)


def test_interrupted_comparison_keeps_the_result(run, checkpoint, monkeypatch):
    whole = run("--prompt", PROMPT, "--json").tokens
    tokens = generate.Generation.__iter__

    def interrupted(self):
        for row, token in tokens(self):
            if self.pool is None:
                signal.raise_signal(signal.SIGINT)
            yield row, token

    monkeypatch.setattr(generate.Generation, "__iter__", interrupted)
    arguments = ("--model", str(checkpoint), *SMALL, "--prompt", PROMPT, "--compare-dense")
    outcome = call(*arguments, "--json")
    assert outcome.code == 130
    assert outcome.tokens == whole
    assert outcome.json["equal_to_dense"] is None
    plain = call(*arguments)
    assert plain.code == 130
    assert "moved per token" in plain.out
