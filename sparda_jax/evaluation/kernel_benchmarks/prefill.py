"""Prefill: selection for every token of a prompt, and block-sparse attention over the lists."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.block_selection import (
    Selection,
    select_blocks_forecast,
    select_blocks_multi_head,
)
from pallas_kernels.block_sparse_attention import block_sparse_attention, specs
from pallas_kernels.geometry import BlockGeometry
from pallas_kernels.teacher_scores import teacher_scores
from sparda_jax.evaluation.kernel_benchmarks.harness import (
    Row,
    Session,
    Timing,
    benchmark,
    converted,
    time_calls,
)

GEOMETRY = BlockGeometry(64, 32, 16)
# Dense bf16 wgmma peak of an H200 by NVIDIA's datasheet, in TFLOP/s.
PEAK = 989.0
# MiniCPM4.1-8B selects its own block and the 32 before it (spec/sparda.md 3.3).
LOCAL_BLOCKS = 32


@benchmark("block_sparse_attention")
def attention(session: Session) -> Iterator[Row]:
    """TFLOP/s counted on selected pairs; lists whose free blocks drift (see ``specs``).

    ``drift10``: each of the 62 free blocks is redrawn with probability 0.10 from one token to
    the next; ``random``: every list is drawn anew.
    """
    for length in ("24K", "32K", "128K"):
        yield from _attention(session, length, ("drift10",))
    yield from _attention(session, "128K", ("drift5", "drift20", "random"))


def _attention(session: Session, length: str, kinds: tuple[str, ...]) -> Iterator[Row]:
    spec = specs.MINICPM[length]
    q, kv, positions = _attention_inputs(spec)
    call = jax.jit(functools.partial(block_sparse_attention, implementation="mosaic"))
    dense = _dense_time(spec, q, kv) if kinds == ("drift10",) else None
    churns = {"drift5": 0.05, "drift10": 0.1, "drift20": 0.2, "random": 1.0}
    for kind in kinds:
        ids = specs.drifting_lists(spec, churns[kind])
        pairs = float(specs.selected_pairs(ids, positions, spec.block_size))
        work = pairs * (spec.heads // spec.kv_heads) * 4 * spec.head_dim * 1e-6
        timing = time_calls(
            functools.partial(call, q, kv, ids, positions),
            calls=1,
            repetitions=session.repetitions,
        )
        rate = converted(timing, work)
        error = None
        if session.refcheck:
            error = _attention_error(call(q, kv, ids, positions), q, kv, ids, positions)
        name = f"block_sparse_attention/{kind}/{length}"
        yield Row(
            name=name,
            timing=rate,
            unit="TFLOP/s",
            better="higher",
            target=300.0 if length == "128K" and kind != "random" else None,
            of_roofline=rate.median / PEAK,
            error=error,
        )
        sizes = [float(specs.union_size(ids, tokens)) for tokens in (4, 8)]
        for tokens, size in zip((4, 8), sizes, strict=True):
            yield Row(f"{name}/union_of_{tokens}", Timing.exact(size), "blocks", "lower")
        if dense is not None:
            yield Row(
                name=f"{name}/time",
                timing=timing,
                unit="us",
                better="lower",
                target=dense.median,
                peers={"cudnn dense causal": dense.median},
            )


@functools.partial(jax.jit, static_argnums=0)
def _attention_inputs(spec: specs.Spec) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(1))
    blocks = spec.tokens // spec.block_size
    q = (1, spec.tokens, spec.heads, spec.head_dim)
    kv = (1, spec.kv_heads, blocks, 2, spec.block_size, spec.head_dim)
    normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    return normal(keys[0], q), normal(keys[1], kv), jnp.arange(spec.tokens, dtype=jnp.int32)[None]


def _dense_time(spec: specs.Spec, q: jax.Array, kv: jax.Array) -> Timing:
    """cuDNN's causal attention over all tokens."""
    shape = (1, spec.kv_heads, spec.tokens, spec.head_dim)
    k, v = (kv[:, :, :, i].reshape(shape).swapaxes(1, 2) for i in range(2))
    dense = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    return time_calls(functools.partial(jax.jit(dense), q, k, v), calls=1, repetitions=3)


