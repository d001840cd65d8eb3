"""``python -m sparda_jax.serve``: the default model, or any other, behind an HTTP server."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sparda_jax.cli import (
    HelpFormatter,
    Parser,
    add_engine_options,
    add_model_options,
    diffusion_model,
    engine_settings,
    guarded,
    load_model,
    load_selector,
    note,
    resolve_mode,
)
from sparda_jax.commands import herald
from sparda_jax.commands.diffusion import add_denoise_options

if TYPE_CHECKING:
    from sparda_jax.diffusion.config import DenoiseParams
    from sparda_jax.engine.serving import Serving

LIKELIEST = 20  # tokens with log-probabilities that clients may ask for, as elsewhere


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the server."""
    parser = Parser(
        prog="python -m sparda_jax.serve", description=__doc__, formatter_class=HelpFormatter
    )
    add_model_options(parser)
    add_engine_options(parser, more_modes=herald.MODES)
    add_denoise_options(parser)
    herald.add_herald_options(parser)
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen on; the default is this machine's")
    add("--port", type=int, default=8000, help="0 takes a free one")
    add("--name", help="of the model, for clients (default: --model)")
    add("--rows", type=int, default=8, help="requests that decode at the same time")
    add("--queue", type=int, default=256, help="requests that may wait")
    add(
        "--prefill-ms",
        type=float,
        default=50.0,
        help="longest prefill between two decode calls; running requests wait so long",
    )
    add(
        "--prefix-reuse",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the KV of earlier requests for prompts that begin alike",
    )
    add("--max-body-mb", type=float, default=16.0, help="most MiB of a request")
    add(
        "--client-seconds",
        type=float,
        default=60.0,
        help="a client reads nothing for so long: gone",
    )
    add("--grace-seconds", type=int, default=30, help="for running requests after SIGTERM")
    add("--traceback", action="store_true", help="show where in the code an error arose")
    args = parser.parse_args(argv)
    if not args.diffusion:
        if args.mode in herald.MODES:
            parser.error(f"--mode {args.mode} selects for blocks of tokens: add --diffusion")
        resolve_mode(parser, args)
    elif args.forecast or args.offload or args.mode in ("sparse", "sparda", "auto"):
        parser.error("--diffusion: the mode says where the KV lies: dense (the default), infinigen "
                     "or one of HERALD's but auto; leave --forecast and --offload out")  # fmt: skip
    return args


def run(args: argparse.Namespace) -> int:
    """Loads the model and serves until a signal."""
    import uvicorn

    from sparda_jax.engine.service import SchedulerConfig
    from sparda_jax.serve.app import Server, ServerConfig

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    model, tokenizer = load_model(args.model, args.dtype, args.cache_dir)
    engine, denoise = (_block_engine if args.diffusion else _engine)(args, model, tokenizer)
    limits = SchedulerConfig(
        rows=args.rows,
        max_length=args.max_length,
        queue=args.queue,
        prefill_seconds=args.prefill_ms / 1000,
        prefix_reuse=args.prefix_reuse,
        stop_tokens=max(8, len(tokenizer.eos_token_ids)),
    )
    allowed = ServerConfig(
        name=args.name or args.model,
        most_body_bytes=int(args.max_body_mb * 2**20),
        client_seconds=args.client_seconds,
        denoise=denoise,
    )
    scheduler = engine.serve(limits, tokenizer)
    where = f"KV {args.offload}" if args.offload else "blocks"
    note(f"{args.rows} rows of {scheduler.max_length} tokens, {args.mode}, {where}; compiling")
    scheduler.rows.compile()
    uvicorn.run(
        Server(scheduler, allowed).app(),
        host=args.host,
        port=args.port,
        log_level="info",
        access_log=False,  # the scheduler's own lines say more, and no prompt is in them
        timeout_graceful_shutdown=args.grace_seconds,
        limit_concurrency=args.rows + args.queue + 64,
    )
    return 0


def _engine(args: argparse.Namespace, model: Any, tokenizer: Any) -> tuple[Serving, None]:
    """For a causal model."""
    from sparda_jax.engine.generate import Engine

    sparse, config = engine_settings(args)
    config = dataclasses.replace(config, top_logprobs=LIKELIEST)
    selector = load_selector(
        args.mode, model, tokenizer, args.forecast, verify=args.verify_forecast
    )
    return Engine(model, sparse=sparse, config=config, **selector), None


def _block_engine(
    args: argparse.Namespace, model: Any, tokenizer: Any
) -> tuple[Serving, DenoiseParams]:
    """For a model of block diffusion; and how it denoises unless a request says otherwise."""
    from sparda_jax.commands.diffusion import denoise_settings
    from sparda_jax.herald.engine import HeraldEngine

    args.mode = args.mode or "dense"
    model = diffusion_model(args.model, model, args.adapter)
    config = herald.herald_settings(args, model, args.mode)
    return HeraldEngine(model, config=config), denoise_settings(args, model)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    return guarded("sparda_jax.serve", run, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
