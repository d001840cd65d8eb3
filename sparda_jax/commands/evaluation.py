"""What `scripts/evaluate.py` evaluates: model, settings and texts of all modes, and their rows."""

from __future__ import annotations

import argparse
import functools
import hashlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

from sparda_jax.cli import (
    diffusion_model,
    engine_settings,
    load_model,
    load_selector,
    note,
    read_text,
)

METERS = ("perplexity", "selection")


def digest(data: bytes) -> str:
    """A short name of some contents."""
    return hashlib.sha256(data).hexdigest()[:16]


def for_mode(args: argparse.Namespace, mode: str) -> argparse.Namespace:
    """The command line for one of several modes."""
    offload = "none" if mode == "dense" else args.offload or "host"
    return argparse.Namespace(**vars(args) | {"mode": mode, "offload": offload})


class Session:
    """What all modes share: the model, settings and texts."""

    def __init__(self, args: argparse.Namespace, check: Callable[[], None]):
        from sparda_jax.assets import load_excerpt
        from sparda_jax.evaluation.run import Answering
        from sparda_jax.evaluation.suite import Suite
        from sparda_jax.evaluation.tasks import registry

        self.args, self.check = args, check
        self.meters = [name for name in args.tasks if name in METERS]
        tasks = registry.find([name for name in args.tasks if name not in METERS])
        self.suite = Suite(tasks, args.lengths, args.seeds, args.modes)
        if self.meters and not args.lengths:
            raise ValueError(f"{self.meters[0]} is measured at a length: give --lengths")
        self.answering = Answering(
            batch=args.batch,
            temperature=args.temperature,
            top_p=args.top_p,
            repeats=args.repeats,
            max_new_tokens=args.max_new_tokens,
            chat=args.chat is not False,
            truncate=args.truncate,
        )
        self.texts = [read_text(path) for path in args.text] if args.text else [load_excerpt()]
        self.configs: dict[str, Any] = {}
        self.sparse: Any = None  # the same rules in all modes
        for mode in () if args.diffusion else args.modes:
            self.sparse, config = engine_settings(for_mode(args, mode))
            self.configs[mode] = replace(config, length_step=args.length_step)
        self.model, self.tokenizer = load_model(args.model, args.dtype, args.cache_dir)
        self.denoise: Any = None
        if args.diffusion:
            self.use_diffusion()
        if self.answering.chat and self.tokenizer.chat_template is None:
            if args.chat:
                raise ValueError("--chat: this model has no chat template")
            self.answering = replace(self.answering, chat=False)
        self.limit = args.max_length or self.model.config.max_position_embeddings

    def use_diffusion(self) -> None:
        """The model with its block-diffusion adapter, and settings of its modes."""
        from sparda_jax.commands.diffusion import denoise_settings
        from sparda_jax.commands.herald import herald_settings
        from sparda_jax.herald.config import Budget

        if self.meters:
            raise NotImplementedError(
                f"{self.meters[0]} with --diffusion: it needs exact log-likelihoods, or selections "
                "of an autoregressive model"
            )
        self.model = diffusion_model(self.args.model, self.model, self.args.adapter)
        self.denoise = denoise_settings(self.args, self.model)
        self.configs = {m: herald_settings(self.args, self.model, m) for m in self.args.modes}
        if "dense" in self.configs:  # attends all, whatever the others' budget
            self.configs["dense"] = replace(self.configs["dense"], budget=Budget())

    def engine(self, mode: str) -> Any:
        """Of an autoregressive model."""
        from sparda_jax.engine import generate

        selector = self.selector(mode)
        return generate.Engine(
            self.model, sparse=self.sparse, config=self.configs[mode], **selector
        )

    def selector(self, mode: str) -> dict[str, Any]:
        """Forecast or skews, where a mode needs them."""
        args = self.args
        return load_selector(
            mode, self.model, self.tokenizer, args.forecast, verify=args.verify_forecast
        )

    def answerer(self, mode: str) -> Any:
        """Who answers the tasks' prompts."""
        from sparda_jax.evaluation.generation import BlockAnswerer, EngineAnswerer

        if self.args.diffusion:
            from sparda_jax.herald.engine import HeraldEngine

            engine = HeraldEngine(self.model, config=self.configs[mode])
            return BlockAnswerer(engine, self.tokenizer, self.denoise, self.check)
        return EngineAnswerer(self.engine(mode), self.tokenizer, self.check)

    def documents(self, length: int) -> list[list[int]]:
        """Tokens of every text; of the one that ships, windows of a length."""
        if self.args.text:
            return self.tokens
        (whole,) = self.tokens
        return [whole[i : i + length] for i in range(0, len(whole) - length + 1, length)]

    @functools.cached_property
    def tokens(self) -> list[list[int]]:
        """Of every text."""
        return [self.tokenizer.encode(text, add_special=False) for text in self.texts]

    def settings(self) -> dict[str, Any]:
        """All that decides the results of every mode, task and length alike."""
        import jax

        from sparda_jax.checkpoints.forecast import model_fingerprint

        args = self.args
        files = sorted(p for p in args.data.rglob("*") if p.is_file()) if args.data else []
        return {
            "model": {"name": str(args.model), "sha256": model_fingerprint(self.model)[:16]},
            "dtype": str(self.model.dtype),
            "tokenizer": self.tokenizer.fingerprint()[:16],
            "samples": args.samples,
            "answers": asdict(self.answering),
            "texts": [digest(text.encode()) for text in self.texts],
            "data": {str(p.relative_to(args.data)): digest(p.read_bytes()) for p in files},
            "limit": self.limit,
            "versions": {"jax": jax.__version__, "python": sys.version.split()[0]},
        }

    def settings_of(self, mode: str) -> dict[str, Any]:
        """All that decides the results of one mode besides."""
        import jax
        import numpy as np

        found: dict[str, Any] = {"engine": asdict(self.configs[mode])}
        if self.denoise is not None:
            found["denoise"] = asdict(self.denoise)
        elif mode != "dense":
            found["sparse"] = asdict(self.sparse)
        if mode == "sparda":
            kernels = jax.tree.leaves(self.selector(mode)["forecast"])
            found["forecast"] = digest(b"".join(np.asarray(k).tobytes() for k in kernels))
        return found

    def rows(self, run: Any) -> Iterator[Any]:
        """All rows, once their work is done."""
        from sparda_jax.evaluation import suite
        from sparda_jax.evaluation.tasks.base import Sources

        args = self.args
        sources = Sources(
            self.tokenizer,
            length=0,
            samples=args.samples,
            seed=0,
            texts=self.texts,
            data=args.data,
            chat=self.answering.chat,
        )
        yield from suite.run_tasks(self.suite, run, sources, self.answerer, note)
        if "perplexity" in self.meters:
            yield from suite.run_perplexity(
                self.suite, run, self.documents, args.samples, self.engine, note
            )
        if "selection" in self.meters:
            yield from self.selections()

    def selections(self) -> Iterator[Any]:
        """Recall, mass, coverage and hits of what the modes select, under the policy given."""
        import numpy as np

        from sparda_jax.evaluation import policies, position, quality

        count = len(self.model.layers)
        make = {
            "sparse": lambda: policies.sparse_policy(count),
            "sparda": lambda: policies.sparda_policy(self.selector("sparda")["forecast"]),
            "infinigen": lambda: policies.infinigen_policy(self.selector("infinigen")["infinigen"]),
        }
        asked = [make[mode]() for mode in self.args.modes if mode in make]
        if not asked:
            raise ValueError("selection: dense selects nothing, give another --mode")
        for length in self.args.lengths:
            found = position.documents_of(self.documents(length), length, self.args.samples)
            yield from quality.selection_rows(
                self.model,
                asked,
                policies.sparse_policy(count),
                [np.asarray(document, np.int32) for document in found],
                quality.Setting.of_policy(length, self.sparse),
                edges=(0, length),
                by_layer=False,
                every=max(1, length // 256),
                report=note,
            )
