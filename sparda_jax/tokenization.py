"""Text to token ids and back, chat templates, and text that streams out token by token.

One small class over the ``tokenizers`` library, built from GGUF metadata or from a Hugging Face
model directory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers

__all__ = ["StreamDecoder", "Tokenizer"]

# token_type in GGUF metadata
_CONTROL, _USER_DEFINED = 3, 4
# Decoding a cut UTF-8 sequence gives this character.
_REPLACEMENT = "\ufffd"


class Tokenizer:
    """A tokenizer with its special tokens and chat template.

    Attributes:
        bos_token_id: Begin-of-sequence id, None where there is none.
        eos_token_ids: Every id that ends a generation, ascending.
        chat_template: The Jinja source, None where there is none.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Iterable[int] = (),
        bos_token_id: int | None = None,
        add_bos: bool = False,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """Wraps a ``tokenizers.Tokenizer``.

        Args:
            add_bos: `encode` puts the bos id first, beyond what the backend's own post-processor
                does.
            special_tokens: Names that the chat template may use, e.g. ``{"bos_token": "<s>"}``.
        """
        self._backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_ids = sorted(set(eos_token_ids))
        self.chat_template = chat_template
        self._special_tokens = dict(special_tokens or {})
        if add_bos and bos_token_id is None:
            raise ValueError("add_bos is set, but there is no bos_token_id")
        self._add_bos = add_bos

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Builds a byte-level BPE from `sparda_jax.checkpoints.gguf.GGUFCheckpoint.tokenizer`.

        Raises:
            ValueError: A key is missing.
            NotImplementedError: Another tokenizer model or pre-tokenizer than those below.
        """
        return _from_gguf(cls, metadata)

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Reads ``tokenizer.json`` and, where present, the files around it.

        ``tokenizer_config.json`` names the special tokens and may hold the chat template;
        ``chat_template.jinja`` wins over that. End-of-sequence ids are the tokenizer's own and
        those of ``generation_config.json``, or of ``config.json`` where that says nothing.

        Raises:
            FileNotFoundError: No ``tokenizer.json``.
            ValueError: A file that does not parse.
        """
        return _from_directory(cls, Path(path))

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def fingerprint(self) -> str:
        """SHA-256 of vocabulary, rules and chat template."""
        text = f"{self._backend.to_str()}\n{self.chat_template}"
        return hashlib.sha256(text.encode()).hexdigest()

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of `text`.

        Args:
            add_special: Add what the model expects around a plain text (often a bos). False for
                text from `apply_chat_template`, which writes those tokens itself.
        """
        ids = list(self._backend.encode(text, add_special_tokens=add_special).ids)
        if add_special and self._add_bos and ids[:1] != [self.bos_token_id]:
            assert self.bos_token_id is not None
            ids.insert(0, self.bos_token_id)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of token ids; a cut or invalid UTF-8 sequence becomes U+FFFD."""
        ids = [int(i) for i in ids]
        return str(self._backend.decode(ids, skip_special_tokens=skip_special))

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation as the chat template writes it."""
        text = self.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special=False)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text of a conversation, ``[{"role": "user", "content": "..."}, ...]``.

        Templates come with downloaded models, so they run in Jinja's immutable sandbox.

        Args:
            add_generation_prompt: End with the header of the assistant's turn.
            variables: More names for the template, e.g. ``enable_thinking=False``.

        Raises:
            ValueError: No chat template, a broken one, or one that refuses these messages.
        """
        if self.chat_template is None:
            raise ValueError("this model has no chat template; give it plain text")
        return _render(
            self.chat_template,
            {
                "messages": [dict(message) for message in messages],
                "add_generation_prompt": add_generation_prompt,
                "tools": None,
                "documents": None,
                **self._special_tokens,
                **variables,
            },
        )

    def stream_decoder(self, *, skip_special: bool = False) -> StreamDecoder:
        """A new `StreamDecoder` for one generation."""
        return StreamDecoder(self, skip_special=skip_special)


