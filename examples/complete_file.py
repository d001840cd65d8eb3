#!/usr/bin/env python3
"""Complete every prompt of a file, in batches, and write the answers as they are done.

    python examples/complete_file.py prompts.jsonl answers.jsonl --batch 8

A line of the input is an object with "prompt"; the output has it too, and "completion". Started
again, it goes on where it stopped.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from sparda_jax.checkpoints.load import load_pretrained
from sparda_jax.config import EngineConfig, SamplingParams
from sparda_jax.engine.generate import Engine
from sparda_jax.evaluation.generation import EngineAnswerer


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--model", default="default", help="as in scripts/decode.py")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--chat", action="store_true", help="use the chat template")
    args = parser.parse_args(argv)

    rows = [json.loads(line) for line in args.prompts.read_text("utf-8").splitlines() if line]
    done = len(args.answers.read_text("utf-8").splitlines()) if args.answers.exists() else 0
    model, tokenizer = load_pretrained(args.model)
    assert tokenizer is not None, "prompts are text"
    # Lengths in steps: batches of like length run the same compiled programs.
    engine = Engine(model, config=EngineConfig(mode="sparse", offload="host", length_step=256))
    complete = EngineAnswerer(engine, tokenizer)

    def encode(prompt: str) -> list[int]:
        if args.chat:
            return tokenizer.encode_chat([{"role": "user", "content": prompt}])
        return tokenizer.encode(prompt)

    request = SamplingParams(max_new_tokens=args.max_new_tokens)
    with args.answers.open("a", encoding="utf-8") as file:
        for start in range(done, len(rows), args.batch):
            batch = rows[start : start + args.batch]
            prompts = [encode(row["prompt"]) for row in batch]
            answers, report = complete(prompts, [request] * len(batch), [()] * len(batch))
            for row, answer in zip(batch, answers, strict=True):
                file.write(json.dumps(row | {"completion": answer.text}) + "\n")
            file.flush()
            speed = report["decode_tokens"] / max(report["decode_seconds"], 1e-9)
            print(f"{start + len(batch)} of {len(rows)}, {speed:.0f} tokens/s")


if __name__ == "__main__":
    main()
