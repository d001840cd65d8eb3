#!/usr/bin/env python3
"""Generate text with block-sparse attention over a KV cache in host memory.

Without arguments: answer a question about a long text that ships with the package.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

# Before jax starts: XLA writes INFO lines about the CPU to stderr otherwise.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141  # what a shell reports for a program that SIGPIPE ended


class Parser(argparse.ArgumentParser):
    """Errors in one line: the usage of so many options would hide them."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default of an option where it has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


def gibibytes(text: str) -> int:
    """A memory size in GiB as bytes."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 2**30:
        raise argparse.ArgumentTypeError(f"must be a positive number of GiB, got {text!r}")
    return max(1, int(value * 2**30))


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="decode.py", description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument_group("what to read and answer").add_argument
    add("--model", default="default", help="'default', a directory, a GGUF file or a hub id")
    add("--prompt", help="text to continue, or the question with --chat")
    add("--prompt-file", type=Path, help="UTF-8 text put before --prompt")
    add("--batch", type=Path, help="UTF-8 file with one prompt a line, in place of --prompt")
    add(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="wrap each prompt in the model's chat template (default: only the demo's)",
    )
    add = parser.add_argument_group("attention and KV cache").add_argument
    add("--mode", choices=("dense", "sparse"), default="sparse", help="attention")
    add(
        "--offload",
        choices=("none", "host"),
        help="where the KV lives (default: host for sparse, none for dense)",
    )
    add("--fetch", choices=("program", "eager"), default="program", help="who copies missed blocks")
    add("--block-size", type=int, default=64, help="tokens per KV block")
    add("--kernel-size", type=int, default=32, help="tokens per compressed key")
    add("--kernel-stride", type=int, default=16, help="tokens between compressed keys")
    add("--budget-blocks", type=int, default=24, help="blocks attended, forced ones included")
    add("--init-blocks", type=int, default=1, help="first blocks, always attended")
    add("--local-blocks", type=int, default=8, help="blocks before the current one, likewise")
    add("--dense-len", type=int, default=0, help="attend densely below this many tokens")
    add(
        "--device-kv-gb",
        type=gibibytes,
        help="most GiB of KV on the device (default: all that is free)",
    )
    add(
        "--host-kv-gb",
        type=gibibytes,
        help="most GiB of KV on the host (default: all that is free)",
    )
    add("--max-length", type=int, help="most tokens of a sequence (default: the model's)")
    add("--prefill-chunk", type=int, default=512, help="prompt tokens per prefill call")
    add("--steps-per-call", type=int, default=8, help="tokens per compiled decode call")
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
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="weights and KV (default: float32 on CPU, where bfloat16 is slow, else bfloat16)",
    )
    add(
        "--cache-dir",
        type=Path,
        default=os.environ.get("SPARDA_JAX_CACHE"),
        help="where the default model is kept (SPARDA_JAX_CACHE; default: the user's cache)",
    )
    args = parser.parse_args(argv)
    if args.batch is not None and (args.prompt is not None or args.prompt_file is not None):
        parser.error("--batch holds the prompts: give neither --prompt nor --prompt-file with it")
    args.offload = args.offload or ("host" if args.mode == "sparse" else "none")
    return args


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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


def read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        byte, at = error.object[error.start], error.start
        raise ValueError(f"{path} is not UTF-8: byte 0x{byte:02x} at offset {at}") from None


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

    chat = args.chat
    if texts is None:
        texts = [demo.prompt_text(tokenizer)]
        # A model without a template still continues the text.
        chat = tokenizer.chat_template is not None if chat is None else chat
    if chat:
        return [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
    return [tokenizer.encode(text) for text in texts]


def settings(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Selection rules, engine settings and sampling settings from the command line."""
    from pallas_kernels.geometry import BlockGeometry
    from sparda_jax.config import EngineConfig, SamplingParams, SparseConfig

    sparse = SparseConfig(
        geometry=BlockGeometry(args.block_size, args.kernel_size, args.kernel_stride),
        init_blocks=args.init_blocks,
        local_blocks=args.local_blocks,
        budget_blocks=args.budget_blocks,
        dense_len=args.dense_len,
    )
    config = EngineConfig(
        mode=args.mode,
        offload=args.offload,
        fetch=args.fetch,
        prefill_chunk=args.prefill_chunk,
        steps_per_call=args.steps_per_call,
        max_length=args.max_length,
        device_kv_bytes=args.device_kv_gb,
        host_kv_bytes=args.host_kv_gb,
    )
    sampling = SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )
    return sparse, config, sampling


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    """Model and tokenizer."""
    import jax
    import jax.numpy as jnp

    from sparda_jax.checkpoints.load import load_pretrained

    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    model, tokenizer = load_pretrained(args.model, dtype=jnp.dtype(dtype), cache_dir=args.cache_dir)
    if tokenizer is None:
        raise ValueError(f"no tokenizer.json in {args.model}")
    return model, tokenizer


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


