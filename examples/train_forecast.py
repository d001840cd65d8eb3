#!/usr/bin/env python3
"""Train a Forecast for your own model on your own text.

    python examples/train_forecast.py run/ --model path/to/model --text documents.jsonl

In `run/`: checkpoints, metrics and forecast.safetensors, which scripts/decode.py and
scripts/evaluate.py take as --forecast. Started again, it goes on from the last checkpoint. All
settings, several devices and estimates: scripts/train_forecast.py.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from sparda_jax.assets import load_excerpt
from sparda_jax.checkpoints.load import load_pretrained
from sparda_jax.config import SparseConfig
from sparda_jax.forecast.data import pack, read_documents
from sparda_jax.forecast.files import save_forecast
from sparda_jax.forecast.loss import LossConfig
from sparda_jax.forecast.step import TrainConfig, forecast_of
from sparda_jax.forecast.training import Trainer


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of the run")
    parser.add_argument("--model", default="default", help="as in scripts/decode.py")
    parser.add_argument("--text", type=Path, nargs="*", help="default: Python's documentation")
    parser.add_argument("--window", type=int, default=2048, help="tokens of a training window")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(argv)

    model, tokenizer = load_pretrained(args.model)
    assert tokenizer is not None, "text is needed"
    if args.text:
        documents = read_documents(args.text, tokenizer.encode)
    else:
        documents = [np.asarray(tokenizer.encode(load_excerpt()), np.int32)]
    windows = pack(documents, args.window, min(tokenizer.eos_token_ids, default=None))

    # What is attended at decode is what it is trained for: an eighth of a window, 5 blocks forced.
    sparse = SparseConfig(local_blocks=3, budget_blocks=max(6, args.window // 512))
    config = TrainConfig(loss=LossConfig(sparse), steps=args.steps, batch=1, save_every=10)
    nothing = pack([], args.window, None)  # hold documents out of training to evaluate on them
    trainer = Trainer(model, config, windows, nothing, args.out, jax.devices()[:1])
    state = trainer.run(lambda progress: print(progress.record))
    path = args.out / "forecast.safetensors"
    save_forecast(path, forecast_of(model, state), model, sparse)
    print(f"python scripts/decode.py --model {args.model} --mode sparda --forecast {path}")


if __name__ == "__main__":
    main()
