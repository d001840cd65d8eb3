"""Round trips, streaming and chat templates: SmolLM2's tokenizer and small made-up ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from sparda_jax.assets import load_excerpt
from sparda_jax.tokenization import Tokenizer

# Bytes that are not in SmolLM2's vocabulary: six control characters; F1 and F2 begin the code
# points U+40000 to U+BFFFF, none of which is assigned.
DROPPED = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, *range(0x40000, 0xC0000)}
RANGES = [(0x20, 0x7F), (0x00, 0x300), (0x300, 0x3000), (0x3000, 0xD800), (0xE000, 0x10000)]
RANGES += [(0x10000, 0x20000), (0x1F300, 0x1FAFF), (0x100000, 0x110000)]


def random_texts(count: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    texts = []
    for _ in range(count):
        low, high = RANGES[rng.integers(len(RANGES))]
        points = rng.integers(low, high, size=rng.integers(1, 40))
        texts.append("".join(chr(p) for p in points if p not in DROPPED))
    return texts


@pytest.fixture(scope="module")
def texts() -> list[str]:
    fixed = [
        "",
        " ",
        "\n\n\t ",
        "  two  spaces  ",
        "2024-11-29 3.14159",
        "don't",
        "\r\n",
        "e\u0301",
    ]
    fixed += [
        "👩‍👩‍👧‍👦 family",
        "שלום עולם",
        "\u200b\ufeff",
        "�",
        "��x",
        "<|im_start|>user\n",
        "<|im_",
        "a" * 300,
    ]
    return fixed + random_texts(150, seed=11)


def gguf_metadata(**changes: Any) -> dict[str, Any]:
    """A byte-level BPE with three control tokens, the 256 bytes and three merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|end|>", "<|begin|>", "<|unk|>", *alphabet, "th", "the", "12"]
    return {
        "ggml.model": "gpt2",
        "ggml.pre": "smollm",
        "ggml.tokens": tokens,
        "ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "ggml.merges": ["t h", "th e", "1 2"],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 0,
        "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
    } | changes


