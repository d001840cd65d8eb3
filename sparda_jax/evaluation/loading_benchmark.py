"""A full-size checkpoint with random weights: written, loaded and decoded, on one device or more.

Real names, shapes and shards of a preset; what loading takes, against reading the files alone and
copies of one array to the device; peak memory of host and device; what the model then decodes, and
on several devices how much faster, and whether the same.
"""

from __future__ import annotations

import json
import math
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from host_offload import memory
from sparda_jax.checkpoints.assemble import abstract_parameters
from sparda_jax.checkpoints.names import is_transposed, layout
from sparda_jax.config import EngineConfig, ModelConfig, SamplingParams, SparseConfig
from sparda_jax.diffusion.generate import BlockEngine
from sparda_jax.diffusion.plan import BlockEngineConfig
from sparda_jax.engine.generate import Engine
from sparda_jax.evaluation.kernel_benchmarks.harness import Row, Timing
from sparda_jax.evaluation.verification import fixed_prompt
from sparda_jax.forecast.projection import Forecast
from sparda_jax.presets import PRESETS
from sparda_jax.pretrained import Pretrained, from_pretrained
from sparda_jax.sharding import distribute, make_mesh

SHARD_BYTES = 5 << 30  # as published checkpoints are cut
DRAWN = 1 << 28  # random values for each width of a matrix
NEW_TOKENS = 128
TOP = 5  # likeliest tokens kept of each step