def _attention_error(
    out: jax.Array, q: jax.Array, kv: jax.Array, ids: jax.Array, positions: jax.Array
) -> float:
    """Relative L2 error of 16 tokens against the reference."""
    tokens = np.random.default_rng(0).choice(q.shape[1], 16, replace=False)
    reference = jax.jit(functools.partial(block_sparse_attention, implementation="xla"))
    with jax.default_matmul_precision("highest"):
        expected = reference(q[:, tokens], kv, ids[:, :, tokens], positions[:, tokens])
    expected = np.asarray(expected, np.float64)
    error = np.asarray(out[:, tokens], np.float64) - expected
    return float(np.linalg.norm(error) / np.linalg.norm(expected))


@benchmark("block_selection/prefill")
def selection(session: Session) -> Iterator[Row]:
    """Selection for every token of a prompt of 128K: K=2, G=16, H=128, R=96."""
    times = {}
    for name, select in (
        ("multi_head", select_blocks_multi_head),
        ("forecast", select_blocks_forecast),
    ):
        arguments, rules = _selection_inputs(131072, 32 if name == "multi_head" else 2)
        timing, memory, chosen = _selection_time(session, select, arguments, rules, "mosaic")
        peer, _, _ = _selection_time(session, select, arguments, rules, "xla")
        times[name] = timing.median
        target = peer.median / 5 if name == "multi_head" else times["multi_head"] / 3
        path = f"block_selection/{name}/prefill/128K"
        yield Row(
            name=path,
            timing=timing,
            unit="us",
            better="lower",
            target=target,
            peers={"xla": peer.median},
            error=_disagreement(select, arguments, rules, chosen) if session.refcheck else None,
        )
        yield Row(f"{path}/extra_memory", Timing.exact(memory), "MiB", "lower", target=256.0)


@benchmark("block_selection/coarse/prefill")
def coarse_selection(session: Session) -> Iterator[Row]:
    """Multi-head selection of 128K tokens with the softmax's sums over 4 times coarser keys."""
    arguments, rules = _selection_inputs(131072, 32)
    exact, _, _ = _selection_time(session, select_blocks_multi_head, arguments, rules, "mosaic")
    geometry = BlockGeometry(256, 128, 64)
    shape = (1, 2, geometry.num_compressed(131072), 128)
    rules |= {
        "coarse": jax.random.normal(jax.random.key(3), shape, jnp.bfloat16),
        "coarse_visible": geometry.complete_windows(jnp.arange(131072, dtype=jnp.int32)[None]),
    }
    timing, _, chosen = _selection_time(
        session, select_blocks_multi_head, arguments, rules, "mosaic"
    )
    error = None
    if session.refcheck:
        last = rules | {"coarse_visible": rules["coarse_visible"][:, -1024:]}
        error = _disagreement(select_blocks_multi_head, arguments, last, chosen)
    yield Row(
        name="block_selection/multi_head/prefill/128K/coarse",
        timing=timing,
        unit="us",
        better="lower",
        peers={"exact sums": exact.median},
        error=error,
    )


def _selection_inputs(tokens: int, heads: int) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    kv_heads, head_dim = 2, 128
    capacity = GEOMETRY.num_compressed(tokens)
    keys = jax.random.split(jax.random.key(2))
    position = jnp.arange(tokens, dtype=jnp.int32)[None]
    windows = GEOMETRY.complete_windows if heads > kv_heads else GEOMETRY.started_windows
    arguments = (
        jax.random.normal(keys[0], (1, tokens, heads, head_dim), jnp.bfloat16),
        jax.random.normal(keys[1], (1, kv_heads, capacity, head_dim), jnp.bfloat16),
        position // GEOMETRY.block_size,
        jnp.minimum(windows(position), capacity),
    )
    rules = {
        "num_blocks": tokens // GEOMETRY.block_size,
        "geometry": GEOMETRY,
        "init_blocks": 1,
        "local_blocks": LOCAL_BLOCKS,
        "budget": 96,
    }
    return arguments, rules


