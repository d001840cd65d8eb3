"""How far the block lists of neighbouring tokens overlap, measured on a model.

    python -m sparda_jax.evaluation.selection_overlap --tokens 8192

The block-sparse prefill kernel computes the union of the lists of 4 and of 8 neighbours (G=16),
so this overlap, and not the budget alone, sets its speed. The share of blocks that a token keeps
from the one before is a meter of `selection_quality` too ("hits"), there by policy and position.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax.numpy as jnp
import numpy as np

from pallas_kernels.block_sparse_attention import specs
from sparda_jax.assets import load_excerpt
from sparda_jax.checkpoints.load import load_pretrained
from sparda_jax.config import SparseConfig
from sparda_jax.evaluation.policies import DENSE, LayerStep, forward, sparse_policy
from sparda_jax.evaluation.selectors import mask_ids
from sparda_jax.models.decoder import Decoder
from sparda_jax.typing import Array, Int

Lists = TypeVar("Lists")


def layer_selections(
    model: Decoder, tokens: Int[Array, "1 T"], sparse: SparseConfig
) -> list[Int[Array, "1 K T R"]]:
    """Block lists of every layer of a dense forward, by InfLLM-V2's multi-head selection.

    Args:
        model: a decoder.
        tokens: one prompt.
        sparse: geometry and budget.
    """
    policy = sparse_policy(model.config.num_layers)
    budgets = jnp.full((1,), sparse.budget_blocks, jnp.int32)
    lists: list[Array] = []

    def visit(step: LayerStep) -> None:
        lists.append(mask_ids(step.mask(policy, budgets, sparse), sparse.budget_blocks))

    forward(model, DENSE, tokens, sparse, visit=visit)
    return lists


def overlap(ids: Int[Array, "1 K T R"], sparse: SparseConfig) -> dict[str, float]:
    """Means over KV heads and over the tokens that have twice the budget to choose from.

    Args:
        ids: block lists of a prompt.
        sparse: geometry and budget.

    Returns:
        ``changed``: share of the free blocks of a token that its successor in the same block
        does not have; ``union_of_n``: different blocks of n neighbours over the budget.
    """
    block, budget = sparse.geometry.block_size, sparse.budget_blocks
    late = ids[:, :, 2 * budget * block :]
    lists = np.asarray(late)[0]
    same = (lists[:, 1:, :, None] == lists[:, :-1, None, :]).any(2)
    kept = same.sum(-1)
    # Inside a block all forced blocks stay; a token that opens a block is left out.
    inside = (np.arange(1, lists.shape[1]) % block) != 0
    free = budget - (sparse.init_blocks + sparse.local_blocks + 1)
    return {"changed": float((budget - kept[:, inside]).mean() / free)} | {
        f"union_of_{n}": float(specs.union_size(late, n)) / budget for n in (4, 8)
    }


def print_by_layer(
    description: str | None,
    select: Callable[[Decoder, Int[Array, "1 T"], SparseConfig], Sequence[Lists]],
    measure: Callable[[Lists, SparseConfig], dict[str, float]],
) -> None:
    """A command line: prints what is measured in every layer and the means, as JSON.

    Args:
        description: for `--help`.
        select: block lists of every layer, for a text of the default model.
        measure: figures of one layer's lists, by name.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--tokens", type=int, default=8192, help="a multiple of 64")
    parser.add_argument("--layers", type=int, help="count so many layers, from the first on")
    arguments = parser.parse_args()
    model, tokenizer = load_pretrained("default")
    if tokenizer is None:
        raise ValueError("the default model has no tokenizer")
    ids = tokenizer.encode(load_excerpt())[: arguments.tokens]
    sparse, rows = SparseConfig(), []
    selections = select(model, jnp.asarray(ids, jnp.int32)[None], sparse)
    for index, lists in enumerate(selections[: arguments.layers]):
        rows.append({"layer": index} | measure(lists, sparse))
        print(json.dumps(rows[-1]), flush=True)
    names = [name for name in rows[0] if name != "layer"]
    print(json.dumps({name: float(np.mean([row[name] for row in rows])) for name in names}))


def main() -> None:
    """Prints the overlap of every layer and their mean, as JSON."""
    print_by_layer(__doc__, layer_selections, overlap)


if __name__ == "__main__":
    main()
