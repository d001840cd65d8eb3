"""What the pictures are drawn from: blocks attended, and events of a trace."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts import benchmark
from sparda_jax.config import SamplingParams
from sparda_jax.diffusion.config import DenoiseParams
from sparda_jax.diffusion.generate import BlockEngine
from sparda_jax.diffusion.plan import BlockEngineConfig
from sparda_jax.diffusion.reference import decode_plainly
from sparda_jax.evaluation import attended, policies, report, timeline, unmasking
from sparda_jax.evaluation.plots import Event


def test_blocks_of_the_last_tokens(tiny):
    policy, tokens = policies.sparse_policy(4), tiny.tokens[0]
    blocks = attended.attended_blocks(tiny.model, policy, tokens, tiny.sparse, steps=3)
    assert blocks.shape == (4, 2, 3, 19)
    assert (blocks.sum(-1) == tiny.sparse.budget_blocks).all()
    for step, position in enumerate(range(73, 76)):
        own = position // 4  # the first, the one before and its own are forced
        assert blocks[:, :, step, [0, own - 1, own]].all()
        assert not blocks[:, :, step, own + 1 :].any()
    assert (report.blocks_of(attended.as_document(blocks)) == blocks).all()
    # Causal: what comes later changes nothing.
    other = np.concatenate([tokens[:75], tokens[:1]])
    again = attended.attended_blocks(tiny.model, policy, other, tiny.sparse, steps=3)
    assert (again[:, :, :2] == blocks[:, :, :2]).all()
    with pytest.raises(ValueError, match="dense attention attends all blocks"):
        attended.attended_blocks(tiny.model, policies.DENSE, tokens, tiny.sparse, 3)
    with pytest.raises(ValueError, match="99 steps of a sequence of 76 tokens"):
        attended.attended_blocks(tiny.model, policy, tokens, tiny.sparse, 99)


def test_order_of_unmasking(tiny, block_model):
    """As the slow twin decides, which has no cache: a prompt's tail, three blocks, a limit."""
    model = block_model(8)
    engine = BlockEngine(model, config=BlockEngineConfig(kv_block=16, prefill_chunk=32))
    prompt, sampling = tiny.tokens[0, :11].tolist(), SamplingParams(max_new_tokens=15)
    rule = DenoiseParams("low_confidence_static", steps=3)
    steps = unmasking.order_of(engine, prompt, sampling, rule)
    expected = np.full((3, 8), -1)
    _, plain = decode_plainly(model, prompt, sampling, rule)
    for start, group in itertools.groupby(plain, key=lambda step: step.start):
        for number, step in enumerate(group):
            expected[start // 8 - 1, step.decided] = number
    assert (steps == expected).all()
    assert (steps[0, :3] == -1).all() and steps[0, 3:].min() == 0 and steps.max() == 2


def test_events_of_a_trace(tmp_path, monkeypatch):
    product = jax.jit(lambda x: jnp.sin(x @ x).sum())
    x = jnp.ones((200, 200))
    product(x).block_until_ready()
    with jax.profiler.trace(str(tmp_path)):
        product(x).block_until_ready()
    events = timeline.read_trace(tmp_path, {"all": "."})
    assert events and all(event.name == "all" and event.duration > 0 for event in events)
    assert events == sorted(events, key=lambda event: event.start)
    path = tmp_path / "timeline.json"
    command = ["benchmark.py", "timeline", str(tmp_path), "--length=1e9", f"--json={path}"]
    monkeypatch.setattr("sys.argv", command)
    benchmark.main()
    document = json.loads(path.read_text())
    assert len(document["events"]) == len(events) == sum(row["n"] for row in document["rows"])
    with pytest.raises(FileNotFoundError, match="no trace"):
        timeline.read_trace(tmp_path / "nothing")


def test_kinds_and_windows():
    name = lambda text: next(
        (k for k, v in timeline.KINDS.items() if timeline.re.search(v, text)), 0
    )
    assert name("MemcpyH2D") == "copy to device" and name("fetch_blocks_kernel") == "copy to device"
    assert name("block_sparse_attention") == "attention" and name("nvjet_hsh") == "matrix product"
    events = [Event("a", "x", start, 1) for start in (5, 6, 9)]
    assert timeline.window(events, 1, 3) == events[1:2]
