"""Recall of the selection with coarse softmax sums against the exact one, on a model.

    python -m sparda_jax.evaluation.kernel_benchmarks.coarse_recall --tokens 8192

The option is ``coarse`` of ``select_blocks_multi_head``: sums over windows of 128 tokens, one every
64, in the place of 32 and 16.
"""

from typing import cast

import jax
import numpy as np

from pallas_kernels import BlockGeometry
from pallas_kernels.block_selection import select_blocks_multi_head
from pallas_kernels.compressed_keys import compress_keys
from sparda_jax.config import SparseConfig
from sparda_jax.evaluation.policies import DENSE, LayerStep, forward
from sparda_jax.evaluation.selection_overlap import print_by_layer
from sparda_jax.evaluation.selectors import LayerState
from sparda_jax.models.decoder import Decoder
from sparda_jax.typing import Array, Int

Lists = tuple[Int[Array, "1 K T R"], Int[Array, "1 K T R"]]


def layer_selections(
    model: Decoder, tokens: Int[Array, "1 T"], sparse: SparseConfig
) -> list[Lists]:
    """Block lists (exact, coarse) of every layer of a dense forward.

    Args:
        model: a decoder.
        tokens: one prompt.
        sparse: geometry and budget.
    """
    fine = sparse.geometry
    coarse = BlockGeometry(4 * fine.kernel_stride, 4 * fine.kernel_size, 4 * fine.kernel_stride)

    @jax.jit
    def select(state: LayerState) -> Lists:
        sums = compress_keys(state.keys, coarse), coarse.complete_windows(state.positions)
        exact, cheap = (
            select_blocks_multi_head(
                state.q,
                state.compressed,
                state.positions // fine.block_size,
                fine.complete_windows(state.positions),
                num_blocks=int(fine.num_blocks(tokens.shape[1])),
                geometry=fine,
                init_blocks=sparse.init_blocks,
                local_blocks=sparse.local_blocks,
                budget=sparse.budget_blocks,
                coarse=keys,
                coarse_visible=visible,
            ).ids
            for keys, visible in ((None, None), sums)
        )
        return exact, cheap

    lists: list[Lists] = []

    def visit(step: LayerStep) -> None:
        lists.append(cast(Lists, select(step.state)))

    forward(model, DENSE, tokens, sparse, visit=visit)
    return lists


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

    def measure(lists: Lists, sparse: SparseConfig) -> dict[str, float]:
        return {"recall": recall(*lists, sparse)}

    print_by_layer(__doc__, layer_selections, measure)


if __name__ == "__main__":
    main()
