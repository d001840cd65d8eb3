"""The server over a real socket: what clients send, what they get, and what goes wrong."""

import asyncio
import contextlib
import http.client
import json
import logging
import socket
import threading
import time

import pytest

openai = pytest.importorskip("openai")
uvicorn = pytest.importorskip("uvicorn")

import tokenizers  # noqa: E402
from starlette.testclient import TestClient  # noqa: E402

from pallas_kernels.geometry import BlockGeometry  # noqa: E402
from sparda_jax.config import (  # noqa: E402
    DiffusionConfig,
    EngineConfig,
    ModelConfig,
    RopeConfig,
    SamplingParams,
    SparseConfig,
)
from sparda_jax.diffusion.config import DenoiseParams  # noqa: E402
from sparda_jax.engine.generate import Engine  # noqa: E402
from sparda_jax.engine.scheduler import Scheduler  # noqa: E402
from sparda_jax.engine.service import SchedulerConfig  # noqa: E402
from sparda_jax.herald.config import HeraldConfig  # noqa: E402
from sparda_jax.herald.engine import HeraldEngine  # noqa: E402
from sparda_jax.models.decoder import Decoder  # noqa: E402
from sparda_jax.serve.app import Server, ServerConfig  # noqa: E402
from sparda_jax.serve.streams import PatientStream  # noqa: E402
from sparda_jax.tokenization import Tokenizer  # noqa: E402

LENGTH = 128
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def character_tokenizer() -> Tokenizer:
    """A token for each printable ASCII character, the line end and the end of text."""
    characters = [chr(code) for code in range(32, 127)] + ["\n", "<end>"]
    vocabulary = {character: index for index, character in enumerate(characters)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    return Tokenizer(backend, eos_token_ids=[len(characters) - 1], chat_template=TEMPLATE)


def tiny_model(**facts) -> Decoder:
    """Random, of one layer; as its other facts say."""
    config = ModelConfig(
        hidden_size=32,
        intermediate_size=48,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        rope=RopeConfig(16),
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        **facts,
    )
    return Decoder.random(config, seed=3)


@pytest.fixture(scope="module")
def scheduler():
    engine = Engine(
        tiny_model(family="llama", vocab_size=97, max_position_embeddings=LENGTH),
        sparse=SparseConfig(
            geometry=BlockGeometry(8, 4, 2), init_blocks=1, local_blocks=2, budget_blocks=6
        ),
        config=EngineConfig(mode="dense", prefill_chunk=LENGTH, steps_per_call=2, top_logprobs=3),
    )
    return Scheduler(engine, SchedulerConfig(rows=2, queue=3), character_tokenizer())


@pytest.fixture(scope="module")
def address(scheduler):
    """A server in a thread of its own."""
    limits = ServerConfig(name="tiny", most_body_bytes=4096, client_seconds=2)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        Server(scheduler, limits).app(), log_level="warning", timeout_graceful_shutdown=5
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    yield listener.getsockname()[:2]
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive()
    # Graceful: the scheduler's thread has ended with the server.
    with pytest.raises(RuntimeError, match="shutting down"):
        scheduler.submit([1], SamplingParams(max_new_tokens=1))


@pytest.fixture
def client(address):
    host, port = address
    with openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="-", max_retries=0) as made:
        yield made


def ask(address, method, path, body=None, headers=None):
    connection = http.client.HTTPConnection(*address, timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()


def post(address, path, body):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, answer = ask(address, "POST", path, data)
    return status, json.loads(answer)


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


CHAT = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "Short."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    ],
    "max_tokens": 12,
    "seed": 5,
    "extra_body": {"ignore_eos": True, "min_p": 0.01},
}


