"""What `scripts/report.py` draws beside rows: blocks attended, order of unmasking, a timeline."""

from __future__ import annotations

import argparse
import pathlib
from typing import TYPE_CHECKING

from sparda_jax.commands.benchmarks.publish import publish

if TYPE_CHECKING:
    from sparda_jax.commands.benchmarks.publish import Commands


ATTENDED_NOTES = (
    "Blocks that the last tokens attend, default model and policy, the demo's prompt. changed: "
    "share of a step's blocks that the step before did not attend, mean over KV heads and "
    "steps; spread: least and most."
)


def _attended(arguments: argparse.Namespace) -> None:
    from sparda_jax import cli
    from sparda_jax.config import EngineConfig, SamplingParams, SparseConfig
    from sparda_jax.demo import DEMO, prompt_text
    from sparda_jax.engine.generate import Engine
    from sparda_jax.evaluation import attended, policies

    model, tokenizer = cli.load_model("default")
    forecast = "default" if arguments.mode == "sparda" else None
    selector = cli.load_selector(arguments.mode, model, tokenizer, forecast)
    sparse, config = SparseConfig(), EngineConfig(mode=arguments.mode)
    prompt = tokenizer.encode(prompt_text(tokenizer))
    prompt = prompt[-(arguments.tokens or DEMO.document_tokens) :]
    engine = Engine(model, sparse=sparse, config=config, **selector)
    ((result,), _) = engine.generate([prompt], SamplingParams(max_new_tokens=arguments.steps))
    policy = (
        policies.sparda_policy(selector["forecast"])
        if forecast
        else policies.sparse_policy(len(model.layers))
    )
    tokens = [*prompt, *result.tokens]
    blocks = attended.attended_blocks(model, policy, tokens, sparse, arguments.steps)
    more = {"attended": attended.as_document(blocks)}
    publish(arguments, attended.rows(arguments.mode, blocks), ATTENDED_NOTES, more=more)


UNMASKED_NOTES = (
    "Default model with its adapter, greedy, continuing the demo's text. steps: denoising "
    "forwards of a block. left_to_right: share of its positions decided later than all before "
    "them."
)


def _unmasked(arguments: argparse.Namespace) -> None:
    import dataclasses

    from sparda_jax import cli
    from sparda_jax.config import SamplingParams
    from sparda_jax.demo import prompt_text
    from sparda_jax.diffusion.config import DenoiseParams
    from sparda_jax.diffusion.generate import BlockEngine
    from sparda_jax.evaluation import unmasking

    model, tokenizer = cli.load_model("default")
    model = cli.diffusion_model("default", model)
    rule = DenoiseParams.of_family(model.config)
    if arguments.threshold is not None:
        rule = dataclasses.replace(rule, threshold=arguments.threshold)
    prompt = tokenizer.encode(prompt_text(tokenizer))[-arguments.tokens :]
    sampling = SamplingParams(max_new_tokens=arguments.new_tokens)
    steps = unmasking.order_of(BlockEngine(model), prompt, sampling, rule)
    more = {"unmasked": steps.tolist()}
    publish(arguments, unmasking.rows(rule.strategy, steps), UNMASKED_NOTES, more=more)


TIMELINE_NOTES = "Time in the window by lane and kind: sum; spread: shortest and longest event."


def _timeline(arguments: argparse.Namespace) -> None:
    from sparda_jax.evaluation import timeline

    events = timeline.read_trace(arguments.folder)
    events = timeline.window(events, arguments.start, arguments.length)
    more = {"events": timeline.as_document(events)}
    publish(arguments, timeline.rows(events), TIMELINE_NOTES, more=more)


def add(commands: Commands, results: argparse.ArgumentParser) -> None:
    """Adds `attended`, `unmasked` and `timeline`."""
    command = commands.add_parser(
        "attended", parents=[results], help="blocks that layers and heads attend, step by step"
    )
    command.add_argument("--mode", choices=("sparse", "sparda"), default="sparda")
    command.add_argument("--tokens", type=int, help="of the prompt (default: the demo's)")
    command.add_argument("--steps", type=int, default=8)
    command.set_defaults(run=_attended)
    command = commands.add_parser(
        "unmasked", parents=[results], help="the order in which block diffusion decides positions"
    )
    command.add_argument(
        "--threshold", type=float, help="confidence above which a token is decided"
    )
    command.add_argument("--tokens", type=int, default=1000, help="of the prompt: the demo's end")
    command.add_argument("--new-tokens", type=int, default=192)
    command.set_defaults(run=_unmasked)
    command = commands.add_parser(
        "timeline", parents=[results], help="what ran when, from a trace of jax.profiler"
    )
    command.add_argument("folder", type=pathlib.Path, help="that the profiler wrote")
    command.add_argument("--start", type=float, default=0.0, help="microseconds left out at first")
    command.add_argument("--length", type=float, default=2000.0, help="microseconds shown")
    command.set_defaults(run=_timeline)
