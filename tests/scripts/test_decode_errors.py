"""Bad input: one line on stderr that names value and limit, nothing on stdout, no traceback."""

import json
import sys

import numpy as np
import pytest

from scripts import decode

from .conftest import CONFIG, SMALL, call

PROMPT = "sixteen letters."
HEAD = "lm_head.weight"
Q = "model.layers.1.self_attn.q_proj.weight"


def fails(outcome, message, code=1):
    assert outcome.out == ""
    assert outcome.err.endswith("\n")
    (line,) = outcome.err.splitlines()
    assert line.startswith("decode.py: ")
    assert message in line, line
    assert outcome.code == code


@pytest.fixture
def bad(checkpoint, shared_engines):
    """Runs the tiny checkpoint with a good prompt and the options of the test after it."""
    return lambda *options: call("--model", str(checkpoint), *SMALL, "--prompt", PROMPT, *options)


@pytest.mark.parametrize(
    "options,message",
    [
        ("--prompt=", "the prompt is empty"),
        (
            "--max-length=39",
            "prompt 0 has 16 tokens and asks for 24 more: 40 exceed the limit of 39 tokens",
        ),
        ("--max-new-tokens=65521", "65537 exceed the limit of 65536 tokens"),
        ("--budget-blocks=3", "budget of 3 blocks is smaller than the 4 forced blocks"),
        ("--block-size=9", "block_size 9 is not a multiple of kernel_stride 2"),
        ("--kernel-size=5", "kernel_size 5 is not a multiple of kernel_stride 2"),
        ("--block-size=0", "block_size must be at least 1, got 0"),
        ("--local-blocks=-1", "local_blocks must be at least 0, got -1"),
        ("--temperature=-0.5", "temperature must be finite and at least 0, got -0.5"),
        ("--temperature=nan", "temperature must be finite and at least 0, got nan"),
        ("--top-p=0", "top_p must be in (0, 1], got 0.0"),
        ("--top-k=-1", "top_k must be at least 0, got -1"),
        ("--seed=-1", "seed must be in [0, 2**32), got -1"),
        ("--max-new-tokens=0", "max_new_tokens must be at least 1, got 0"),
        ("--max-length=0", "max_length must be at least 1, got 0"),
        ("--prefill-chunk=0", "prefill_chunk must be at least 1, got 0"),
        ("--steps-per-call=0", "steps_per_call must be at least 1, got 0"),
        ("--spare-slots=-1", "spare_slots must be at least 0, got -1"),
        ("--steps-per-call=9", "steps_per_call 9 exceeds the block size 8"),
        ("--mode=dense --offload=host", "use mode 'sparse'"),
        ("--forecast=nowhere", "no Forecast weights at nowhere"),
        ("--device-kv-gb=0.0000001", "KiB but the device KV budget (device_kv_bytes) allows 107 B"),
        ("--host-kv-gb=0.0000001", "KiB but the host KV budget (host_kv_bytes) allows 107 B"),
    ],
)
def test_values_out_of_range(bad, options, message):
    fails(bad(*options.split()), message)


@pytest.mark.parametrize(
    "options,message",
    [
        ("--mode=spares", "argument --mode: invalid choice: 'spares' (choose from"),
        ("--offload=disk", "argument --offload: invalid choice: 'disk' (choose from"),
        ("--fetch=lazy", "argument --fetch: invalid choice: 'lazy' (choose from"),
        ("--block-size=8.5", "argument --block-size: invalid int value: '8.5'"),
        ("--device-kv-gb=nan", "--device-kv-gb: must be a positive number of GiB, got 'nan'"),
        ("--device-kv-gb=-1", "--device-kv-gb: must be a positive number of GiB, got '-1'"),
        ("--host-kv-gb=0", "--host-kv-gb: must be a positive number of GiB, got '0'"),
        ("--host-kv-gb=inf", "--host-kv-gb: must be a positive number of GiB, got 'inf'"),
        ("--host-kv-gb=much", "--host-kv-gb: must be a positive number of GiB, got 'much'"),
        ("--batch=prompts.txt", "give neither --prompt nor --prompt-file with it"),
        ("--mode=sparda", "name the Forecast weights of this model with --forecast"),
        ("--mode=dense --forecast=x", "--forecast is for --mode sparda, not dense"),
        ("--nonsense", "unrecognized arguments: --nonsense"),
    ],
)
def test_arguments_that_do_not_parse(bad, options, message):
    fails(bad(*options.split()), message, code=2)


@pytest.mark.parametrize(
    "options,message",
    [
        ("--mode=dense --offload=host", "use mode 'sparse'"),
        ("--steps-per-call=65", "steps_per_call 65 exceeds the block size 64"),
        ("--forecast=default --local-blocks=0", "needs local_blocks >= 1"),
    ],
)
def test_settings_are_refused_before_weights_are_read(options, message):
    fails(call("--model", "no/such/model", *options.split(), "--prompt", PROMPT), message)