def test_official_client_chats_whole_and_streaming(client):
    whole = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    text = whole.choices[0].message.content
    assert whole.object == "chat.completion" and whole.choices[0].finish_reason == "length"
    assert len(text) == whole.usage.completion_tokens == 12
    assert whole.usage.prompt_tokens == len("s:Short.\nu:Hello\na:")
    logprobs = whole.choices[0].logprobs.content
    assert "".join(each.token for each in logprobs) == text
    assert all(each.logprob < 0 and len(each.top_logprobs) == 2 for each in logprobs)
    pieces = list(
        client.chat.completions.create(
            **CHAT, stream=True, logprobs=True, stream_options={"include_usage": True}
        )
    )
    assert pieces[0].choices[0].delta.role == "assistant"
    said = [choice.delta.content or "" for piece in pieces for choice in piece.choices]
    assert "".join(said) == text
    assert sum(bool(part) for part in said) > 1
    assert [piece.choices[0].finish_reason for piece in pieces if piece.choices][-1] == "length"
    again = pieces[-1].usage
    assert (again.prompt_tokens, again.total_tokens) == (19, 19 + 12)
    assert again.prompt_tokens_details.cached_tokens == 16  # a block of 8 at least is run again


def test_completions_choices_stops_and_prompts(client):
    request = {"model": "tiny", "max_tokens": 10, "seed": 1, "extra_body": {"ignore_eos": True}}
    one = client.completions.create(prompt="abc", logprobs=3, **request).choices[0]
    assert one.logprobs.tokens == list(one.text)
    assert one.logprobs.text_offset == list(range(10))
    several = client.completions.create(prompt=["abc", [33, 34]], n=2, **request)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == one.text
    assert several.choices[1].text != one.text
    stop = one.text[3:5]
    stopped = client.completions.create(prompt="abc", stop=[stop, "\x00"], **request).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == one.text[: one.text.index(stop)]
    streamed = client.completions.create(prompt="abc", stop=stop, stream=True, **request)
    assert "".join(part.choices[0].text for part in streamed) == stopped.text


def test_client_sees_its_own_errors(client):
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**CHAT | {"model": "other"})
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="exceed the limit of 128") as long:
        client.completions.create(model="tiny", prompt="x" * 120, max_tokens=20)
    assert long.value.code == "context_length_exceeded"
    assert client.models.list().data[0].id == client.models.retrieve("tiny").id == "tiny"


@pytest.mark.parametrize(
    "body,message",
    [
        (b"\xff\xfe{}", "the body is not UTF-8: byte 0xff at offset 0"),
        (b"{", "the body is not JSON"),
        (b"[" * 4000, "not JSON"),
        (b"[]", "holds a list"),
        (b"", "not JSON"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": []}, "prompt must be"),
        ({}, "prompt is missing"),
        ({"prompt": [97]}, "holds token 97, outside the vocabulary of 97"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"prompt": "a", "max_tokens": 10**9}, "exceed the limit of 128 tokens"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens must be int"),
        ({"prompt": "a", "temperature": -1}, r"temperature must be in [0, 2], got -1"),
        ({"prompt": "a", "top_p": 0}, "top_p must be in (0, 1], got 0.0"),
        ({"prompt": "a", "stop": [""]}, "stop must be strings that are not empty"),
        ({"prompt": "a", "n": 17}, r"n must be in [1, 16]"),
        ({"prompt": "a", "logprobs": 4}, "4 likeliest tokens asked for, at most 3"),
        ({"prompt": "a", "echo": True}, "echo is not supported"),
        ({"prompt": "a", "tempratur": 1}, "unknown field 'tempratur'"),
    ],
)
def test_malformed_requests_get_the_shape_that_clients_expect(address, body, message):
    if isinstance(body, dict):
        body = {"model": "tiny"} | body
    status, answer = post(address, "/v1/completions", body)
    assert status == 400
    assert set(answer) == {"error"} and set(answer["error"]) == {"message", "type", "param", "code"}
    assert message in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


def test_other_errors(address):
    status, answer = post(address, "/v1/completions", b" " * 5000)
    assert status == 413 and "limit of 4096 bytes" in answer["error"]["message"]
    for method, path, expected in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)):
        status, answer = ask(address, method, path)
        assert status == expected and json.loads(answer)["error"]["message"]


def test_full_queue_and_clients_that_leave(address, client, scheduler):
    """What has no place is refused at once; a place is free again when a client goes."""
    long = {"model": "tiny", "prompt": "a", "max_tokens": 120, "stream": True, "ignore_eos": True}
    begun = scheduler.counters.finished["cancelled"]
    data = json.dumps(long | {"n": 5}).encode()
    gone = http.client.HTTPConnection(*address, timeout=60)
    with scheduler._driving:  # nothing moves meanwhile
        gone.request("POST", "/v1/completions", data)
        wait_for(lambda: scheduler.waiting == 5)
        with pytest.raises(openai.RateLimitError, match="the queue holds 3") as full:
            client.completions.create(model="tiny", prompt="a")
        assert full.value.code == "queue_full"
        assert full.value.response.headers["retry-after"]
        gone.close()
        wait_for(lambda: len(scheduler._cancelled) == 5)
    wait_for(lambda: scheduler.running == scheduler.waiting == 0)
    assert scheduler.counters.finished["cancelled"] - begun == 5
    assert client.completions.create(model="tiny", prompt="a", max_tokens=2).choices[0].text


