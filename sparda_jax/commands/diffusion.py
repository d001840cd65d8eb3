"""Command line of block diffusion: options, streaming of blocks, summary."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sparda_jax.cli import EXIT_INTERRUPTED, diffusion_model, note

if TYPE_CHECKING:
    from sparda_jax.diffusion.config import DenoiseParams
    from sparda_jax.diffusion.generate import BlockGeneration
    from sparda_jax.models.decoder import Decoder
    from sparda_jax.tokenization import Tokenizer

# What `decode.py --diffusion` continues when it is given nothing.
DEMO_TEXT = (
    "Python is a programming language that lets you work quickly. It is used for many tasks, from "
    "small scripts to large web sites. One of the reasons for its success is that"
)


def add_denoise_options(parser: argparse.ArgumentParser) -> Callable[..., Any]:
    """`--diffusion`, and what model and rule it takes; returns how to add to their group."""
    add = parser.add_argument_group("block diffusion").add_argument
    add("--diffusion", action="store_true", help="denoise blocks of tokens instead of one by one")
    add(
        "--adapter",
        help="block-diffusion adapter: 'default' or a safetensors file (default: for the default "
        "model the one that ships with it)",
    )
    add("--strategy", help="which masks a step replaces (default: the model's)")
    add("--threshold", type=float, help="confidence above which a token is decided")
    add("--denoising-steps", type=int, help="steps a block takes at most (default: its tokens)")
    add("--sub-block", type=int, help="tokens of a block that are denoised together")
    add("--edit-threshold", type=float, help="LLaDA2.1's token editing: refused")
    return add


def add_diffusion_options(parser: argparse.ArgumentParser) -> None:
    """Options that count with `--diffusion`."""
    add = add_denoise_options(parser)
    add("--diffusion-block", type=int, help="tokens of a block; only the weights' own is taken")
    add("--dual-cache", action="store_true", help="Fast-dLLM v2's approximate block cache")
    add("--blocks-per-call", type=int, default=1, help="blocks per compiled call")
    add("--stop", action="append", default=[], help="text that ends a request; may be repeated")


def denoise_settings(args: argparse.Namespace, model: Decoder) -> DenoiseParams:
    """The model's denoising settings with what the command line says otherwise.

    Raises:
        ValueError: settings that are impossible or do not fit the block size.
    """
    import dataclasses

    from sparda_jax.diffusion.config import DenoiseParams, diffusion_of

    named = {
        "strategy": args.strategy,
        "threshold": args.threshold,
        "steps": args.denoising_steps,
        "sub_block": args.sub_block,
        "edit_threshold": args.edit_threshold,
    }
    given = {name: value for name, value in named.items() if value is not None}
    params = dataclasses.replace(DenoiseParams.of_family(model.config), **given)
    params.check(diffusion_of(model.config)[0].block_size)
    return params


class Texts:
    """Text of every request as blocks come in, up to its first stop string."""

    def __init__(self, tokenizer: Tokenizer, count: int, hidden: Sequence[int], stops: list[str]):
        from sparda_jax.engine.requests import StopStrings

        self._hidden = frozenset(hidden)
        self._streams = [StopStrings(tokenizer.stream_decoder(), stops) for _ in range(count)]
        self.parts: list[list[str]] = [[] for _ in range(count)]

    def add(self, row: int, tokens: Sequence[int]) -> tuple[str, bool]:
        """The text that became certain, and whether a stop string came."""
        stream = self._streams[row]
        text = "".join(stream.push(token) for token in tokens if token not in self._hidden)
        self.parts[row].append(text)
        return text, stream.found

    def finish(self, row: int) -> str:
        """What was held back, when nothing follows."""
        rest = self._streams[row].flush()
        self.parts[row].append(rest)
        return rest


def stream_blocks(generation: BlockGeneration, texts: Texts, quiet: bool) -> bool:
    """Runs a generation and prints text and steps as blocks come; False when interrupted."""
    from sparda_jax.engine.interrupt import DeferredInterrupt

    show = len(texts.parts) == 1 and not quiet
    number = [0] * len(texts.parts)
    try:
        with DeferredInterrupt() as interrupt:
            generation.prefill(lambda done, total: interrupt.check())
            for block in generation:
                text, found = texts.add(block.row, block.tokens)
                if found:
                    generation.cancel(block.row, "stop")
                if show:
                    print(text, end="", flush=True)
                if block.steps and not quiet:
                    number[block.row] += 1
                    note(_line(block, number[block.row], len(number)))
                interrupt.check()
    except KeyboardInterrupt:
        if not quiet:
            note("interrupted")
        return False
    finally:
        for row in range(len(texts.parts)):
            rest = texts.finish(row)
            if show:
                print(rest, flush=True)
    return True


def _line(block: Any, number: int, requests: int) -> str:
    whose = f"request {block.row}, " if requests > 1 else ""
    return f"  [{whose}block {number}: {len(block.tokens)} tokens in {block.steps} steps]"


def run(
    args: argparse.Namespace,
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    requests: Any,
    prepare: Callable[..., BlockGeneration] | None = None,
) -> int:
    """Decodes prompts by block diffusion and prints what came out; returns the exit code.

    Args:
        args: of the command line.
        model: as loaded.
        tokenizer: its tokenizer.
        prompts: token ids.
        requests: sampling settings of each.
        prepare: takes model, prompts, requests and denoising settings and returns a generation;
            None: `BlockEngine`'s.

    Raises:
        FloatingPointError: logits that are not finite, or requests that were given up.
    """
    model = diffusion_model(args.model, model, args.adapter)
    rule = denoise_settings(args, model)
    generation = (prepare or _prepare)(args, model, prompts, requests, rule)
    if not args.json:
        note(
            f"{len(prompts)} x {max(map(len, prompts))} tokens, blocks of "
            f"{model.config.diffusion.block_size}, {rule.strategy}, threshold {rule.threshold:g}"  # type: ignore[union-attr]
        )
    texts = Texts(tokenizer, len(prompts), requests[0].stop_token_ids, args.stop)
    finished = stream_blocks(generation, texts, args.json)
    results, report = generation.results(), generation.report
    written = ["".join(parts) for parts in texts.parts]
    if args.json:
        rows = [vars(r) | {"text": text} for r, text in zip(results, written, strict=True)]
        output = {"results": rows, "report": report.as_dict(), "interrupted": not finished}
        print(json.dumps(output, indent=2, ensure_ascii=False))
    else:
        if len(written) > 1:
            for row, (text, result) in enumerate(zip(written, results, strict=True)):
                print(f"[{row}] ({result.finish_reason}) {text}")
        print("\n" + "\n".join(report.summary()), flush=True)
    if generation.errors:
        failed = [f"request {number}: {error}" for number, error in generation.errors.items()]
        raise FloatingPointError("; ".join(failed))
    return 0 if finished else EXIT_INTERRUPTED


def _prepare(
    args: argparse.Namespace, model: Decoder, prompts: Any, requests: Any, rule: DenoiseParams
) -> BlockGeneration:
    from sparda_jax.diffusion.config import diffusion_of
    from sparda_jax.diffusion.generate import BlockEngine
    from sparda_jax.diffusion.plan import BlockEngineConfig

    width = diffusion_of(model.config)[0].block_size
    if args.dual_cache and rule.sub_block is None:
        raise ValueError("--dual-cache runs sub-blocks alone: state their size with --sub-block")
    config = BlockEngineConfig(
        block_size=args.diffusion_block,
        dual_cache=rule.sub_block if args.dual_cache else None,
        kv_block=max(64, width),
        prefill_chunk=args.prefill_chunk,
        blocks_per_call=args.blocks_per_call,
        max_length=args.max_length,
        device_kv_bytes=args.device_kv_gb,
    )
    return BlockEngine(model, config=config).prepare(prompts, requests, rule)
