"""Server-sent events, and a stream of them that does not wait for ever."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

logger = logging.getLogger("sparda_jax")


def event_of(body: Mapping[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


class PatientStream(StreamingResponse):
    """A stream that gives up on a client that reads nothing for too long.

    Args:
        content: what to send.
        seconds: for each part of it.
        on_close: called once, however the stream ends, even before it began.
    """

    def __init__(self, content: AsyncIterator[str], seconds: float, on_close: Callable[[], None]):
        super().__init__(content, media_type="text/event-stream")
        self._seconds, self._on_close = seconds, on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends everything, unless the client goes."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()

    async def stream_response(self, send: Send) -> None:
        """Sends the pieces, each within the time."""

        async def timed(message: Message) -> None:
            await asyncio.wait_for(send(message), self._seconds)

        try:
            await super().stream_response(timed)
        except TimeoutError:
            logger.info("a client took no data for %g s; its request is cancelled", self._seconds)
