"""Documents, their split, windows and the order in which they come."""

import json

import numpy as np
import pytest

from sparda_jax.forecast.data import batch_at, pack, read_documents, split_documents


def encode(text):
    return list(text.encode())


def test_every_kind_of_file(tmp_path):
    (tmp_path / "a.txt").write_text("héllo")
    lines = [json.dumps({"text": t}) for t in ("one", "two")]
    (tmp_path / "b.jsonl").write_text("\n\n".join(lines) + "\n")
    np.save(tmp_path / "c.npy", np.array([5, 6, 7], np.uint16))
    (tmp_path / "empty.txt").write_text("")
    paths = [tmp_path / name for name in ("a.txt", "b.jsonl", "c.npy", "empty.txt")]
    got = [d.tolist() for d in read_documents(paths, encode)]
    assert got == [encode("héllo"), encode("one"), encode("two"), [5, 6, 7]]


def test_bad_files_are_named(tmp_path):
    def check(name, content, error, match):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(error, match=match):
            read_documents([tmp_path / name], encode)

    with pytest.raises(FileNotFoundError, match=r"no training text at \S+none.txt"):
        read_documents([tmp_path / "none.txt"], encode)
    check("a.txt", b"\xff", ValueError, "a.txt is not UTF-8")
    for line in (b'{"no": 1}', b"[1]", b"{"):
        check("b.jsonl", b'{"text": "x"}\n' + line, ValueError, "b.jsonl, line 2")
    np.save(tmp_path / "c.npy", np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"c.npy holds float64\[2, 2\]"):
        read_documents([tmp_path / "c.npy"], encode)


def test_split_is_by_document():
    documents = [np.full(3, i) for i in range(10)]
    train, held = split_documents(documents, 0.15, seed=1)
    assert len(train) == 8 and len(held) == 2
    assert {int(d[0]) for d in train} | {int(d[0]) for d in held} == set(range(10))
    again = split_documents(documents, 0.15, seed=1)[1]
    assert [int(d[0]) for d in again] == [int(d[0]) for d in held]
    assert len(split_documents(documents, 0.0, seed=1)[1]) == 0
    with pytest.raises(ValueError, match="1 documents cannot be split: 1 would be held out"):
        split_documents(documents[:1], 0.1, seed=1)
    with pytest.raises(ValueError, match=r"in \[0, 1\), got 1"):
        split_documents(documents, 1, seed=1)


def test_pack():
    windows = pack([np.array([1, 2, 3]), np.array([4, 5])], 3, separator=0)
    assert windows.tokens.tolist() == [[1, 2, 3], [0, 4, 5]]  # the last 0 is left over
    assert windows.documents.tolist() == [[0, 0, 0], [0, 1, 1]]
    assert windows.tokens.dtype == windows.documents.dtype == np.int32
    assert pack([np.array([1, 2])], 2, separator=None).tokens.tolist() == [[1, 2]]
    assert len(pack([], 4, None)) == 0


def test_every_window_once_an_epoch():
    windows = pack([np.arange(7)], 1, None)
    seen = np.concatenate([batch_at(windows, step, 2, seed=3)[:, 0] for step in range(7)])
    for epoch in (seen[:7], seen[7:]):
        assert sorted(epoch) == list(range(7))
    assert seen[:7].tolist() != seen[7:].tolist()
    np.testing.assert_array_equal(batch_at(windows, 3, 2, seed=3)[:, 0], seen[6:8])
    assert batch_at(windows, 0, 20, seed=3).shape == (20, 1)  # more than an epoch in one step
