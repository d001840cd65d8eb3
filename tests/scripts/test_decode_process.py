"""`scripts/decode.py` as a process: help, signals, closed pipes, memory."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sparda_jax.assets import load_excerpt

from .conftest import SMALL

SCRIPT = Path(__file__).parents[2] / "scripts" / "decode.py"
# More tokens than are drawn before the signal arrives.
ENDLESS = ("--prompt", "a short prompt", "--max-new-tokens=60000")


@pytest.fixture(scope="module")
def start(tmp_path_factory, checkpoint):
    """Starts the script; the processes of this file compile equal programs once."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("programs")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(SCRIPT.parents[1]),
    }
    started = []

    def run(*arguments):
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "--model", str(checkpoint), *SMALL, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | cache,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


def finish(process):
    out, err = process.communicate(timeout=60)
    err = err.decode()
    assert "Traceback" not in err, err
    assert "Exception" not in err, err
    return out.decode(), err


def test_help():
    result = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert "usage: decode.py" in result.stdout
    assert "(default: None)" not in result.stdout
    assert "(default: False)" not in result.stdout


@pytest.mark.smoke
def test_interrupt_during_decode(start):
    process = start(*ENDLESS)
    shown = process.stdout.read(60)  # the text streams: it is here long before the end
    process.send_signal(signal.SIGINT)
    out, err = finish(process)
    assert process.returncode == 130
    assert len(shown) == 60
    assert err.endswith("interrupted during decode\n")
    decoded = re.search(r"\ndecode +[\d.]+ tok/s   \((\d+) tokens", out)
    assert 10 < int(decoded[1]) < 59_000
    assert re.search(r"\nprefill +[\d.]+ tok/s   \(14 tokens", out)
    assert "\nhit rate " in out


def test_interrupt_during_prefill(start):
    process = start("--prompt", "x" * 40_000)
    for line in process.stderr:
        if line == b"prefill 10 %\n":
            break
    process.send_signal(signal.SIGINT)
    out, err = finish(process)
    assert process.returncode == 130
    assert err.endswith("interrupted during prefill\n")
    assert "prefill 100 %" not in err
    assert out.startswith("\nprefill                0.0 tok/s   (0 tokens, ")
    assert not re.search(r"\(0 tokens, 0\.0 s, and 0\.0 s", out.splitlines()[1])


def test_interrupted_json_parses(start):
    """Wherever the signal strikes once the model has been loaded; before, there is no object."""
    process = start(*ENDLESS, "--json")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=6)
    process.send_signal(signal.SIGINT)
    out, _ = finish(process)
    assert process.returncode == 130
    if out:
        output = json.loads(out)
        assert output["interrupted"]
        assert output["report"]["decode_tokens"] == max(len(output["results"][0]["tokens"]) - 1, 0)


def test_closed_pipe(start):
    process = start(*ENDLESS)
    process.stdout.read(20)
    process.stdout.close()
    err = process.stderr.read().decode()
    assert process.wait(timeout=60) == 141
    assert err.splitlines()[-1].startswith("prefill ")


# Not getrusage: its peak is also that of the process that started this one.
MEASURE = """
import re, runpy, sys
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    status = open("/proc/self/status").read()
    print("peak KiB", re.search(r"VmHWM:\\s+(\\d+) kB", status)[1], file=sys.stderr)
"""


@pytest.mark.slow
def test_memory_of_8000_tokens_of_the_default_model(default_model_path, tmp_path):
    """Prefill is bounded: 8,000 tokens of the 135M model, float32, weights included, under 3 GB."""
    prompt = tmp_path / "prompt.txt"
    # About 4.1 characters a token; the assertion below holds if that changes.
    prompt.write_text(load_excerpt()[:33_700])
    options = ["--model", str(default_model_path), "--prompt-file", str(prompt), "--json"]
    options += ["--max-new-tokens=9", "--ignore-eos"]
    code = MEASURE.replace("sys.argv[0]", repr(str(SCRIPT)))
    result = subprocess.run(
        [sys.executable, "-c", code, *options],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(SCRIPT.parents[1])},
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)["report"]
    peak = int(re.search(r"peak KiB (\d+)", result.stderr)[1]) * 1024
    print(f"{report['prefill_tokens']} tokens, peak {peak / 1e9:.2f} GB, {report}")
    assert report["prefill_tokens"] >= 8000
    assert report["decode_tokens"] == 8
    assert peak < 3e9