class StreamDecoder:
    """Turns ids that arrive one by one into text, never emitting half a character.

    The pieces joined are what `Tokenizer.decode` gives for all ids at once. (One exception: with a
    SentencePiece-like tokenizer, invalid UTF-8 spelled in byte tokens right after valid ones.)
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        """Starts an empty stream; see `Tokenizer.decode` for `skip_special`."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        # Ids whose text is out already, kept because some decoders treat the first id of a text
        # differently (they strip its space); then the ids whose text is not all out.
        self._context: list[int] = []
        self._pending: list[int] = []
        self._emitted = 0  # characters of decode(context + pending)

    def push(self, ids: int | Iterable[int]) -> str:
        """The text that became certain with these ids; may be empty."""
        self._pending.extend([ids] if isinstance(ids, int) else (int(i) for i in ids))
        return self._advance(final=False)

    def flush(self) -> str:
        """The rest, an unfinished character as U+FFFD. The stream starts afresh afterwards."""
        text = self._advance(final=True)
        self._context, self._pending, self._emitted = [], [], 0
        return text

    def _advance(self, *, final: bool) -> str:
        text = self._decode(self._context + self._pending)
        # More bytes may turn a trailing U+FFFD into a character.
        stable = text if final else text.rstrip(_REPLACEMENT)
        delta = stable[self._emitted :]
        self._emitted = max(self._emitted, len(stable))
        if stable == text and self._decode(self._pending):
            self._context, self._pending = self._pending, []
            self._emitted = len(self._decode(self._context))
        return delta

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip_special)


def _from_gguf(cls: type[Tokenizer], metadata: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    def get(key: str) -> Any:
        if key not in metadata:
            raise ValueError(f"GGUF metadata key tokenizer.{key} is missing")
        return metadata[key]

    model, pre = get("ggml.model"), metadata.get("ggml.pre", "gpt-2")
    if model != "gpt2":
        raise NotImplementedError(f"GGUF tokenizer model {model!r} is not supported, only 'gpt2'")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    splitters = {
        "gpt-2": byte_level,
        "smollm": pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), byte_level]
        ),
    }
    if pre not in splitters:
        raise NotImplementedError(
            f"GGUF pre-tokenizer {pre!r} is not supported, only {', '.join(splitters)}"
        )
    tokens = get("ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in get("ggml.merges")]
    # Without an unknown token: the few bytes that are not in the vocabulary are dropped.
    bpe = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    backend = tokenizers.Tokenizer(bpe)
    backend.pre_tokenizer = splitters[pre]
    backend.decoder = decoders.ByteLevel()
    types = metadata.get("ggml.token_type", [])
    control = [t for t, kind in zip(tokens, types, strict=False) if kind == _CONTROL]
    defined = [t for t, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    backend.add_tokens([AddedToken(t, normalized=False) for t in defined])
    ids = {f"{n}_token": metadata.get(f"ggml.{n}_token_id") for n in ("bos", "eos", "unknown")}
    ends = [metadata.get(f"ggml.{name}_token_id") for name in ("eos", "eot")]
    return cls(
        backend,
        eos_token_ids=[i for i in ends if i is not None],
        bos_token_id=ids["bos_token"],
        add_bos=bool(metadata.get("ggml.add_bos_token", False)),
        chat_template=metadata.get("chat_template"),
        special_tokens={name: tokens[i] for name, i in ids.items() if i is not None},
    )


def _from_directory(cls: type[Tokenizer], path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{path}: no tokenizer.json")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{file}: not a tokenizer of the tokenizers library: {error}") from error
    # A file made for training may ask for padding or cutting; neither is wanted here.
    backend.no_padding()
    backend.no_truncation()
    config = _read_json(path / "tokenizer_config.json")
    names = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token")}
    special = {name: text for name, text in names.items() if text is not None}
    bos, eos = (backend.token_to_id(special[n]) if n in special else None for n in names)
    ends = _read_json(path / "generation_config.json").get("eos_token_id")
    if ends is None:
        ends = _read_json(path / "config.json").get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    return cls(
        backend,
        eos_token_ids=[i for i in (*ends, eos) if i is not None],
        bos_token_id=bos,
        # tokenizer.json's own post-processor decides, and usually adds it; this is for old files.
        add_bos=bool(config.get("add_bos_token", False)) and bos is not None,
        chat_template=_directory_template(path, config),
        special_tokens=special,
    )


def _directory_template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: found a {type(content).__name__}, expected an object")
    return content


def _token_text(token: Any) -> str | None:
    # Either the text or a serialised AddedToken
    return token.get("content") if isinstance(token, dict) else token


def _render(template: str, variables: Mapping[str, Any]) -> str:
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    # trim_blocks and lstrip_blocks are what published templates are written for.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template).render(**variables)
    except jinja2.TemplateError as error:
        raise ValueError(f"chat template: {error}") from error
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"chat template: {type(error).__name__}: {error}") from error
