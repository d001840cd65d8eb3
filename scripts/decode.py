#!/usr/bin/env python3
"""Generate text with block-sparse attention over a KV cache in host memory.

Without arguments: answer a question about a long text that ships with the package.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

# Before jax starts: XLA writes INFO lines about the CPU to stderr otherwise.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

EXIT_INTERRUPTED = 130


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    source = parser.add_argument_group("what to read and answer")
    add = source.add_argument
    add("--model", default="default", help="'default', a directory, a GGUF file or a hub id")
    add("--prompt", help="text to continue, or the question with --chat (default: the demo's)")
    add("--prompt-file", type=Path, help="UTF-8 text put before --prompt")
    add("--batch", type=Path, help="UTF-8 file with one prompt a line; replaces --prompt")
    add(
        "--chat",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="wrap the prompt in the model's chat template (default: only for the demo)",
    )
    attention = parser.add_argument_group("attention and KV cache")
    add = attention.add_argument
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
    add("--device-kv-gb", type=float, help="most GiB of KV on the device (default: what is free)")
    add("--host-kv-gb", type=float, help="most GiB of KV on the host (default: what is free)")
    add("--max-length", type=int, help="most tokens of a sequence (default: the model's)")
    add("--prefill-chunk", type=int, default=512, help="prompt tokens per prefill call")
    add("--steps-per-call", type=int, default=8, help="tokens per compiled decode call")
    sampling = parser.add_argument_group("sampling")
    add = sampling.add_argument
    add("--max-new-tokens", type=int, default=64, help="tokens to generate at most")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--top-k", type=int, default=0, help="0 keeps all tokens")
    add("--top-p", type=float, default=1.0, help="1 keeps all tokens")
    add("--seed", type=int, default=0, help="of the random stream; prompt i of a batch adds i")
    add("--ignore-eos", action="store_true", help="do not stop at the model's end token")
    output = parser.add_argument_group("output and set-up")
    add = output.add_argument
    add("--compare-dense", action="store_true", help="also run dense and count equal tokens")
    add("--json", action="store_true", help="print one JSON object instead of text")
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
    return parser.parse_args(argv)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def show_prefill(done: int, total: int) -> None:
    """A percentage that rewrites itself on a terminal, every tenth of the way elsewhere."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\rprefill {100 * done // total:3d} %", end=end, file=sys.stderr, flush=True)
    elif 10 * done // total > 10 * (done - 1) // total:
        note(f"prefill {100 * done // total} %")


def read_prompts(args: argparse.Namespace, tokenizer: Any) -> tuple[list[list[int]], Any]:
    """Token ids of the prompts, and the demo when that is what is asked."""
    from sparda_jax import demo

    shown = None
    if args.batch is not None:
        texts = [line for line in args.batch.read_text("utf-8").splitlines() if line.strip()]
        if not texts:
            raise ValueError(f"{args.batch} holds no prompt")
    elif args.prompt is None and args.prompt_file is None:
        shown = demo.DEMO
        texts = [demo.prompt_text(tokenizer)]
    else:
        document = "" if args.prompt_file is None else args.prompt_file.read_text("utf-8")
        texts = ["\n\n".join(part for part in (document, args.prompt) if part)]
    if args.chat if args.chat is not None else shown is not None:
        return [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts], shown
    return [tokenizer.encode(text) for text in texts], shown


