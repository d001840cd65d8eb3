"""Recall of the selection with coarse softmax sums against the exact one, on a model.

    python -m sparda_jax.evaluation.kernel_benchmarks.coarse_recall --tokens 8192

The option is ``coarse`` of ``select_blocks_multi_head``: sums over windows of 128 tokens, one every
64, in the place of 32 and 16.
"""

import argparse
import json
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import BlockGeometry
from pallas_kernels.block_selection import select_blocks_multi_head
from pallas_kernels.compressed_keys import compress_keys
from sparda_jax.assets import load_excerpt
from sparda_jax.checkpoints.load import load_pretrained
from sparda_jax.config import SparseConfig
from sparda_jax.models.attention import dense_attention
from sparda_jax.models.decoder import Decoder
from sparda_jax.models.rope import rope_at
from sparda_jax.typing import Array, Int


def layer_selections(
    model: Decoder, tokens: Int[Array, "1 T"], sparse: SparseConfig
) -> Iterator[tuple[Int[Array, "1 K T R"], Int[Array, "1 K T R"]]]:
    """Block lists (exact, coarse) of every layer of a dense forward.

    Args:
        model: a decoder.
        tokens: one prompt.
        sparse: geometry and budget.
    """
    count = tokens.shape[1]
    fine = sparse.geometry
    coarse = BlockGeometry(4 * fine.kernel_stride, 4 * fine.kernel_size, 4 * fine.kernel_stride)
    positions = jnp.arange(count, dtype=jnp.int32)[None]
    cos, sin = rope_at(model.config.rope, positions, model.config.max_position_embeddings)

    def layer_step(layer: object, x: Array) -> tuple[Array, Array, Array]:
        q, k, v = layer.qkv(x, cos, sin)  # type: ignore[attr-defined]
        keys = k.swapaxes(1, 2)
        exact, cheap = (
            select_blocks_multi_head(
                q,
                compress_keys(keys, fine),
                positions // fine.block_size,
                fine.complete_windows(positions),
                num_blocks=fine.num_blocks(count),
                geometry=fine,
                init_blocks=sparse.init_blocks,
                local_blocks=sparse.local_blocks,
                budget=sparse.budget_blocks,
                coarse=coarse_keys,
                coarse_visible=visible,
            ).ids
            for coarse_keys, visible in (
                (None, None),
                (compress_keys(keys, coarse), coarse.complete_windows(positions)),
            )
        )
        return layer.finish(x, dense_attention(q, k, v, None)), exact, cheap  # type: ignore[attr-defined]

    step = jax.jit(layer_step)
    x = model.embed(tokens)
    for layer in model.layers:
        x, exact, cheap = step(layer, x)
        yield exact, cheap


def recall(
    exact: Int[Array, "1 K T R"], cheap: Int[Array, "1 K T R"], sparse: SparseConfig
) -> float:
    """Share of the exact list's free (not forced) blocks that the cheap list has.

    Over tokens with twice the budget to choose from; forced blocks are in both lists.
    """
    first = 2 * sparse.budget_blocks * sparse.geometry.block_size
    lists, others = (np.asarray(ids[0, :, first:]) for ids in (exact, cheap))
    kept = (lists[..., None] == others[..., None, :]).any(-1).sum(-1)
    forced = sparse.init_blocks + sparse.local_blocks + 1
    return float((kept - forced).mean() / (sparse.budget_blocks - forced))


def main() -> None:
    """Prints the recall of every layer and their mean, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="a multiple of 64")
    parser.add_argument("--layers", type=int, help="stop after so many layers")
    arguments = parser.parse_args()
    model, tokenizer = load_pretrained("default")
    if tokenizer is None:
        raise ValueError("the default model has no tokenizer")
    ids = tokenizer.encode(load_excerpt())[: arguments.tokens]
    sparse = SparseConfig()
    rows = []
    selections = layer_selections(model, jnp.asarray(ids, jnp.int32)[None], sparse)
    for index, (exact, cheap) in enumerate(selections):
        rows.append({"layer": index, "recall": recall(exact, cheap, sparse)})
        print(json.dumps(rows[-1]), flush=True)
        if arguments.layers is not None and index + 1 == arguments.layers:
            break
    print(json.dumps({"recall": float(np.mean([row["recall"] for row in rows]))}))


if __name__ == "__main__":
    main()
