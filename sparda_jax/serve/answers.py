"""Bodies of answers, whole and in pieces."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sparda_jax.engine.batch import Likelihood
from sparda_jax.engine.requests import Handle, Result
from sparda_jax.tokenization import Tokenizer


class Answers:
    """Writes the answers to one request.

    Args:
        name: of the model.
        number: unique in this process.
        chat: for the chat endpoint.
        tokenizer: for the text of single tokens.
    """

    def __init__(self, name: str, number: int, chat: bool, tokenizer: Tokenizer):
        self._chat, self._tokenizer = chat, tokenizer
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{number}",
            "created": int(time.time()),
            "model": name,
        }

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        """The answer when all choices have ended."""
        choices = []
        for index, result in enumerate(results):
            text = {"text": result.text}
            if self._chat:
                text = {"message": {"role": "assistant", "content": result.text, "refusal": None}}  # type: ignore[dict-item]
            choices.append(
                {
                    "index": index,
                    **text,
                    "logprobs": self._logprobs(result.tokens, result.likelihoods, 0),
                    "finish_reason": finish_reason(result),
                }
            )
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": usage(results)}

    def piece(
        self,
        index: int,
        text: str,
        tokens: Sequence[int] = (),
        likelihoods: Sequence[Likelihood] | None = None,
        *,
        offset: int = 0,
        reason: str | None = None,
        first: bool = False,
    ) -> dict[str, Any]:
        """A piece of one choice.

        Args:
            index: which choice.
            text: new.
            tokens: new.
            likelihoods: of the tokens.
            offset: characters that came before.
            reason: why it ended, in its last piece.
            first: the choice's first piece.
        """
        body: dict[str, Any] = {"text": text}
        if self._chat:
            delta = {"role": "assistant"} if first else {}
            body = {"delta": delta | ({"content": text} if text or first else {})}
        choice = {
            "index": index,
            **body,
            "logprobs": self._logprobs(tokens, likelihoods, offset),
            "finish_reason": reason,
        }
        return self._chunk([choice])

    def counts(self, results: Sequence[Result]) -> dict[str, Any]:
        """The last piece of a stream that asked for the counts."""
        return self._chunk([]) | {"usage": usage(results)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([token])

    def _logprobs(
        self, tokens: Sequence[int], likelihoods: Sequence[Likelihood] | None, offset: int
    ) -> dict[str, Any] | None:
        if likelihoods is None:
            return None
        pairs = list(zip(tokens, likelihoods, strict=True))
        if self._chat:
            content = [
                self._entry(token, each.drawn)
                | {"top_logprobs": [self._entry(*other) for other in each.top]}
                for token, each in pairs
            ]
            return {"content": content, "refusal": None}
        texts = [self._text(token) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [each.drawn for each in likelihoods],
            "top_logprobs": [
                {self._text(other): value for other, value in each.top} for each in likelihoods
            ],
            "text_offset": offsets,
        }

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": value, "bytes": list(text.encode())}


def finish_reason(result: Result) -> str:
    """The client's word for why a request ended."""
    return "length" if result.finish_reason == "length" else "stop"


def usage(results: Sequence[Result]) -> dict[str, Any]:
    """Counts of all choices; a prompt counts once for each."""
    prompt = sum(result.prompt_tokens for result in results)
    completion = sum(len(result.tokens) for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(result.cached_tokens for result in results)},
    }


def results_of(handles: Sequence[Handle]) -> list[Result]:
    """Results of requests that have ended."""
    return [handle.result() for handle in handles]
