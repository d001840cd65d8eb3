"""The ASGI application: endpoints, limits, and the bridge to the scheduler's thread."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sparda_jax.config import SamplingParams
from sparda_jax.diffusion.config import DenoiseParams
from sparda_jax.engine.requests import Handle, Piece
from sparda_jax.engine.scheduler import Scheduler
from sparda_jax.engine.service import QueueFullError
from sparda_jax.serve.answers import Answers, finish_reason, results_of
from sparda_jax.serve.metrics import Metrics
from sparda_jax.serve.protocol import Ask, BadRequestError, error_body, parse_json, parse_request
from sparda_jax.serve.streams import PatientStream, event_of
from sparda_jax.tokenization import Tokenizer
from sparda_jax.validation import require_at_least

logger = logging.getLogger("sparda_jax")

# What a client is told to wait when the queue is full.
RETRY_SECONDS = "2"


@dataclass(frozen=True)
class ServerConfig:
    """What the server allows.

    Attributes:
        name: of the model, as clients name it.
        most_body_bytes: of a request.
        client_seconds: a client that takes no data for so long is gone.
        denoise: how blocks are denoised unless a request says otherwise; None: the model is not
            one of block diffusion.
    """

    name: str = "default"
    most_body_bytes: int = 16 * 2**20
    client_seconds: float = 60.0
    denoise: DenoiseParams | None = None

    def __post_init__(self) -> None:
        for name in ("most_body_bytes", "client_seconds"):
            require_at_least(name, getattr(self, name), 1)


@dataclass(frozen=True)
class _Event:
    """A piece of one choice; no piece: the choice has ended."""

    index: int
    piece: Piece | None


class Server:
    """Endpoints over one scheduler.

    Args:
        scheduler: has a tokenizer; started and closed with the application.
        config: what is allowed.
    """

    def __init__(self, scheduler: Scheduler, config: ServerConfig | None = None):
        assert scheduler.tokenizer is not None
        self.scheduler, self.config = scheduler, config or ServerConfig()
        self.tokenizer: Tokenizer = scheduler.tokenizer
        self.metrics = Metrics(scheduler)
        self._numbers = itertools.count()

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/health", self.health),
            Route("/metrics", self.metrics_page),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        handlers: Mapping[Any, Any] = {
            BadRequestError: _bad_request,
            HTTPException: _http_error,
            Exception: _failure,
        }
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.scheduler.start()
        try:
            yield
        finally:
            # Whoever was still connected has had the time that the server gives them.
            await asyncio.to_thread(self.scheduler.close)

    async def health(self, request: Request) -> Response:
        """200 while requests are answered."""
        broken = self.scheduler.broken
        if broken is not None:
            return JSONResponse({"status": "broken", "error": broken}, status_code=503)
        state = {"running": self.scheduler.running, "waiting": self.scheduler.waiting}
        return JSONResponse({"status": "ok"} | state)

    async def metrics_page(self, request: Request) -> Response:
        """Counters, for Prometheus."""
        return Response(self.metrics.page(), media_type="text/plain; version=0.0.4")

    def _model(self) -> dict[str, Any]:
        length = self.scheduler.max_length
        return {
            "id": self.config.name,
            "object": "model",
            "created": 0,
            "owned_by": "sparda_jax",
            "max_model_len": length,
        }

    async def models(self, request: Request) -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The model, by its name."""
        self._check_name(request.path_params["name"])
        return JSONResponse(self._model())

    def _check_name(self, name: object) -> None:
        if name != self.config.name:
            raise BadRequestError(
                f"the model {name!r} does not exist; this server has {self.config.name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def completions(self, request: Request) -> Response:
        """Continues texts."""
        return await self._answer(request, chat=False)

    async def chat(self, request: Request) -> Response:
        """Answers in a conversation."""
        return await self._answer(request, chat=True)

    async def _body(self, request: Request) -> bytes:
        most, body = self.config.most_body_bytes, bytearray()
        async for part in request.stream():
            body += part
            if len(body) > most:
                raise BadRequestError(f"the body exceeds the limit of {most} bytes", status=413)
        return bytes(body)

    async def _answer(self, request: Request, *, chat: bool) -> Response:
        body = parse_json(await self._body(request))
        self._check_name(body.get("model"))
        ask = parse_request(body, chat=chat)
        # A long text takes a while; the streams of others go on meanwhile.
        prompts = await asyncio.to_thread(self._encode, ask)
        events: asyncio.Queue[_Event] = asyncio.Queue()
        handles = self._submit(ask, prompts, events)
        answers = Answers(self.config.name, next(self._numbers), chat, self.tokenizer)
        if ask.stream:
            content = self._stream(ask, answers, handles, events)
            return PatientStream(content, self.config.client_seconds, lambda: _cancel(handles))
        try:
            if not await _ended(request, handles, events):
                return Response(status_code=499)  # nobody reads it
        finally:
            _cancel(handles)
        return JSONResponse(answers.whole(_checked(handles)))

    def _encode(self, ask: Ask) -> list[list[int]]:
        try:
            if ask.chat:
                return [self.tokenizer.encode_chat(each) for each in ask.prompts]
        except ValueError as error:  # of the chat template
            raise BadRequestError(str(error), param="messages") from None
        return [
            self.tokenizer.encode(each) if isinstance(each, str) else each for each in ask.prompts
        ]

    def _params(self, ask: Ask, prompt: list[int], choice: int) -> SamplingParams:
        most = ask.max_tokens or 16
        if ask.max_tokens is None and ask.chat:
            most = max(self.scheduler.max_length - len(prompt), 1)
        return dataclasses.replace(
            ask.params,
            max_new_tokens=most,
            seed=(ask.params.seed + choice) % 2**32,
            stop_token_ids=() if ask.ignore_eos else tuple(self.tokenizer.eos_token_ids),
        )

    def _denoise(self, ask: Ask) -> DenoiseParams | None:
        own = self.config.denoise
        if not ask.denoise:
            return own
        if own is None:
            field = next(iter(ask.denoise))
            raise BadRequestError("this model does not denoise blocks", param=f"denoising_{field}")
        try:
            return dataclasses.replace(own, **ask.denoise)
        except ValueError as error:
            raise BadRequestError(str(error), param="denoising_strategy") from None

    def _submit(
        self, ask: Ask, prompts: list[list[int]], events: asyncio.Queue[_Event]
    ) -> list[Handle]:
        """All choices of all prompts, or none and an error."""
        loop, denoise = asyncio.get_running_loop(), self._denoise(ask)

        def tell(event: _Event) -> None:
            # The loop is gone only when the whole server is.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(events.put_nowait, event)

        def on_piece(index: int) -> Callable[[Piece], None]:
            return lambda piece: tell(_Event(index, piece))

        def on_end(index: int) -> Callable[[Handle], None]:
            def ended(handle: Handle) -> None:
                self.metrics.observe(handle)
                logger.info(
                    "request %d: %d prompt tokens (%d known), %d tokens, %s, %.3f s",
                    handle.id,
                    len(handle.prompt),
                    handle.cached_tokens,
                    len(handle.tokens),
                    handle.reason,
                    handle.timing.finished - handle.timing.submitted,
                )
                tell(_Event(index, None))

            return ended

        handles: list[Handle] = []
        try:
            for prompt in prompts:
                for choice in range(ask.choices):
                    index = len(handles)
                    handle = self.scheduler.submit(
                        prompt,
                        self._params(ask, prompt, choice),
                        denoise=denoise,
                        stop=ask.stop,
                        on_piece=on_piece(index),
                        on_end=on_end(index),
                    )
                    handles.append(handle)
        except Exception as error:
            _cancel(handles)
            raise self._refusal(error, ask) from error
        return handles

    def _refusal(self, error: Exception, ask: Ask) -> Exception:
        if isinstance(error, QueueFullError):
            return BadRequestError(str(error), status=429, code="queue_full")
        if isinstance(error, ValueError):
            code = "context_length_exceeded" if "exceed the limit" in str(error) else None
            return BadRequestError(
                str(error), param="messages" if ask.chat else "prompt", code=code
            )
        if isinstance(error, RuntimeError):
            return BadRequestError(str(error), status=503)
        return error

    async def _stream(
        self,
        ask: Ask,
        answers: Answers,
        handles: list[Handle],
        events: asyncio.Queue[_Event],
    ) -> AsyncIterator[str]:
        """Pieces of all choices as they come, as server-sent events."""
        offsets, started = [0] * len(handles), [False] * len(handles)
        left = len(handles)
        while left:
            event = await events.get()
            index, piece = event.index, event.piece
            if piece is None:
                left -= 1
                result = handles[index].result()
                if result.finish_reason in ("failed", "interrupted"):
                    yield event_of(error_body(result.error or "the server shuts down", 500))
                    continue
                reason, first = finish_reason(result), not started[index]
                yield event_of(answers.piece(index, "", reason=reason, first=first))
            elif piece.text or piece.likelihoods:
                yield event_of(
                    answers.piece(
                        index,
                        piece.text,
                        piece.tokens,
                        piece.likelihoods,
                        offset=offsets[index],
                        first=not started[index],
                    )
                )
                started[index] = True
                offsets[index] += len(piece.text)
        if ask.usage:
            yield event_of(answers.counts(results_of(handles)))
        yield "data: [DONE]\n\n"


def _cancel(handles: list[Handle]) -> None:
    """Ends what has not ended yet."""
    for handle in handles:
        handle.cancel()


async def _ended(request: Request, handles: list[Handle], events: asyncio.Queue[_Event]) -> bool:
    """Waits for the end of all choices; False if the client went before that."""

    async def all_ended() -> None:
        left = len(handles)
        while left:
            left -= (await events.get()).piece is None

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    ended, left = (asyncio.ensure_future(each()) for each in (all_ended, gone))
    try:
        await asyncio.wait((ended, left), return_when=asyncio.FIRST_COMPLETED)
        return ended.done()
    finally:
        ended.cancel()
        left.cancel()


def _checked(handles: list[Handle]) -> Any:
    results = results_of(handles)
    for result in results:
        if result.finish_reason == "failed":
            raise BadRequestError(result.error or "failed", status=500)
        if result.finish_reason == "interrupted":
            raise BadRequestError("the server shuts down", status=503)
    return results


async def _bad_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, BadRequestError)
    headers = {"Retry-After": RETRY_SECONDS} if error.status == 429 else {}
    body = error_body(error.message, error.status, error.param, error.code)
    return JSONResponse(body, status_code=error.status, headers=headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = error_body(error.detail, error.status_code)
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _failure(request: Request, error: Exception) -> Response:
    logger.error("%s: %s", request.url.path, type(error).__name__)
    return JSONResponse(error_body("internal error", 500), status_code=500)
