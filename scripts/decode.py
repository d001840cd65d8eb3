#!/usr/bin/env python3
"""Generate text with block-sparse attention over a KV cache in host memory.

Without arguments: answer a question about a long text that ships with the package.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparda_jax.cli import (
    EXIT_INTERRUPTED,
    HelpFormatter,
    Parser,
    add_engine_options,
    add_model_options,
    engine_settings,
    guarded,
    load_model,
    load_selector,
    note,
    read_text,
    resolve_mode,
)

if TYPE_CHECKING:
    from sparda_jax.engine.generate import Engine
    from sparda_jax.engine.plan import BatchPlan

# What the printed cost model takes for granted: the benchmark's, see docs/offload.md.
HIT_RATE = 0.9

# Before jax starts: XLA writes INFO lines about the CPU to stderr otherwise.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    from sparda_jax.commands import herald
    from sparda_jax.commands.diffusion import add_diffusion_options

    parser = Parser(prog="decode.py", description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument_group("what to read and answer").add_argument
    add("--prompt", help="text to continue, or the question with --chat")
    add("--prompt-file", type=Path, help="UTF-8 text put before --prompt")
    add("--batch", type=Path, help="UTF-8 file with one prompt a line, in place of --prompt")
    add(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="wrap each prompt in the model's chat template (default: only the demo's)",
    )
    add_engine_options(parser, more_modes=herald.MODES)
    add_diffusion_options(parser)
    herald.add_herald_options(parser)
    add = parser.add_argument_group("sampling").add_argument
    add("--max-new-tokens", type=int, default=64, help="tokens to generate at most")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--top-k", type=int, default=0, help="0 keeps all tokens")
    add("--top-p", type=float, default=1.0, help="1 keeps all tokens")
    add("--seed", type=int, default=0, help="of the random stream; prompt i of a batch adds i")
    add("--ignore-eos", action="store_true", help="do not stop at the model's end token")
    add = parser.add_argument_group("output and set-up").add_argument
    add("--compare-dense", action="store_true", help="also run dense and count equal tokens")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    add("--traceback", action="store_true", help="show where in the code an error arose")
    add_model_options(parser, os.environ.get("SPARDA_JAX_CACHE"))
    args = parser.parse_args(argv)
    if args.batch is not None and (args.prompt is not None or args.prompt_file is not None):
        parser.error("--batch holds the prompts: give neither --prompt nor --prompt-file with it")
    if args.diffusion:
        taken = [args.forecast, args.offload, args.compare_dense or None]
        if any(value is not None for value in taken) or args.mode in ("sparse", "sparda"):
            parser.error("--diffusion: the mode says where the KV lies, dense (the default) or one "
                         f"of infinigen, {', '.join(herald.MODES)}; leave --forecast, --offload "
                         "and --compare-dense out")  # fmt: skip
        # `settings` is for the other engine.
        args.block_mode, args.mode, args.offload = args.mode or "dense", "dense", "none"
        return args
    if args.mode in herald.MODES:
        parser.error(f"--mode {args.mode} selects for blocks of tokens: add --diffusion")
    resolve_mode(parser, args)
    return args


def show_prefill(done: int, total: int) -> None:
    """A percentage that rewrites itself on a terminal, every tenth of the way elsewhere."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\rprefill {100 * done // total:3d} %", end=end, file=sys.stderr, flush=True)
    elif 10 * done // total > 10 * (done - 1) // total:
        note(f"prefill {100 * done // total} %")


def progress(interrupt: Any, quiet: bool) -> Callable[[int, int], None]:
    def advance(done: int, total: int) -> None:
        interrupt.check()
        if not quiet:
            show_prefill(done, total)

    return advance