def test_health_metrics_and_silent_logs(address, client, scheduler, caplog):
    secret = "xyzzy-plugh"
    with caplog.at_level(logging.DEBUG, logger="sparda_jax"):
        client.completions.create(model="tiny", prompt=secret, max_tokens=4)
        wait_for(lambda: scheduler.running == 0)
    assert "11 prompt tokens" in caplog.text
    assert secret not in caplog.text
    status, answer = ask(address, "GET", "/health")
    assert status == 200 and json.loads(answer)["status"] == "ok"
    status, page = ask(address, "GET", "/metrics")
    lines = page.decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    counters = scheduler.counters
    assert float(values["sparda_requests_total"]) == counters.requests
    finished = [float(v) for name, v in values.items() if name.startswith("sparda_finished_total")]
    assert sum(finished) == counters.requests
    assert float(values["sparda_generated_tokens_total"]) == counters.tokens > 0
    assert float(values["sparda_rows_used"]) == 0
    assert float(values["sparda_time_to_first_token_seconds_count"]) > 0


def test_a_client_that_reads_nothing_is_given_up():
    """Driven without a socket, whose buffers are large."""
    closed = []

    async def content():
        while True:
            yield "data: x\n\n"

    async def send(message):
        if message["type"] == "http.response.body":
            await asyncio.sleep(3600)

    async def receive():
        await asyncio.sleep(3600)

    stream = PatientStream(content(), 0.05, lambda: closed.append(True))
    scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
    asyncio.run(asyncio.wait_for(stream(scope, receive, send), 10))
    assert closed == [True]


def test_a_model_of_block_diffusion_is_served_alike():
    """Requests say how their blocks are denoised; a stop string ends an answer."""
    facts = {"vocab_size": 98, "max_position_embeddings": 64, "diffusion": DiffusionConfig(8, 97)}
    config = HeraldConfig(mode="dense", kv_block=8, prefill_chunk=64)
    scheduler = HeraldEngine(tiny_model(family="sdar", **facts), config=config).serve(
        SchedulerConfig(rows=2), character_tokenizer()
    )
    app = Server(scheduler, ServerConfig("tiny", denoise=DenoiseParams("sequential"))).app()
    ask = {"model": "tiny", "prompt": "abcdefghij", "max_tokens": 12, "temperature": 0}
    with TestClient(app) as client:
        send = lambda **more: client.post("/v1/completions", json=ask | {"ignore_eos": True} | more)
        whole = send().json()["choices"][0]
        assert len(whole["text"]) == 12 and whole["finish_reason"] == "length"
        lines = [line for line in send(stream=True).text.splitlines() if line]
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        pieces = [event["choices"][0]["text"] for event in events]
        assert "".join(pieces) == whole["text"]
        assert [len(piece) for piece in pieces] == [6, 6, 0]  # two blocks, the end
        other = send(denoising_steps=1, denoising_strategy="low_confidence_static").json()
        assert other["choices"][0]["text"] != whole["text"]
        stop = whole["text"][2:4]
        stopped = send(stop=stop).json()["choices"][0]
        assert stopped["text"] == whole["text"][: whole["text"].index(stop)]
        assert stopped["finish_reason"] == "stop"
        for wrong, message in (
            ({"denoising_steps": 9}, "9 denoising steps exceed the block size of 8"),
            ({"denoising_strategy": "all"}, "unknown strategy 'all'"),
            ({"logprobs": 1}, "one for each step"),
        ):
            answer = send(**wrong)
            assert answer.status_code == 400 and message in answer.json()["error"]["message"]
        assert "sparda_diffusion_blocks_total" in client.get("/metrics").text
    assert scheduler.counters.finished == {"length": 3, "stop": 1}