def _selection_time(
    session: Session,
    select: Callable[..., Selection],
    arguments: tuple[jax.Array, ...],
    rules: dict[str, Any],
    implementation: str,
) -> tuple[Timing, float, Selection]:
    """Timing, MiB of device memory beyond arguments and result, result."""
    call = functools.partial(select, **rules, implementation=implementation)
    program = jax.jit(call).lower(*arguments).compile()
    timing = time_calls(
        functools.partial(program, *arguments),
        calls=1,
        repetitions=session.repetitions if implementation == "mosaic" else 2,
    )
    return timing, _extra_memory(program), program(*arguments)


def _extra_memory(program: jax.stages.Compiled) -> float:
    """MiB of device memory beyond arguments and results."""
    analysis = program.memory_analysis()
    return float("nan") if analysis is None else analysis.temp_size_in_bytes / 2**20


def _disagreement(
    select: Callable[..., Selection],
    arguments: tuple[jax.Array, ...],
    rules: dict[str, Any],
    chosen: Selection,
) -> float:
    """Share of the blocks of the last 1024 tokens that the reference, in float32, does not choose.

    Rounding decides near ties.
    """
    queries, compressed, *rest = arguments
    last = [queries[:, -1024:], compressed, *(x[:, -1024:] for x in rest)]
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(functools.partial(select, **rules, implementation="xla"))(*last)
    bits = [
        jax.nn.one_hot(ids, rules["num_blocks"], dtype=jnp.int8).sum(axis=3)
        for ids in (chosen.ids[:, :, -1024:], expected.ids)
    ]
    return float((bits[0] != bits[1]).sum() / (2 * expected.count.sum()))


@benchmark("teacher_scores")
def teacher(session: Session) -> Iterator[Row]:
    """One layer, 64K tokens, N=32, K=2, H=128; both passes' products over visible keys count."""
    tokens, heads, kv_heads, head_dim = 65536, 32, 2, 128
    random = jax.random.split(jax.random.key(3))
    q = jax.random.normal(random[0], (1, tokens, heads, head_dim), jnp.bfloat16)
    keys = jax.random.normal(random[1], (1, kv_heads, tokens, head_dim), jnp.bfloat16)
    positions = jnp.arange(tokens, dtype=jnp.int32)[None]
    call = functools.partial(teacher_scores, geometry=GEOMETRY)
    kernel = jax.jit(functools.partial(call, implementation="mosaic"))
    program = kernel.lower(q, keys, positions).compile()
    timing = time_calls(functools.partial(program, q, keys, positions), calls=1, repetitions=3)
    # Two passes, 2 H operations a pair, half of all pairs visible.
    work = 2 * heads * 2 * head_dim * tokens * (tokens + 1) / 2 * 1e-6
    rate = converted(timing, work)
    error = None
    if session.refcheck:
        some = np.random.default_rng(0).choice(tokens, 32, replace=False)
        with jax.default_matmul_precision("highest"):
            reference = call(q[:, some], keys, positions[:, some], implementation="xla")
        expected = np.asarray(reference, np.float64)
        got = np.asarray(program(q, keys, positions)[:, :, some], np.float64)
        error = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
    yield Row(
        name="teacher_scores/64K",
        timing=rate,
        unit="TFLOP/s",
        better="higher",
        target=250.0,
        of_roofline=rate.median / PEAK,
        error=error,
    )
    yield Row(
        "teacher_scores/64K/extra_memory",
        Timing.exact(_extra_memory(program)),
        "MiB",
        "lower",
        target=2048.0,
    )