def read_prompts(args: argparse.Namespace) -> list[str] | None:
    """The prompts as text; None for the demo's, which depends on the tokenizer."""
    if args.batch is not None:
        # Not splitlines: form feeds and the like may stand in a prompt.
        texts = [line for line in read_text(args.batch).split("\n") if line.strip()]
        if not texts:
            raise ValueError(f"{args.batch} holds no prompt")
        return texts
    if args.prompt is None and args.prompt_file is None:
        return None
    document = "" if args.prompt_file is None else read_text(args.prompt_file)
    text = "\n\n".join(part for part in (document, args.prompt) if part)
    if not text:
        raise ValueError(
            f"the prompt is empty{f': {args.prompt_file}' if args.prompt_file else ''}"
        )
    return [text]


def encode_prompts(
    args: argparse.Namespace, texts: list[str] | None, tokenizer: Any
) -> list[list[int]]:
    from sparda_jax import demo
    from sparda_jax.commands.diffusion import DEMO_TEXT

    chat = args.chat
    if texts is None and args.diffusion:
        texts = [DEMO_TEXT]
    if texts is None:
        texts = [demo.prompt_text(tokenizer)]
        # A model without a template still continues the text.
        chat = tokenizer.chat_template is not None if chat is None else chat
    if chat:
        return [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
    return [tokenizer.encode(text) for text in texts]


def settings(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Selection rules, engine settings and sampling settings from the command line."""
    from sparda_jax.config import SamplingParams

    sparse, config = engine_settings(args)
    sampling = SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )
    return sparse, config, sampling


def stream(generation: Any, tokenizer: Any, stops: tuple[int, ...], quiet: bool) -> bool:
    """Runs a generation and prints text as it comes; False when it was interrupted."""
    from sparda_jax.engine.interrupt import DeferredInterrupt

    show = generation.plan.batch == 1 and not quiet
    decoder, shown, prefilled = tokenizer.stream_decoder(), False, False
    try:
        with DeferredInterrupt() as interrupt:
            generation.prefill(progress(interrupt, quiet))
            prefilled = True
            for _, token in generation:
                if show and token not in stops:
                    print(decoder.push(token), end="", flush=True)
                    shown = True
                interrupt.check()
    except KeyboardInterrupt:
        if not quiet:
            # The progress of prefill may stand on a line that has not ended.
            start = "\n" if sys.stderr.isatty() and not prefilled else ""
            note(f"{start}interrupted during {'decode' if prefilled else 'prefill'}")
        return False
    finally:
        if shown:
            print(decoder.flush(), flush=True)
    return True


def compare(dense: Any, results: Any, quiet: bool) -> float | None:
    """Share of tokens equal to those of dense attention; None when interrupted."""
    from sparda_jax.engine.interrupt import DeferredInterrupt
    from sparda_jax.evaluation.agreement import equal_share

    if not quiet:
        note("the same with dense attention")
    try:
        with DeferredInterrupt() as interrupt:
            dense.prefill(progress(interrupt, quiet))
            for _ in dense:
                interrupt.check()
    except KeyboardInterrupt:
        return None
    return equal_share(
        [result.tokens for result in results], [other.tokens for other in dense.results()]
    )


def texts_of(results: Any, tokenizer: Any, stops: tuple[int, ...]) -> list[str]:
    """What each request said, without its stop token."""
    return [
        tokenizer.decode([token for token in result.tokens if token not in stops])
        for result in results
    ]


def introduce(
    prompts: list[list[int]],
    args: argparse.Namespace,
    engine: Engine,
    plan: BatchPlan,
    tokenizer: Any,
) -> None:
    """What is about to run; for the demo also the question and where its answer stands."""
    from sparda_jax import demo
    from sparda_jax.engine import placement

    model = engine.model

    made_for = model.config.max_position_embeddings
    if args.max_length is not None and args.max_length > made_for:
        note(f"--max-length {args.max_length} exceeds the {made_for} tokens the model was made for")
    longest = max(map(len, prompts))
    note(f"{len(prompts)} x {longest} tokens, {args.mode}, KV {args.offload}")
    if args.offload == "auto":
        predicted = engine.predict(plan, longest, HIT_RATE)
        layers, resident = model.config.num_layers, plan.resident_layers
        note(
            placement.describe(engine.config, layers, resident, plan.device_kv_bytes, predicted)
            + f" (an H200, hit rate {HIT_RATE})"
        )
    if args.batch is None and args.prompt is None and args.prompt_file is None:
        note(
            f"a text about Python, its question: {demo.DEMO.question} "
            f"(the text says it at token {demo.evidence_position(tokenizer)})"
        )


def as_json(
    args: argparse.Namespace, results: Any, texts: list[str], report: Any, **more: Any
) -> str:
    output = {
        "mode": args.mode,
        "offload": args.offload,
        "results": [
            vars(result) | {"text": text} for result, text in zip(results, texts, strict=True)
        ],
        "report": report.as_dict(),
    }
    return json.dumps(output | more, indent=2, ensure_ascii=False)


def run(args: argparse.Namespace) -> int:
    # Settings and files first: a mistake in them should not wait for the weights.
    sparse, config, sampling = settings(args)
    prompt_texts = read_prompts(args)
    model, tokenizer = load_model(args.model, args.dtype, args.cache_dir)
    prompts = encode_prompts(args, prompt_texts, tokenizer)

    from sparda_jax.commands import diffusion as command
    from sparda_jax.commands import herald
    from sparda_jax.engine.generate import Engine

    stops = () if args.ignore_eos else tuple(tokenizer.eos_token_ids)
    requests = [
        replace(sampling, stop_token_ids=stops, seed=args.seed + row) for row in range(len(prompts))
    ]
    if args.diffusion:
        own = None if args.block_mode == "dense" else herald.prepare
        return command.run(args, model, tokenizer, prompts, requests, own)
    selector = load_selector(
        args.mode, model, tokenizer, args.forecast, verify=args.verify_forecast
    )
    engine = Engine(model, sparse=sparse, config=config, **selector)
    generation = engine.prepare(prompts, requests)
    dense = None
    if args.compare_dense:
        # Prepared now, so that what does not fit is said before work begins.
        resident = replace(config, mode="dense", offload="none")
        dense = Engine(model, sparse=sparse, config=resident).prepare(prompts, requests)
    if not args.json:
        introduce(prompts, args, engine, generation.plan, tokenizer)
    finished = stream(generation, tokenizer, stops, quiet=args.json)
    results, report = generation.results(), generation.report
    del generation  # its KV makes room for that of dense attention
    texts = texts_of(results, tokenizer, stops)
    failed = [row for row, result in enumerate(results) if result.finish_reason == "failed"]
    drawn = any(result.tokens for result in results) or not finished
    if drawn and not args.json:
        if len(texts) > 1:
            for row, (text, result) in enumerate(zip(texts, results, strict=True)):
                print(f"[{row}] ({result.finish_reason}) {text}")
        print("\n" + "\n".join(report.summary()), flush=True)
    equal: float | None = None
    dense_texts: list[str] = []
    if finished and not failed and dense is not None:
        equal = compare(dense, results, args.json)
        finished = equal is not None
        dense_texts = texts_of(dense.results(), tokenizer, stops)
    if drawn and args.json:
        print(
            as_json(
                args,
                results,
                texts,
                report,
                interrupted=not finished,
                equal_to_dense=equal,
                dense_texts=dense_texts,
            )
        )
    elif equal is not None:
        if len(dense_texts) == 1:
            print(f"dense answers: {dense_texts[0]}")
        how = "greedy tokens" if args.temperature == 0 else "tokens drawn with the same seed"
        print(f"equal to dense   {100 * equal:9.1f} %       of {how}")
    if failed:
        raise FloatingPointError(
            f"logits of request {failed[0]} are not finite (NaN or infinity) after "
            f"{len(results[failed[0]].tokens)} tokens"
        )
    return 0 if finished else EXIT_INTERRUPTED


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show a character should not end a generation.
        sys.stdout.reconfigure(errors="replace")
    return guarded("decode.py", run, args)


if __name__ == "__main__":
    sys.exit(main())