def test_comparison_that_does_not_fit_is_said_before_work_begins(bad, monkeypatch):
    """A device budget that holds the slots but not the whole cache."""
    monkeypatch.setattr(decode, "stream", lambda *_, **__: pytest.fail("work began"))
    long = ("--prompt", "x" * 400, "--device-kv-gb=0.00006")
    fails(bad(*long, "--compare-dense"), "needs 106.0 KiB but the device KV budget")
    with pytest.raises(pytest.fail.Exception, match="work began"):
        bad(*long)


@pytest.mark.parametrize("option", ["--prompt-file", "--batch"])
def test_prompt_files(checkpoint, tmp_path, option):
    def read(path, *options):
        return call("--model", str(checkpoint), *SMALL, option, str(path), *options)

    fails(read(tmp_path / "none.txt"), f"{tmp_path}/none.txt: No such file or directory")
    fails(read(tmp_path), f"{tmp_path}: Is a directory")
    file = tmp_path / "latin.txt"
    file.write_bytes("caf\u00e9".encode("latin-1"))
    fails(read(file), f"{file} is not UTF-8: byte 0xe9 at offset 3")
    file.write_text("")
    fails(read(file), f"the prompt is empty: {file}" if "prompt" in option else "holds no prompt")
    if option == "--batch":
        file.write_text("\n \n\t\n")
        fails(read(file), f"{file} holds no prompt")
        file.write_text("short\nmuch longer than the limit allows\n")
        fails(read(file, "--max-length=40"), "prompt 1 has 33 tokens and asks for 24 more: 57")


def test_chat_without_a_template(checkpoint, tmp_path, write_checkpoint):
    folder = write_checkpoint(tmp_path / "base")
    (folder / "tokenizer_config.json").unlink()
    outcome = call("--model", str(folder), *SMALL, "--prompt", PROMPT, "--chat")
    fails(outcome, "this model has no chat template; give it plain text")


@pytest.mark.parametrize(
    "changes,message",
    [
        ({Q: None, HEAD: None}, f"missing {HEAD}; missing {Q}"),
        ({"extra.weight": np.zeros(3, np.float32)}, "unexpected extra.weight"),
        ({Q: np.zeros((3, 32), np.float32)}, f"{Q} has shape [3, 32], expected [32, 32]"),
        ({Q: np.zeros((32, 32), np.int32)}, f"{Q} has dtype I32"),
        ({Q: np.full((32, 32), np.nan, np.float32)}, f"{Q} has values that are not finite"),
        ({"model.norm.weight": np.full(32, 3e38, np.float32)}, "logits of request 0 are not"),
    ],
    ids=["missing", "extra", "misshapen", "integers", "nan", "nan_logits"],
)
def test_weights(shared_engines, tmp_path, write_checkpoint, changes, message):
    folder = write_checkpoint(tmp_path / "bad", changes)
    outcome = call("--model", str(folder), *SMALL, "--prompt", PROMPT, "--json")
    fails(outcome, message)


def test_nan_logits_print_no_counters(shared_engines, tmp_path, write_checkpoint):
    """As above in text mode, where progress has been shown by then."""
    changes = {"model.norm.weight": np.full(32, 3e38, np.float32)}
    folder = write_checkpoint(tmp_path / "bad", changes)
    outcome = call("--model", str(folder), *SMALL, "--prompt", PROMPT, "--compare-dense")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.splitlines()[-1] == (
        "decode.py: logits of request 0 are not finite (NaN or infinity) after 0 tokens"
    )


def test_truncated_weights(tmp_path, write_checkpoint):
    folder = write_checkpoint(tmp_path / "cut")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    outcome = call("--model", str(folder), *SMALL, "--prompt", PROMPT)
    fails(outcome, f"{file} ({file.stat().st_size} bytes) is truncated or damaged")


def test_folders_that_hold_no_model(tmp_path, write_checkpoint, monkeypatch):
    def read(model):
        return call("--model", str(model), *SMALL, "--prompt", PROMPT)

    (tmp_path / "empty").mkdir()
    fails(read(tmp_path / "none"), "expected a folder, a .gguf file or org/name")
    fails(read(tmp_path / "none.gguf"), f"no model at {tmp_path}/none.gguf")
    fails(read(tmp_path / "empty"), "no *.safetensors and no *.gguf file in")
    (tmp_path / "damaged.gguf").write_bytes(b"GGUFGGUF")
    fails(read(tmp_path / "damaged.gguf"), "damaged.gguf")
    folder = write_checkpoint(tmp_path / "model")
    (folder / "tokenizer.json").rename(folder / "kept.json")
    fails(read(folder), f"no tokenizer.json in {folder}")
    (folder / "tokenizer.json").write_text("{}")
    fails(read(folder), "not a tokenizer of the tokenizers library")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"model_type": "gpt_neox"}))
    fails(read(folder), "model_type 'gpt_neox' is not supported")
    (folder / "config.json").unlink()
    fails(read(folder), f"no config.json in {folder}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    fails(read("org/name"), "pip install 'sparda_jax[hub]'")
    monkeypatch.setitem(sys.modules, "gguf", None)
    fails(read(tmp_path / "damaged.gguf"), "gguf")


def test_traceback_on_request(bad):
    with pytest.raises(ValueError, match="temperature must be finite"):
        bad("--temperature=-1", "--traceback")
