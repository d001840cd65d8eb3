"""What the tests of the two adapters to lm-evaluation-harness share."""

import json

from lm_eval.api.instance import Instance
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from sparda_jax.tokenization import Tokenizer

END, TEMPLATE = 0, "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<reply>"
LETTERS = "abcdefghijklmnopqrstuvwxyz .,;:!?<>="


def letters():
    """A token a letter, out of the 40 that the tiny model knows."""
    alphabet = ["<end>", *("Ġ" if c == " " else c for c in LETTERS), "#", "%"]
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, eos_token_ids=[END], chat_template=TEMPLATE)


def requests(kind, *args, document=None):
    """Requests of documents of their own, or of one."""
    return [
        Instance(kind, {}, a, i, ("task", i if document is None else document, 1))
        for i, a in enumerate(args)
    ]


def local_task(rows, folder, monkeypatch):
    """What tasks over a file of rows have in common; the hub is out of reach."""
    monkeypatch.setenv("HF_HOME", str(folder / "hub"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = {"data_files": {"test": str(folder / "rows.jsonl")}, "cache_dir": str(folder / "cache")}
    return {
        "dataset_path": "json",
        "dataset_kwargs": files,
        "test_split": "test",
        "doc_to_text": "{{q}}",
    }
