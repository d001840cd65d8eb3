#!/usr/bin/env python3
"""Continue a text by block diffusion, attending rows that the CPU chooses one block ahead.

    python examples/block_diffusion.py --mode herald --tokens 1024

The default model has an adapter that ships with it; any other model has to be one of block
diffusion. `--mode dense` attends all of the prefix, for comparison.
"""

import argparse
from collections.abc import Sequence

from sparda_jax.assets import load_excerpt
from sparda_jax.checkpoints.load import load_pretrained
from sparda_jax.config import SamplingParams
from sparda_jax.diffusion.config import diffusion_of
from sparda_jax.diffusion.files import load_adapter
from sparda_jax.herald.config import Budget, HeraldConfig
from sparda_jax.herald.engine import HeraldEngine


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="default", help="as in scripts/decode.py")
    parser.add_argument("--mode", choices=("dense", "mage", "herald"), default="herald")
    parser.add_argument("--tokens", type=int, default=512, help="of the text")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--share", type=float, default=0.25, help="of the prefix, per KV head")
    args = parser.parse_args(argv)

    model, tokenizer = load_pretrained(args.model)
    assert tokenizer is not None, "text is needed"
    if args.model == "default":
        model = load_adapter("default", model)
    width = diffusion_of(model.config)[0].block_size
    config = HeraldConfig(mode=args.mode, budget=Budget(args.share), kv_block=max(64, width))
    prompt = tokenizer.encode(load_excerpt())[: args.tokens]
    _, report = HeraldEngine(model, config=config).generate(
        [prompt],
        SamplingParams(max_new_tokens=args.max_new_tokens),
        on_block=lambda block: print(f"{block.steps:2d} steps  {tokenizer.decode(block.tokens)!r}"),
    )
    print(f"{report.decode_tokens} tokens, {report.steps_per_block:.1f} denoising steps a block")


if __name__ == "__main__":
    main()