def summary(report: Any) -> list[str]:
    """The counters as lines of text."""
    from host_offload.memory import format_bytes

    rate = "none selected" if report.hit_rate is None else f"{100 * report.hit_rate:.1f} %"
    share = report.device_kv_bytes / report.full_kv_bytes
    return [
        f"prefill          {report.prefill_tokens_per_second:9.1f} tok/s   "
        f"({report.prefill_tokens} tokens, {report.prefill_seconds:.1f} s, "
        f"and {report.prefill_compile_seconds:.1f} s to compile)",
        f"decode           {report.decode_tokens_per_second:9.1f} tok/s   "
        f"({report.decode_tokens} tokens, {report.decode_seconds:.1f} s, "
        f"and {report.decode_compile_seconds:.1f} s to compile)",
        f"context          {report.context_tokens:9d} tokens",
        f"KV on the device {format_bytes(report.device_kv_bytes):>14}   "
        f"({100 * share:.1f} % of the full cache, {format_bytes(report.full_kv_bytes)})",
        f"KV on the host   {format_bytes(report.host_kv_bytes):>14}",
        f"hit rate         {rate:>14}   (free blocks already on the device)",
        f"moved per token  {format_bytes(report.bytes_per_token):>14}",
    ]


def introduce(
    prompts: list[list[int]], args: argparse.Namespace, model: Any, tokenizer: Any
) -> None:
    """What is about to run; for the demo also the question and where its answer stands."""
    from sparda_jax import demo

    made_for = model.config.max_position_embeddings
    if args.max_length is not None and args.max_length > made_for:
        note(f"--max-length {args.max_length} exceeds the {made_for} tokens the model was made for")
    note(f"{len(prompts)} x {max(map(len, prompts))} tokens, {args.mode}, KV {args.offload}")
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
    model, tokenizer = load(args)
    prompts = encode_prompts(args, prompt_texts, tokenizer)

    from sparda_jax.engine.generate import Engine

    stops = () if args.ignore_eos else tuple(tokenizer.eos_token_ids)
    requests = [
        replace(sampling, stop_token_ids=stops, seed=args.seed + row) for row in range(len(prompts))
    ]
    generation = Engine(model, sparse=sparse, config=config).prepare(prompts, requests)
    dense = None
    if args.compare_dense:
        # Prepared now, so that what does not fit is said before work begins.
        resident = replace(config, mode="dense", offload="none")
        dense = Engine(model, sparse=sparse, config=resident).prepare(prompts, requests)
    if not args.json:
        introduce(prompts, args, model, tokenizer)
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
        print("\n" + "\n".join(summary(report)), flush=True)
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


def describe(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show a character should not end a generation.
        sys.stdout.reconfigure(errors="replace")
    try:
        return run(args)
    except KeyboardInterrupt:
        note("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough; what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (ValueError, ArithmeticError, OSError, RuntimeError, ImportError, MemoryError) as error:
        if args.traceback:
            raise
        note(f"decode.py: {describe(error)}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
