"""Reads the `sparse_config` of a `config.json`: the selection a checkpoint was trained with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pallas_kernels.geometry import BlockGeometry
from sparda_jax.config import SparseConfig

_READ = {
    "block_size",
    "dense_len",
    "init_blocks",
    "kernel_size",
    "kernel_stride",
    "select_blocks",
    "topk",
    "window_size",
}
# How the published code splits its work, or which mode it runs in: the caller decides here.
_IGNORED = {
    "create_indexer",
    "force_dense_inference",
    "use_q_future_decode_only",
    "use_q_future_for_topk",
}


def parse_sparse_config(config: Mapping[str, Any]) -> SparseConfig | None:
    """The policy a checkpoint names, None where it names none (spec/sparda.md, sec. 2 and 3.3).

    `topk` counts the blocks without the local ones; `window_size` the tokens of those.
    `select_blocks` (NOSA) are the free blocks that the query chooses.

    Args:
        config: the whole `config.json`.

    Raises:
        NotImplementedError: a field this selection does not know, or scores without RoPE.
        ValueError: missing or contradictory values.
    """
    given = config.get("sparse_config")
    if given is None:
        return None
    for name, value in given.items():
        known = name in _READ | _IGNORED or name.startswith(("training_", "kl_"))
        if not known and value is not None and value is not False:
            raise NotImplementedError(f"sparse_config: {name} = {value!r} is not supported")
    missing = [name for name in sorted(_READ - {"select_blocks", "dense_len"}) if name not in given]
    if missing:
        raise ValueError(f"sparse_config: {', '.join(missing)} is missing")
    size = given["block_size"]
    local, rest = divmod(given["window_size"], size)
    if rest:
        raise ValueError(
            f"sparse_config: window_size {given['window_size']} is not a multiple of block_size "
            f"{size}"
        )
    query = given.get("select_blocks")
    return SparseConfig(
        geometry=BlockGeometry(size, given["kernel_size"], given["kernel_stride"]),
        init_blocks=given["init_blocks"],
        local_blocks=local,
        budget_blocks=given["topk"] + local,
        dense_len=max(given.get("dense_len", 0), 0),  # -1 is how the public code says never
        query_blocks=None if query is None else given["init_blocks"] + local + query,
    )


def folder_policy(model: str | Path) -> SparseConfig | None:
    """The policy that a checkpoint folder names; None for anything but a folder with a config.

    Raises:
        ValueError: as `parse_sparse_config`, or a config that is not JSON.
        NotImplementedError: as `parse_sparse_config`.
    """
    path = Path(model) / "config.json"
    return parse_sparse_config(json.loads(path.read_text("utf-8"))) if path.is_file() else None
