#!/usr/bin/env python3
"""The Flax model in your own jitted evaluation loop: one program for all batches of a text.

    python examples/own_loop.py --window 512

The module holds parameters only, so it is an argument of `jax.jit` like any other pytree, and a
whole evaluation is one `lax.scan`. Here: bits per token of a text, dense and over selected blocks.
"""

import argparse
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sparda_jax.assets import load_excerpt
from sparda_jax.checkpoints.load import load_pretrained
from sparda_jax.config import SparseConfig
from sparda_jax.models.decoder import Decoder


@functools.partial(jax.jit, static_argnames="sparse")
def evaluate(model: Decoder, batches: jax.Array, sparse: SparseConfig | None = None) -> jax.Array:
    """Mean bits per token of `[X, B, T]` token ids."""

    def add(total: jax.Array, tokens: jax.Array) -> tuple[jax.Array, None]:
        log_p = jax.nn.log_softmax(model(tokens[:, :-1], sparse=sparse))
        picked = jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)
        return total - picked.mean() / jnp.log(2.0), None

    total, _ = jax.lax.scan(add, jnp.zeros(()), batches)
    return total / len(batches)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="default", help="as in scripts/decode.py")
    parser.add_argument("--window", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--batch", type=int, default=2, help="rows that run together")
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--budget-blocks", type=int, default=8, help="blocks of 64 tokens")
    args = parser.parse_args(argv)

    model, tokenizer = load_pretrained(args.model)
    assert tokenizer is not None, "text is needed"
    shape = (args.batches, args.batch, args.window)
    ids = np.asarray(tokenizer.encode(load_excerpt())[: int(np.prod(shape))], np.int32)
    batches = jnp.asarray(ids.reshape(shape))
    print(f"dense  {evaluate(model, batches):.4f} bits a token")
    sparse = SparseConfig(local_blocks=2, budget_blocks=args.budget_blocks)
    print(f"sparse {evaluate(model, batches, sparse):.4f} bits a token")


if __name__ == "__main__":
    main()
