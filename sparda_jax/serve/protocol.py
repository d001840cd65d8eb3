"""Bodies of requests checked and turned into what the engine takes; bodies of errors.

Field names and shapes are those of the OpenAI API, which clients of many servers speak. A field
that would change the answer and is not supported is refused by name, never ignored.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from sparda_jax.config import SamplingParams

MOST_CHOICES = 16
MOST_PROMPTS = 64
MOST_STOPS = 16
MOST_STOP_CHARACTERS = 1000

# Fields that say nothing about the answer.
_NOTED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
# Fields whose one supported value is what leaving them out means.
_FIXED: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
    "echo": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
# How blocks are denoised, by their names in `DenoiseParams`; for models of block diffusion.
_DENOISE: dict[str, tuple[str, type | tuple[type, ...]]] = {
    "denoising_strategy": ("strategy", str),
    "denoising_steps": ("steps", int),
    "denoising_threshold": ("threshold", (int, float)),
}
_COMMON = {
    *_DENOISE,
    *("model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "n"),
    *("stream", "stream_options", "logprobs", "ignore_eos"),
}


class BadRequestError(Exception):
    """A request that is answered with an error.

    Attributes:
        message: for people.
        status: HTTP status.
        param: the field it is about.
        code: for programs.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code


def error_body(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The shape in which clients expect errors."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclasses.dataclass(frozen=True)
class Ask:
    """A checked request.

    Attributes:
        prompts: texts, token ids, or one conversation.
        chat: the prompt is a conversation.
        params: of the first choice; stop tokens and a missing length are the server's business.
        max_tokens: None: as many as fit (chat) or 16.
        stop: strings.
        choices: answers to each prompt.
        stream: send tokens as they come.
        usage: end the stream with the counts.
        ignore_eos: go on at the model's end token.
        denoise: settings of `DenoiseParams` that are not the server's.
    """

    prompts: list[Any]
    chat: bool
    params: SamplingParams
    max_tokens: int | None
    stop: tuple[str, ...]
    choices: int
    stream: bool
    usage: bool
    ignore_eos: bool
    denoise: dict[str, Any]


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        BadRequestError: not UTF-8, not JSON, or no object.
    """
    try:
        content = json.loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRequestError(
            f"the body is not UTF-8: byte 0x{body[error.start]:02x} at offset {error.start}"
        ) from None
    except (ValueError, RecursionError) as error:
        reason = "too deeply nested" if isinstance(error, RecursionError) else str(error)
        raise BadRequestError(f"the body is not JSON: {reason}") from None
    if not isinstance(content, dict):
        raise BadRequestError(f"the body holds a {type(content).__name__}, expected an object")
    return content


class _Fields:
    """Reads fields and checks their types; errors name the field."""

    def __init__(self, body: Mapping[str, Any]):
        self._body = body

    def get(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        value = self._body.get(name)
        if value is None:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        # bool is an int in Python, and never meant as one here.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(each.__name__ for each in kinds)
            raise BadRequestError(f"{name} must be {names}, got {type(value).__name__}", param=name)
        return value

    def between(self, name: str, default: Any, least: float, most: float) -> Any:
        kind = int if isinstance(default, int) else (int, float)
        value = self.get(name, kind, default)
        if not least <= value <= most:
            raise BadRequestError(f"{name} must be in [{least}, {most}], got {value}", param=name)
        return value


def _check_names(body: Mapping[str, Any], known: set[str]) -> None:
    for name, value in body.items():
        if value is None or name in known or name in _NOTED:
            continue
        if name not in _FIXED:
            raise BadRequestError(f"unknown field {name!r}", param=name, code="unknown_parameter")
        if not any(value == fixed for fixed in _FIXED[name]):
            raise BadRequestError(
                f"{name} is not supported", param=name, code="unsupported_parameter"
            )


def _stops(fields: _Fields) -> tuple[str, ...]:
    value = fields.get("stop", (str, list), [])
    stops = [value] if isinstance(value, str) else value
    if any(not isinstance(stop, str) or not stop for stop in stops):
        raise BadRequestError("stop must be strings that are not empty", param="stop")
    if len(stops) > MOST_STOPS or any(len(stop) > MOST_STOP_CHARACTERS for stop in stops):
        raise BadRequestError(
            f"at most {MOST_STOPS} stop strings of {MOST_STOP_CHARACTERS} characters", param="stop"
        )
    return tuple(stops)


def _prompts(fields: _Fields) -> list[Any]:
    value = fields.get("prompt", (str, list))
    if value is None:
        raise BadRequestError("prompt is missing", param="prompt")

    def is_tokens(each: Any) -> bool:
        return isinstance(each, list) and all(type(token) is int for token in each)

    prompts = [value] if isinstance(value, str) or (value and is_tokens(value)) else value
    if not prompts or not all(isinstance(each, str) or is_tokens(each) for each in prompts):
        raise BadRequestError(
            "prompt must be a text, token ids, or a list of either", param="prompt"
        )
    if len(prompts) > MOST_PROMPTS:
        raise BadRequestError(
            f"{len(prompts)} prompts, at most {MOST_PROMPTS} in a request", param="prompt"
        )
    return list(prompts)


def _conversation(fields: _Fields) -> list[dict[str, Any]]:
    messages = fields.get("messages", list)
    if not messages:
        raise BadRequestError("messages is missing or empty", param="messages")
    result = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequestError(f"{where} needs a role and a content", param=where)
        content = message.get("content")
        if isinstance(content, list):
            # Parts; only text is there to be read.
            texts = [part["text"] for part in content if _is_text(part)]
            if len(texts) != len(content):
                raise BadRequestError(f"{where}: only text parts are supported", param=where)
            content = "".join(texts)
        if not isinstance(content, str):
            raise BadRequestError(f"{where} has no text content", param=where)
        result.append({"role": message["role"], "content": content})
    return result


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def parse_request(body: Mapping[str, Any], *, chat: bool) -> Ask:
    """Checks the body of a request.

    Args:
        body: parsed JSON.
        chat: for the chat endpoint.

    Raises:
        BadRequestError: naming the field.
    """
    own = {"messages", "max_completion_tokens", "top_logprobs"} if chat else {"prompt", "best_of"}
    _check_names(body, _COMMON | own)
    fields = _Fields(body)
    prompts = [_conversation(fields)] if chat else _prompts(fields)
    most = fields.get("max_completion_tokens" if chat else "max_tokens", int)
    most = fields.get("max_tokens", int) if most is None else most
    if most is not None and most < 1:
        raise BadRequestError(f"max_tokens must be at least 1, got {most}", param="max_tokens")
    choices = fields.between("n", 1, 1, MOST_CHOICES)
    if fields.get("best_of", int, choices) != choices:
        raise BadRequestError("best_of must equal n", param="best_of", code="unsupported_parameter")
    if chat:
        wanted = fields.get("logprobs", bool, False)
        top = fields.between("top_logprobs", 0, 0, 20)
        if top and not wanted:
            raise BadRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        logprobs = top if wanted else None
    else:
        logprobs = fields.get("logprobs", int)
    options = fields.get("stream_options", dict, {})
    params = _valued(
        lambda: SamplingParams(
            max_new_tokens=most or 1,
            temperature=float(fields.between("temperature", 1.0, 0, 2)),
            top_p=float(fields.get("top_p", (int, float), 1.0)),
            top_k=fields.get("top_k", int, 0),
            min_p=float(fields.get("min_p", (int, float), 0.0)),
            seed=fields.get("seed", int, secrets.randbits(32)) % 2**32,
            logprobs=logprobs,
        )
    )
    return Ask(
        prompts=prompts,
        chat=chat,
        params=params,
        max_tokens=most,
        stop=_stops(fields),
        choices=choices,
        stream=fields.get("stream", bool, False),
        usage=bool(options.get("include_usage", False)),
        ignore_eos=fields.get("ignore_eos", bool, False),
        denoise={
            name: fields.get(field, kind)
            for field, (name, kind) in _DENOISE.items()
            if body.get(field) is not None
        },
    )


def _valued(make: Callable[[], SamplingParams]) -> SamplingParams:
    """The settings, or what is wrong with them as an error of the request."""
    try:
        return make()
    except ValueError as error:
        raise BadRequestError(str(error), param=str(error).split(" ", 1)[0]) from None
