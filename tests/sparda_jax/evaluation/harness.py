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


def local_tasks(rows, folder, monkeypatch):
    """Over a file of rows: what all tasks have in common, choices, answers; the hub is away."""
    monkeypatch.setenv("HF_HOME", str(folder / "hub"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = {"data_files": {"test": str(folder / "rows.jsonl")}, "cache_dir": str(folder / "cache")}
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": files,
        "test_split": "test",
        "doc_to_text": "{{q}}",
    }
    choose = {
        "task": "choose",
        "output_type": "multiple_choice",
        "doc_to_target": "gold",
        "doc_to_choice": "choices",
    }
    say = {
        "task": "say",
        "output_type": "generate_until",
        "doc_to_target": "x",
        "generation_kwargs": {"max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match"}],
    }
    return shared, shared | choose, shared | say