def write_checkpoint(name: str, folder: Path, shard_bytes: int = SHARD_BYTES) -> int:
    """Writes a preset's checkpoint with random bfloat16 weights of unit gain; returns its bytes.

    One tensor at a time, from draws that are made on the device: the whole is never in memory.

    Args:
        name: of the preset.
        folder: is made; files in it are replaced.
        shard_bytes: of a file, at most, but for one larger tensor.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(PRESETS[name]), indent=1))
    config = ModelConfig.preset(name)
    shapes = {path: leaf.shape for path, leaf in abstract_parameters(config).items()}
    places = layout(config, shapes)
    sizes = {tensor: stored.shape for stored in places.values() for tensor in stored.names}
    norms = {
        tensor
        for path, stored in places.items()
        if not is_transposed(path) and path[-1] == "scale"
        for tensor in stored.names
    }
    files: list[dict[str, int]] = [{}]  # bytes of each tensor, in the order of the file
    for tensor, shape in sizes.items():
        size = 2 * math.prod(shape)
        if files[-1] and sum(files[-1].values()) + size > shard_bytes:
            files.append({})
        files[-1][tensor] = size
    numbers = {tensor: number for number, tensor in enumerate(sizes)}
    weights, where = _Weights(), dict[str, str]()
    for count, tensors in enumerate(files, 1):
        file = f"model-{count:05}-of-{len(files):05}.safetensors"
        where.update(dict.fromkeys(tensors, file))
        with (folder / file).open("wb") as out:
            out.write(_header(tensors, sizes))
            for tensor in tensors:
                shape = sizes[tensor]
                values = weights(numbers[tensor], shape)
                (np.ones(shape, jnp.bfloat16) if tensor in norms else values).tofile(out)
    total = sum(sum(tensors.values()) for tensors in files)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


class _Weights:
    """Random matrices of unit gain, each another piece of one long draw for its width."""

    def __init__(self) -> None:
        self._drawn: dict[int, np.ndarray] = {}

    def __call__(self, number: int, shape: tuple[int, ...]) -> np.ndarray:
        """Matrix `number`."""
        width, size = shape[-1], math.prod(shape)
        if width not in self._drawn:
            key = jax.random.key(width)
            drawn = jax.random.normal(key, (DRAWN,), jnp.bfloat16) * width**-0.5
            self._drawn[width] = np.asarray(drawn)
        drawn = self._drawn[width]
        if size > DRAWN // 2:
            return np.resize(drawn, shape)
        start = number * 7919 * 4096 % (DRAWN - size)
        return drawn[start : start + size].reshape(shape)


def _header(tensors: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """What a safetensors file begins with: names, types, shapes and places, as JSON."""
    entries, end = {}, 0
    for tensor, size in tensors.items():
        place = [end, end + size]
        entries[tensor] = {"dtype": "BF16", "shape": shapes[tensor], "data_offsets": place}
        end += size
    text = json.dumps(entries)
    text += " " * (-len(text) % 8)  # so that the tensors are aligned
    return struct.pack("<Q", len(text)) + text.encode()


def _host_bytes(what: str) -> int:
    """This process's resident memory now (`VmRSS`) or at most since `_forget_peak` (`VmHWM`)."""
    status = Path("/proc/self/status").read_text("ascii")
    line = next(line for line in status.splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", "ascii")


def _read_rate(paths: Sequence[Path]) -> float:
    """Bytes per second of files read into one buffer, as the disk or its cache gives them."""
    buffer, start = bytearray(64 << 20), time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return sum(path.stat().st_size for path in paths) / (time.perf_counter() - start)


def _evict(paths: Sequence[Path]) -> None:
    """Files to the disk, and out of the page cache."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _copy_rate(kind: str | None) -> float:
    """Bytes per second to the device of one array: a plain one, or one in memory of this kind."""
    array = np.ones(1 << 30, np.uint8)
    place = memory.device_sharding(jax.devices()[0])
    source = array if kind is None else jax.device_put(array, place.with_memory_kind(kind))
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        jax.device_put(source, place).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return array.nbytes / min(seconds)


def _load_row(name: str, folder: Path, mesh: Mesh | None = None) -> tuple[Pretrained, Row]:
    """Loads; GB/s, and how much memory it took."""
    devices = jax.devices()[:1] if mesh is None else list(mesh.devices.flat)
    _forget_peak()
    before, free = _host_bytes("VmRSS"), memory.free_device_bytes(devices[0])
    loaded = from_pretrained(folder, mesh=mesh)
    left, stats = memory.free_device_bytes(devices[0]), devices[0].memory_stats() or {}
    details = {
        "seconds": loaded.report.seconds,
        "gib": loaded.report.bytes_read / 2**30,
        "peak_host_gib": (_host_bytes("VmHWM") - before) / 2**30,
        "device_gib": ((free or 0) - (left or 0)) / 2**30,
        "peak_device_gib": stats.get("peak_bytes_in_use", 0) / 2**30,
    }
    rate = loaded.report.bytes_read / loaded.report.seconds / 1e9
    return loaded, Row(name, Timing.exact(rate), "GB/s", "higher", details=details)


@dataclass(frozen=True)
class Decoded:
    """Greedy tokens of one engine, and how fast they came.

    Attributes:
        tokens: of each request.
        likeliest: the `TOP` likeliest tokens where each but a request's first was drawn.
        prefill: tokens a second, KV on the host at the end.
        decode: tokens a second of a call, the first calls left out.
        fetched: bytes a step that each device fetched.
    """

    tokens: np.ndarray
    likeliest: list[list[list[int]]]
    prefill: float
    decode: list[float]
    fetched: float


def _decode(loaded: Pretrained, sparse: SparseConfig, context: int, batch: int) -> Decoded:
    """SparDA, offloaded, on the devices the model lies on; weights of the Forecast are random."""
    forecast = Forecast.random(loaded.config, seed=1, dtype=loaded.model.dtype)
    engine_config = EngineConfig(
        mode="sparda",
        offload="host",
        prefill_chunk=4096,
        top_logprobs=TOP,
        max_length=context + batch + NEW_TOKENS,
    )
    place = jax.tree.leaves(loaded.model)[0].sharding
    if len(place.device_set) > 1:
        distribute(forecast, place.mesh)
    engine = Engine(loaded.model, sparse=sparse, config=engine_config, forecast=forecast)
    prompts = [fixed_prompt(loaded.config.vocab_size, context + row)[row:] for row in range(batch)]
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, logprobs=TOP)
    for _ in range(2):  # the first compiles and pins host memory
        generation = None
        generation = engine.prepare(prompts, sampling)
        start = time.perf_counter()
        generation.prefill()
        assert generation.pool is not None
        jax.block_until_ready(generation.pool.layers)
        seconds = time.perf_counter() - start - generation.report.prefill_compile_seconds
    assert generation is not None and generation.batch is not None
    report, rows = generation.report, generation.batch
    tokens = [[int(first)] for first in rows.state.last_token]
    likeliest: list[list[list[int]]] = [[] for _ in prompts]
    calls = []
    while np.any(rows.active):
        before, steps = report.decode_seconds, report.steps
        for gain in rows.decode():
            tokens[gain.row] += gain.tokens
            assert gain.likelihoods is not None
            likeliest[gain.row] += [[token for token, _ in each.top] for each in gain.likelihoods]
        calls.append(batch * (report.steps - steps) / (report.decode_seconds - before))
    return Decoded(
        np.array(tokens),
        likeliest,
        report.prefill_tokens / seconds,
        calls[len(calls) // 4 :],
        report.fetched_runs * report.run_bytes / report.steps / len(place.device_set),
    )


def compared(one: Decoded, other: Decoded) -> dict[str, float]:
    """How far another engine drew the same tokens, and how likely its first other one was.

    Two devices round sums otherwise than one, in bfloat16, and once a token differs so does all
    that follows. So beside the share of equal tokens stands the rank that the first different one
    had for the first engine: 2 where the rounding decided between its two likeliest.
    """
    equal = one.tokens == other.tokens
    until = np.where(equal.all(1), equal.shape[1], equal.argmin(1))
    ranks = [1]
    for row, at in enumerate(until.tolist()):
        if 0 < at < equal.shape[1]:
            found = one.likeliest[row][at - 1]
            token = int(other.tokens[row, at])
            ranks.append(found.index(token) + 1 if token in found else TOP + 1)
    return {
        "same_tokens": float(equal.mean()),
        "same_first_tokens": float(equal[:, 0].mean()),
        "same_until": float(until.min()),
        "rank_of_first_difference": float(max(ranks)),
    }


def _decode_blocks(name: str, loaded: Pretrained, context: int, batch: int) -> Row:
    """Tokens a second of a block diffusion model, resident KV; each step shows few tokens."""
    engine = BlockEngine(loaded.model, config=BlockEngineConfig(max_length=context + batch + 64))
    prompts = [fixed_prompt(loaded.config.vocab_size, context + row)[row:] for row in range(batch)]
    for _ in range(2):  # the first compiles
        results, report = engine.generate(prompts, SamplingParams(max_new_tokens=64))
    details = {
        "prefill_tok_s": report.prefill_tokens / report.prefill_seconds,
        "ms_per_forward": 1e3 * report.decode_seconds / report.forwards,
        "tokens": float(sum(len(result.tokens) for result in results)),
    }
    rate = Timing.exact(report.decode_tokens_per_second)
    return Row(f"{name}/decode/{context}/B{batch}", rate, "tok/s", "higher", details=details)


def rows(
    name: str, folder: Path, *, devices: int, context: int, batch: int, cold: bool
) -> Iterator[Row]:
    """Rows of the benchmark.

    Args:
        name: of the preset.
        folder: for the checkpoint; what is there already is loaded as it is.
        devices: 1, or how many share the heads.
        context: prompt tokens of the decode runs.
        batch: requests of the decode runs.
        cold: load once more, last, with nothing of the files in the page cache.
    """
    prefix = f"loading/{name}"
    if not (folder / "model.safetensors.index.json").exists():
        start = time.perf_counter()
        total = write_checkpoint(name, folder)
        rate = total / (time.perf_counter() - start) / 1e9
        yield Row(f"{prefix}/write", Timing.exact(rate), "GB/s", "higher")
    files = sorted(folder.glob("*.safetensors"))
    loaded, row = _load_row(f"{prefix}/load/devices1", folder)
    yield row
    for what, kind in (("plain", None), ("pinned", memory.HOST)):
        rate = _copy_rate(kind) / 1e9
        yield Row(f"{prefix}/copy/{what}", Timing.exact(rate), "GB/s", "higher")
    rate = _read_rate(files[:1]) / 1e9
    yield Row(f"{prefix}/read/cached", Timing.exact(rate), "GB/s", "higher")
    if loaded.config.diffusion is not None:
        yield _decode_blocks(prefix, loaded, context, batch)
    else:
        sparse = SparseConfig(init_blocks=1, local_blocks=32, budget_blocks=96)
        one = _decode(loaded, sparse, context, batch)
        yield from _speed_rows(prefix, context, one, one, 1)
        if devices > 1:
            del loaded
            loaded, row = _load_row(
                f"{prefix}/load/devices{devices}", folder, make_mesh(model=devices)
            )
            yield row
            many = _decode(loaded, sparse, context, batch)
            yield from _speed_rows(prefix, context, one, many, devices)
    del loaded
    if cold:
        _evict(files)
        rate = _read_rate(files[:1]) / 1e9
        yield Row(f"{prefix}/read/cold", Timing.exact(rate), "GB/s", "higher")
        _evict(files)
        yield _load_row(f"{prefix}/load/cold", folder)[1]


def _speed_rows(
    prefix: str, context: int, one: Decoded, run: Decoded, devices: int
) -> Iterator[Row]:
    details = compared(one, run)
    name = f"{context}/B{len(run.tokens)}/devices{devices}"
    prefill = Timing.exact(run.prefill)
    speed_up = {"speed_up": run.prefill / one.prefill}
    yield Row(f"{prefix}/prefill/{name}", prefill, "tok/s", "higher", details=speed_up)
    decode = Timing.of(run.decode)
    details["speed_up"] = decode.median / Timing.of(one.decode).median
    details["fetched_mb_per_step_and_device"] = run.fetched / 1e6
    yield Row(f"{prefix}/decode/{name}", decode, "tok/s", "higher", details=details)
