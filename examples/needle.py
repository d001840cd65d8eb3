#!/usr/bin/env python3
"""Hide a number in a long text and ask for it, with attention to selected blocks only.

python examples/needle.py --tokens 2048 --mode sparda
"""

import argparse
from collections.abc import Sequence

from sparda_jax.assets import load_excerpt
from sparda_jax.checkpoints.load import load_pretrained
from sparda_jax.config import EngineConfig, SparseConfig
from sparda_jax.engine.generate import Engine
from sparda_jax.evaluation.generation import EngineAnswerer
from sparda_jax.evaluation.run import Answering
from sparda_jax.evaluation.tasks.base import Sources
from sparda_jax.evaluation.tasks.ruler import TASKS
from sparda_jax.forecast.files import load_forecast


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="default", help="as in scripts/decode.py")
    parser.add_argument("--mode", choices=("dense", "sparse", "sparda"), default="sparse")
    parser.add_argument("--tokens", type=int, default=1024, help="of the text and its question")
    parser.add_argument("--samples", type=int, default=3)
    args = parser.parse_args(argv)

    model, tokenizer = load_pretrained(args.model)
    assert tokenizer is not None, "needles are hidden in text"
    forecast = load_forecast("default", model)[0] if args.mode == "sparda" else None
    engine = Engine(
        model,
        # A quarter of the text, but at least the blocks that are always attended.
        sparse=SparseConfig(local_blocks=2, budget_blocks=max(6, args.tokens // 256)),
        config=EngineConfig(
            mode=args.mode,
            offload="none" if args.mode == "dense" else "host",
            length_step=256,
        ),
        forecast=forecast,
    )

    task = TASKS["niah_single_2"]
    chat = tokenizer.chat_template is not None
    sources = Sources(tokenizer, args.tokens, args.samples, seed=0, texts=[load_excerpt()],
                      chat=chat)  # fmt: skip
    examples = task.examples(sources)
    settings = Answering(max_new_tokens=16)
    answers, counters = EngineAnswerer(engine, tokenizer)(
        [sources.encode(example) for example in examples],
        [settings.request(example, seed=0, repeat=0) for example in examples],
        [example.stop for example in examples],
    )
    for example, answer in zip(examples, answers, strict=True):
        found = task.score(example, answer.text)["string_match"]
        depth = example.more["depths"][0]
        print(f"depth {depth:3d} %  {example.references[0]}  {found:.0f}  {answer.text.strip()!r}")
    if counters["free_blocks"]:
        print(f"hit rate {counters['hit_blocks'] / counters['free_blocks']:.2f}")


if __name__ == "__main__":
    main()
