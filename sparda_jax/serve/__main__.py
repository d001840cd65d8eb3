"""``python -m sparda_jax.serve``: the default model, or any other, behind an HTTP server."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Sequence

from sparda_jax.cli import (
    HelpFormatter,
    Parser,
    add_engine_options,
    add_model_options,
    engine_settings,
    guarded,
    load_model,
    load_selector,
    note,
    resolve_mode,
)

LIKELIEST = 20  # tokens with log-probabilities that clients may ask for, as elsewhere


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the server."""
    parser = Parser(
        prog="python -m sparda_jax.serve", description=__doc__, formatter_class=HelpFormatter
    )
    add_model_options(parser)
    add_engine_options(parser)
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
    resolve_mode(parser, args)
    return args


def run(args: argparse.Namespace) -> int:
    """Loads the model and serves until a signal."""
    import uvicorn

    from sparda_jax.engine.generate import Engine
    from sparda_jax.engine.scheduler import Scheduler
    from sparda_jax.engine.service import SchedulerConfig
    from sparda_jax.serve.app import Server, ServerConfig

    sparse, config = engine_settings(args)
    config = dataclasses.replace(config, top_logprobs=LIKELIEST)
    limits = SchedulerConfig(
        rows=args.rows,
        max_length=args.max_length,
        queue=args.queue,
        prefill_seconds=args.prefill_ms / 1000,
        prefix_reuse=args.prefix_reuse,
    )
    allowed = ServerConfig(
        name=args.name or args.model,
        most_body_bytes=int(args.max_body_mb * 2**20),
        client_seconds=args.client_seconds,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    model, tokenizer = load_model(args)
    engine = Engine(model, sparse=sparse, config=config, **load_selector(args, model, tokenizer))
    limits = dataclasses.replace(limits, stop_tokens=max(8, len(tokenizer.eos_token_ids)))
    scheduler = Scheduler(engine, limits, tokenizer)
    length = scheduler.max_length
    note(f"{args.rows} rows of {length} tokens, {args.mode}, KV {args.offload}; compiling")
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


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    return guarded("sparda_jax.serve", run, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
