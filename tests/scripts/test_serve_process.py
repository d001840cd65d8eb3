"""The server as a process: killed while it works, started again, told to stop."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def start(tmp_path, checkpoint):
    """Starts the server on one port, and waits until it answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    options = ["--model", str(checkpoint), "--name", "tiny", "--port", str(port), "--rows", "2"]
    limits = ["--max-length", "8192", "--grace-seconds", "1", "--prefill-ms", "1"]
    started = []

    def run():
        process = subprocess.Popen(
            [sys.executable, "-m", "sparda_jax.serve", *options, *limits],
            stderr=subprocess.PIPE,
            env=os.environ | cache,
        )
        started.append(process)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert process.poll() is None, process.stderr.read().decode()
            with contextlib.suppress(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                connection.request("GET", "/health")
                assert connection.getresponse().status == 200
                return process, port
            time.sleep(0.1)
        raise AssertionError("the server did not answer")

    yield run
    for process in started:
        process.kill()
        process.wait()


def ask(port, prompt, tokens):
    """Sends a request whose answer streams."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    more = {"stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body | more))
    return connection


def test_killed_at_work_and_told_to_stop(start):
    """Nothing is left behind that the next process would trip over; running streams end."""
    process, port = start()
    decoding = ask(port, "x", 4000).getresponse()
    assert decoding.readline().startswith(b"data: {")
    prefilling = ask(port, "x" * 8000, 10)
    time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    assert process.wait(20) == -signal.SIGKILL
    for answer in (decoding, prefilling):
        with contextlib.suppress(OSError, http.client.HTTPException):
            assert (
                b"[DONE]" not in (answer.getresponse() if answer is prefilling else answer).read()
            )
    process, port = start()
    answer = ask(port, "x", 10).getresponse().read()
    assert answer.endswith(b"data: [DONE]\n\n")
    running = ask(port, "x", 8000).getresponse()
    assert running.readline().startswith(b"data: {")
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    rest = b""
    with contextlib.suppress(OSError, http.client.HTTPException):
        rest = running.read()
    assert b"[DONE]" not in rest
    assert process.wait(20) in (0, -signal.SIGTERM)
    assert time.monotonic() - begun < 15
    errors = process.stderr.read().decode()
    assert "interrupted" in errors or "cancelled" in errors
    assert "the engine failed" not in errors