def sentencepiece_like() -> Tokenizer:
    """What Llama-2 and MiniCPM use: spaces as U+2581, a leading one added, bytes as tokens."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "é",
    ]
    bpe = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=[("▁", "a")],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    backend = Backend(bpe)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return Tokenizer(backend, eos_token_ids=[2], bos_token_id=1, add_bos=True)


def stream(tokenizer: Tokenizer, ids: list[int], step: int = 1) -> list[str]:
    decoder = tokenizer.stream_decoder()
    pieces = [decoder.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    return [*pieces, decoder.flush()]


@pytest.mark.smoke
def test_round_trip(default_tokenizer: Tokenizer, texts: list[str]) -> None:
    for text in texts:
        assert default_tokenizer.decode(default_tokenizer.encode(text)) == text


def test_round_trip_of_a_long_text(default_tokenizer: Tokenizer) -> None:
    text = load_excerpt()
    ids = default_tokenizer.encode(text)
    assert len(ids) == 30148
    assert default_tokenizer.decode(ids) == text


def test_bytes_that_the_vocabulary_lacks_are_dropped(default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.decode(default_tokenizer.encode("a\x04b")) == "ab"


def test_known_ids(default_tokenizer: Tokenizer) -> None:
    # Digits stand alone, special tokens are one id, no bos is added.
    assert default_tokenizer.encode("abc 123<|im_end|>") == [25276, 216, 33, 34, 35, 2]
    assert default_tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert default_tokenizer.vocab_size == 49152
    assert default_tokenizer.eos_token_ids == [2]
    assert default_tokenizer.bos_token_id == 1
    assert default_tokenizer.decode([1, 25276, 2], skip_special=True) == "abc"


def test_chat_template(default_tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "user", "content": "What is JAX?"},
        {"role": "assistant", "content": "A library."},
        {"role": "user", "content": "Thanks"},
    ]
    head = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nWhat is JAX?<|im_end|>\n<|im_start|>assistant\nA library."
        "<|im_end|>\n<|im_start|>user\nThanks<|im_end|>\n"
    )
    apply = default_tokenizer.apply_chat_template
    assert apply(messages, add_generation_prompt=False) == head
    assert apply(messages) == head + "<|im_start|>assistant\n"
    own = [{"role": "system", "content": "Be brief."}]
    assert apply(own, add_generation_prompt=False) == "<|im_start|>system\nBe brief.<|im_end|>\n"
    ids = default_tokenizer.encode_chat(messages)
    assert default_tokenizer.decode(ids) == head + "<|im_start|>assistant\n"
    assert ids.count(1) == 5
    assert ids.count(2) == 4


@pytest.mark.parametrize("step", [1, 3])
def test_stream_equals_one_shot(default_tokenizer: Tokenizer, texts: list[str], step: int) -> None:
    for text in texts:
        ids = default_tokenizer.encode(text)
        pieces = stream(default_tokenizer, ids, step)
        assert "".join(pieces) == text
        if "\ufffd" not in text:
            assert "\ufffd" not in "".join(pieces)


def test_stream_of_random_ids_equals_one_shot(default_tokenizer: Tokenizer) -> None:
    """Random ids give invalid UTF-8 too; special tokens among them."""
    rng = np.random.default_rng(7)
    # The bytes are among the first ids: half of the draws make cut and invalid sequences.
    for _ in range(50):
        low = rng.integers(0, 300, size=60)
        ids = np.where(rng.random(60) < 0.5, low, rng.integers(0, 49152, size=60)).tolist()
        for skip in (False, True):
            decoder = default_tokenizer.stream_decoder(skip_special=skip)
            pieces = [decoder.push(i) for i in ids] + [decoder.flush()]
            assert "".join(pieces) == default_tokenizer.decode(ids, skip_special=skip)


def test_stream_holds_back_half_a_character() -> None:
    tokenizer = Tokenizer.from_gguf(gguf_metadata())
    ids = tokenizer.encode("é€😀x")
    assert len(ids) == 2 + 3 + 4 + 1
    assert stream(tokenizer, ids) == ["", "é", "", "", "€", "", "", "", "😀", "x", ""]
    assert stream(tokenizer, ids[:4]) == ["", "é", "", "", "\ufffd"]


def test_stream_decoder_starts_afresh_after_flush() -> None:
    tokenizer = Tokenizer.from_gguf(gguf_metadata())
    decoder = tokenizer.stream_decoder()
    assert decoder.push(tokenizer.encode("the é")[:-1]) == "the "
    assert decoder.flush() == "\ufffd"
    assert decoder.push(tokenizer.encode("ab")) == "ab"
    assert decoder.flush() == ""


def test_sentencepiece_like_stream() -> None:
    tokenizer = sentencepiece_like()
    for text in ["a b", "b  a a", " a", "  b", "aé 😀 b€", "a\n\nb"]:
        ids = tokenizer.encode(text)
        assert ids[:2].count(1) == 1  # bos, once: the post-processor adds it, so add_bos does not
        body = tokenizer.encode(text, add_special=False)
        assert body == ids[1:]
        assert "".join(stream(tokenizer, body)) == tokenizer.decode(body) == text
        assert tokenizer.decode(ids, skip_special=True) == text


def test_add_bos() -> None:
    tokenizer = Tokenizer.from_gguf(gguf_metadata(**{"ggml.add_bos_token": True}))
    assert tokenizer.encode("the")[0] == 1
    assert tokenizer.encode("<|begin|>the").count(1) == 1
    assert 1 not in tokenizer.encode("the", add_special=False)
    assert tokenizer.encode_chat([{"role": "user", "content": "the"}]).count(1) == 1
    with pytest.raises(ValueError, match="no bos_token_id"):
        Tokenizer(Backend(models.BPE()), add_bos=True)


def test_gguf_metadata_details() -> None:
    metadata = gguf_metadata(**{"ggml.eot_token_id": 2})
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.eos_token_ids == [0, 2]
    tokens = metadata["ggml.tokens"]
    # Digits are split before merging, unlike GPT-2's.
    assert tokenizer.encode("the12") == [tokens.index(t) for t in ("the", "1", "2")]
    gpt2 = Tokenizer.from_gguf(gguf_metadata(**{"ggml.pre": "gpt-2"}))
    assert gpt2.encode("the12") == [tokens.index(t) for t in ("the", "12")]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"ggml.model": "llama"}, NotImplementedError, "model 'llama' is not supported"),
        ({"ggml.pre": "qwen2"}, NotImplementedError, "pre-tokenizer 'qwen2' is not supported"),
    ],
)
def test_unsupported_gguf_tokenizers(
    changes: dict[str, str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Tokenizer.from_gguf(gguf_metadata(**changes))
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.model is missing"):
        Tokenizer.from_gguf({})


def write_directory(path: Path, **files: Any) -> Path:
    Tokenizer.from_gguf(gguf_metadata())._backend.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return path


def test_directory(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<|begin|>", "special": True},
        "eos_token": "<|end|>",
        "chat_template": "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}",
    }
    path = write_directory(
        tmp_path, tokenizer_config=config, generation_config={"eos_token_id": [2, 0]}
    )
    tokenizer = Tokenizer.from_directory(path)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == [0, 2]
    assert tokenizer.decode(tokenizer.encode("the é 12")) == "the é 12"
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages) == "<|begin|>hi<|end|>"
    (path / "chat_template.jinja").write_text("file: {{ messages[0].content }}", encoding="utf-8")
    assert Tokenizer.from_directory(path).apply_chat_template(messages) == "file: hi"


def test_directory_with_little_in_it(tmp_path: Path) -> None:
    path = write_directory(tmp_path, config={"eos_token_id": 2})
    tokenizer = Tokenizer.from_directory(path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (None, [2])
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_directory_with_named_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    path = write_directory(tmp_path, tokenizer_config={"chat_template": named})
    assert Tokenizer.from_directory(path).apply_chat_template([]) == "d"


def test_bad_directories(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    path = write_directory(tmp_path)
    (path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: not JSON"):
        Tokenizer.from_directory(path)
    (path / "tokenizer_config.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(ValueError, match="found a list, expected an object"):
        Tokenizer.from_directory(path)
    (path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.from_directory(path)


def render(template: str, **variables: Any) -> str:
    tokenizer = Tokenizer(Backend(models.BPE()), chat_template=template)
    return tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], **variables)


def test_template_extras() -> None:
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "hi"}'
    assert render("{% for m in messages %}{% break %}{% endfor %}x") == "x"
    assert render("{% if flag %}on{% endif %}", flag=True) == "on"
    assert render("{{ strftime_now('%Y') }}").isdigit()
    assert render("a\n    {% if true %}\nb{% endif %}") == "a\nb"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "chat template: roles must alternate"),
        ("{% for %}", "chat template: "),
        ("{{ messages.append(1) }}", "chat template: .*not safe|unsafe"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "chat template: .*unsafe"),
        ("{{ ''.__class__.__base__ }}", "chat template: .*unsafe"),
        ("{{ 'a' + 1 }}", "chat template: TypeError"),
        ("{{ 1 / 0 }}", "chat template: ZeroDivisionError"),
    ],
)
def test_broken_and_hostile_templates(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render(template)