def build(args: argparse.Namespace) -> tuple[Any, Any, Any, Any]:
    """Model, tokenizer, selection rules and engine settings from the command line."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.geometry import BlockGeometry
    from sparda_jax.checkpoints.load import load_pretrained
    from sparda_jax.config import EngineConfig, SparseConfig

    def to_bytes(gigabytes: float | None) -> int | None:
        return None if gigabytes is None else int(gigabytes * 2**30)

    # Settings first: a mistake in them should not wait for the weights.
    sparse = SparseConfig(
        geometry=BlockGeometry(args.block_size, args.kernel_size, args.kernel_stride),
        init_blocks=args.init_blocks,
        local_blocks=args.local_blocks,
        budget_blocks=args.budget_blocks,
        dense_len=args.dense_len,
    )
    config = EngineConfig(
        mode=args.mode,
        offload=args.offload or ("host" if args.mode == "sparse" else "none"),
        fetch=args.fetch,
        prefill_chunk=args.prefill_chunk,
        steps_per_call=args.steps_per_call,
        max_length=args.max_length,
        device_kv_bytes=to_bytes(args.device_kv_gb),
        host_kv_bytes=to_bytes(args.host_kv_gb),
    )
    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    model, tokenizer = load_pretrained(args.model, dtype=jnp.dtype(dtype), cache_dir=args.cache_dir)
    if tokenizer is None:
        raise ValueError(f"{args.model} has no tokenizer")
    return model, tokenizer, sparse, config


def stream(generation: Any, tokenizer: Any, stops: tuple[int, ...], quiet: bool) -> bool:
    """Runs a generation and prints text as it comes; False when it was interrupted."""
    alone = generation.plan.batch == 1
    decoder = tokenizer.stream_decoder()
    try:
        generation.prefill(None if quiet else show_prefill)
        for _, token in generation:
            if alone and not quiet and token not in stops:
                print(decoder.push(token), end="", flush=True)
    except KeyboardInterrupt:
        return False
    finally:
        if alone and not quiet:
            print(decoder.flush(), flush=True)
    return True


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


def run(args: argparse.Namespace) -> int:
    from sparda_jax.config import SamplingParams
    from sparda_jax.demo import answer_position
    from sparda_jax.engine.generate import Engine
    from sparda_jax.evaluation.agreement import equal_share

    model, tokenizer, sparse, config = build(args)
    prompts, demo = read_prompts(args, tokenizer)
    stops = () if args.ignore_eos else tuple(tokenizer.eos_token_ids)
    requests = [
        SamplingParams(
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.seed + row,
            stop_token_ids=stops,
        )
        for row in range(len(prompts))
    ]
    if not args.json:
        note(
            f"{len(prompts)} x {max(map(len, prompts))} tokens, {config.mode}, KV {config.offload}"
        )
        if demo is not None:
            note(
                f"a text about Python, its question: {demo.question} (the answer stands at token "
                f"{answer_position(tokenizer)})"
            )
    generation = Engine(model, sparse=sparse, config=config).prepare(prompts, requests)
    finished = stream(generation, tokenizer, stops, quiet=args.json)
    results, report = generation.results(), generation.report
    texts = [
        tokenizer.decode([token for token in result.tokens if token not in stops])
        for result in results
    ]
    equal = None
    if finished and args.compare_dense:
        from dataclasses import replace

        if not args.json:
            note("the same with dense attention")
        dense = Engine(model, sparse=sparse, config=replace(config, mode="dense", offload="none"))
        others, _ = dense.generate(
            prompts, requests, on_prefill=None if args.json else show_prefill
        )
        equal = equal_share(
            [result.tokens for result in results], [other.tokens for other in others]
        )
    if args.json:
        output = {
            "mode": config.mode,
            "offload": config.offload,
            "interrupted": not finished,
            "results": [
                vars(result) | {"text": text} for result, text in zip(results, texts, strict=True)
            ],
            "report": report.as_dict(),
            "equal_to_dense": equal,
        }
        print(json.dumps(output, indent=2, ensure_ascii=False))
    else:
        if len(texts) > 1:
            for row, (text, result) in enumerate(zip(texts, results, strict=True)):
                print(f"[{row}] ({result.finish_reason}) {text}")
        print("\n" + "\n".join(summary(report)))
        if equal is not None:
            print(f"equal to dense   {100 * equal:9.1f} %       of greedy tokens")
    if any(result.finish_reason == "failed" for result in results):
        rows = [row for row, result in enumerate(results) if result.finish_reason == "failed"]
        raise FloatingPointError(f"logits of request {rows[0]} are not finite (NaN or infinity)")
    return 0 if finished else EXIT_INTERRUPTED


def main() -> int:
    args = parse_arguments()
    try:
        return run(args)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (
        ValueError,
        NotImplementedError,
        FloatingPointError,
        OSError,
        RuntimeError,
    ) as error:
        print(f"decode.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
