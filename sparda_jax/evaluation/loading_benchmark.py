"""A full-size checkpoint with random weights: written, loaded and decoded, on one device or more.

Real names, shapes and shards of a preset; what loading takes, against the disk read alone and a
copy of one array to the device; peak memory of host and device; and, on several devices, the same
tokens as on one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from host_offload.memory import free_device_bytes
from sparda_jax.checkpoints.assemble import abstract_parameters
from sparda_jax.checkpoints.names import is_transposed, layout
from sparda_jax.config import EngineConfig, ModelConfig, SamplingParams, SparseConfig
from sparda_jax.diffusion.masks import block_causal_mask
from sparda_jax.engine.generate import Engine
from sparda_jax.evaluation.kernel_benchmarks.harness import Row, Timing
from sparda_jax.evaluation.verification import fixed_prompt
from sparda_jax.forecast.projection import Forecast
from sparda_jax.presets import PRESETS
from sparda_jax.pretrained import Pretrained, from_pretrained
from sparda_jax.sharding import distribute, make_mesh

SHARD_BYTES = 5 << 30  # as published checkpoints are cut


def write_checkpoint(name: str, folder: Path, shard_bytes: int = SHARD_BYTES) -> int:
    """Writes a preset's checkpoint with random bfloat16 weights of unit gain; returns its bytes.

    Args:
        name: of the preset.
        folder: is made; files in it are replaced.
        shard_bytes: of a file, about.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(PRESETS[name]), indent=1))
    config = ModelConfig.preset(name)
    shapes = {path: leaf.shape for path, leaf in abstract_parameters(config).items()}
    sizes = {
        tensor: stored.shape
        for stored in layout(config, shapes).values()
        for tensor in stored.names
    }
    norms = {
        tensor
        for path, stored in layout(config, shapes).items()
        if not is_transposed(path) and path[-1] == "scale"
        for tensor in stored.names
    }
    draw = jax.jit(
        lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16) * shape[-1] ** -0.5,
        static_argnums=1,
    )
    where: dict[str, str] = {}
    shard: dict[str, np.ndarray] = {}
    total = 0

    def flush() -> None:
        file = f"model-{len(set(where.values())) + 1:05}.safetensors"
        save_file(shard, folder / file)
        where.update(dict.fromkeys(shard, file))
        shard.clear()

    for number, (tensor, shape) in enumerate(sizes.items()):
        one = jnp.ones(shape, jnp.bfloat16) if tensor in norms else None
        shard[tensor] = np.asarray(draw(jax.random.key(number), shape) if one is None else one)
        total += shard[tensor].nbytes
        if sum(array.nbytes for array in shard.values()) >= shard_bytes:
            flush()
    if shard:
        flush()
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _host_bytes(what: str) -> int:
    """This process's resident memory now (`VmRSS`) or at most since `_forget_peak` (`VmHWM`)."""
    status = Path("/proc/self/status").read_text("ascii")
    line = next(line for line in status.splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", "ascii")


def _read_seconds(folder: Path) -> float:
    """Seconds to read all shards into one buffer, as the disk or its cache gives them."""
    buffer, start = bytearray(64 << 20), time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - start


def _copy_rate() -> float:
    """Bytes per second of one plain array to the device."""
    array = np.ones(256 << 20, np.uint8)
    jax.device_put(array).block_until_ready()
    start = time.perf_counter()
    jax.device_put(array).block_until_ready()
    return array.nbytes / (time.perf_counter() - start)


def _decode(loaded: Pretrained, sparse: SparseConfig, context: int, batch: int) -> dict[str, Any]:
    """Tokens and speed of sparda with offload; weights of the Forecast are random."""
    forecast = Forecast.random(loaded.config, seed=1, dtype=loaded.model.dtype)
    engine_config = EngineConfig(
        mode="sparda", offload="host", prefill_chunk=4096, max_length=context + 128
    )
    place = jax.tree.leaves(loaded.model)[0].sharding
    if len(place.device_set) > 1:
        distribute(forecast, place.mesh)
    engine = Engine(loaded.model, sparse=sparse, config=engine_config, forecast=forecast)
    prompts = [fixed_prompt(loaded.config.vocab_size, context + row)[row:] for row in range(batch)]
    results, report = engine.generate(prompts, SamplingParams(max_new_tokens=64))
    return {
        "tokens": [result.tokens for result in results],
        "prefill": report.prefill_tokens / report.prefill_seconds,
        "decode": batch * report.steps / report.decode_seconds,
        "fetched": report.fetched_runs * report.run_bytes / len(place.device_set),
    }


def _forward_ms(loaded: Pretrained, tokens: int) -> float:
    """Milliseconds of a block-causal forward of one block diffusion model."""
    assert loaded.config.diffusion is not None
    mask = block_causal_mask(tokens, loaded.config.diffusion.block_size)
    ids = jnp.asarray([fixed_prompt(loaded.config.vocab_size, tokens)], jnp.int32)
    run = jax.jit(lambda model, ids: model(ids, mask=mask)[0, -1].argmax())
    run(loaded.model, ids).block_until_ready()
    start = time.perf_counter()
    run(loaded.model, ids).block_until_ready()
    return 1e3 * (time.perf_counter() - start)


def rows(name: str, folder: Path, *, devices: int, context: int, batch: int) -> Iterator[Row]:
    """Rows of the benchmark.

    Args:
        name: of the preset.
        folder: for the checkpoint; what is there already is loaded as it is.
        devices: 1, or how many share the heads.
        context: prompt tokens of the decode runs.
        batch: requests of the decode runs.
    """
    if not (folder / "model.safetensors.index.json").exists():
        start = time.perf_counter()
        total = write_checkpoint(name, folder)
        rate = total / (time.perf_counter() - start) / 1e9
        yield Row(f"loading/{name}/write", Timing.exact(rate), "GB/s", "higher")
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    bounds = {"read": size / _read_seconds(folder) / 1e9, "copy": _copy_rate() / 1e9}
    _forget_peak()
    before = _host_bytes("VmRSS")
    free = free_device_bytes(jax.devices()[0])
    one = from_pretrained(folder)
    details = {f"{bound}_gb_s": value for bound, value in bounds.items()} | {
        "peak_host_gib": (_host_bytes("VmHWM") - before) / 2**30,
        "device_gib": ((free or 0) - (free_device_bytes(jax.devices()[0]) or 0)) / 2**30,
    }
    rate = one.report.bytes_read / one.report.seconds / 1e9
    yield Row(f"loading/{name}/1", Timing.exact(rate), "GB/s", "higher", details=details)
    if one.config.diffusion is not None:
        yield Row(
            f"loading/{name}/forward/1024", Timing.exact(_forward_ms(one, 1024)), "ms", "lower"
        )
        return
    sparse = SparseConfig(init_blocks=1, local_blocks=32, budget_blocks=96)
    alone = _decode(one, sparse, context, batch)
    runs = {1: alone}
    del one
    if devices > 1:
        many = from_pretrained(folder, mesh=make_mesh(model=devices))
        runs[devices] = _decode(many, sparse, context, batch)
    for count, run in runs.items():
        same = float(np.mean(np.array(run["tokens"]) == np.array(alone["tokens"])))
        details = {"same_tokens": same, "fetched_mb_per_device": run["fetched"] / 1e6}
        for what in ("prefill", "decode"):
            label = f"loading/{name}/{what}/{context}/B{batch}/devices{count}"
            details["speed_up"] = run[what] / alone[what]
            yield Row(label, Timing.exact(run[what]), "tok/s", "higher", details=dict(details))
