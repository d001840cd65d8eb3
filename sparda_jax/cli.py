"""What the command lines share: options, one-line errors, exit codes.

Importing it does not import jax, whose logging a script settles first.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from sparda_jax.config import EngineConfig, SparseConfig
    from sparda_jax.models.decoder import Decoder

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141  # what a shell reports for a program that SIGPIPE ended

CALIBRATION_TOKENS = 2048  # InfiniGen's, as published

_ERRORS = (ValueError, ArithmeticError, OSError, RuntimeError, ImportError, MemoryError)
_GEOMETRY = {
    "block_size": "tokens per KV block",
    "kernel_size": "tokens per compressed key",
    "kernel_stride": "tokens between compressed keys",
}
_RULES = {
    "budget_blocks": "blocks attended, forced ones included",
    "init_blocks": "first blocks, always attended",
    "local_blocks": "blocks before the current one, likewise",
}


class Parser(argparse.ArgumentParser):
    """Errors in one line: the usage of so many options would hide them."""

    def error(self, message: str) -> NoReturn:
        """Prints the message and ends the process with 2."""
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default of an option where it has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


def gibibytes(text: str) -> int:
    """A memory size in GiB as bytes.

    Raises:
        argparse.ArgumentTypeError: not a positive number.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 2**30:
        raise argparse.ArgumentTypeError(f"must be a positive number of GiB, got {text!r}")
    return max(1, int(value * 2**30))


def add_policy_options(group: Any, otherwise: str = "") -> None:
    """Options of a `SparseConfig` but `dense_len`; `policy` reads them.

    Args:
        group: argument group or parser.
        otherwise: what stands before the default in the help, such as "the weights', else ".
    """
    from sparda_jax.config import SparseConfig

    default = SparseConfig()
    for source, options in ((default.geometry, _GEOMETRY), (default, _RULES)):
        for name, text in options.items():
            flag = "--" + name.replace("_", "-")
            value = f"{otherwise}{getattr(source, name)}"
            group.add_argument(flag, type=int, help=f"{text} (default: {value})")


def policy(args: argparse.Namespace, base: SparseConfig) -> SparseConfig:
    """`base` with what the command line says otherwise.

    Raises:
        ValueError: rules that contradict each other.
    """
    from pallas_kernels.geometry import BlockGeometry

    def given(options: dict[str, str]) -> dict[str, int]:
        values = {name: getattr(args, name) for name in options}
        return {name: value for name, value in values.items() if value is not None}

    fields = {name: getattr(base.geometry, name) for name in _GEOMETRY} | given(_GEOMETRY)
    return dataclasses.replace(base, geometry=BlockGeometry(**fields), **given(_RULES))


def add_model_options(parser: argparse.ArgumentParser, cache_dir: str | None = None) -> None:
    """Options that say what `load_model` is to load.

    Args:
        parser: takes them.
        cache_dir: default of `--cache-dir`; None: the user's cache.
    """
    # The formatter names any other default.
    kept = "" if cache_dir else " (default: the user's cache)"
    add = parser.add_argument_group("model").add_argument
    add("--model", default="default", help="'default', a directory, a GGUF file or a hub id")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="weights and KV (default: float32 on CPU, where bfloat16 is slow, else bfloat16)",
    )
    add(
        "--cache-dir",
        type=Path,
        default=cache_dir,
        help="where the default model is kept" + kept,
    )


def add_engine_options(parser: argparse.ArgumentParser, more_modes: Sequence[str] = ()) -> None:
    """Options that `resolve_mode`, `engine_settings` and `load_selector` read.

    Args:
        parser: gets them.
        more_modes: that the caller takes care of.
    """
    group = parser.add_argument_group("attention and KV cache")
    add = group.add_argument
    add(
        "--mode",
        choices=("dense", "sparse", "sparda", "infinigen", *more_modes),
        help="who selects the blocks to attend: nobody, each layer, or the layer before, by "
        "Forecast or InfiniGen (default: sparda where there are Forecast weights, else sparse)",
    )
    add(
        "--forecast",
        help="Forecast weights: 'default' or a safetensors file (default: for the default model "
        "those that ship with it)",
    )
    add(
        "--verify-forecast",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="refuse Forecast weights that do not name this model",
    )
    add(
        "--offload",
        choices=("none", "host", "auto"),
        help="where the KV lives; auto: on the device in as many layers as --device-kv-gb allows "
        "(default: none for dense, else host)",
    )
    add(
        "--host-kv-dtype",
        choices=("model", "int8", "float8_e4m3fn"),
        default="model",
        help="how KV is kept on the host",
    )
    add("--fetch", choices=("program", "eager"), default="program", help="who copies missed blocks")
    add_policy_options(group, "what the Forecast was trained for, else ")
    add("--dense-len", type=int, default=0, help="attend densely below this many tokens")
    for place in ("device", "host"):
        text = f"most GiB of KV on the {place} (default: all that is free)"
        add(f"--{place}-kv-gb", type=gibibytes, help=text)
    add("--spare-slots", type=int, default=0, help="device blocks kept beyond the budget")
    add("--max-length", type=int, help="most tokens of a sequence (default: the model's)")
    add("--prefill-chunk", type=int, default=512, help="prompt tokens per prefill call")
    add("--steps-per-call", type=int, default=8, help="tokens per compiled decode call")


def resolve_mode(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Fills in mode, Forecast weights and offload where the command line leaves them open."""
    default = "default" if args.model == "default" else None
    if args.mode is None:
        args.mode = "sparda" if args.forecast or default else "sparse"
    if args.mode == "sparda":
        args.forecast = args.forecast or default
        if args.forecast is None:
            parser.error("--mode sparda: name the Forecast weights of this model with --forecast")
    elif args.forecast is not None:
        parser.error(f"--forecast is for --mode sparda, not {args.mode}")
    args.offload = args.offload or ("none" if args.mode == "dense" else "host")


def engine_settings(args: argparse.Namespace) -> tuple[SparseConfig, EngineConfig]:
    """Selection rules and engine settings from the command line.

    Raises:
        ValueError: settings that contradict each other.
        NotImplementedError: dense attention over offloaded KV.
    """
    from sparda_jax.config import EngineConfig, SparseConfig
    from sparda_jax.engine.plan import check_settings
    from sparda_jax.forecast.files import forecast_policy
    from sparda_jax.huggingface_policy import folder_policy

    trained_for = None if args.forecast is None else forecast_policy(args.forecast)
    rules = policy(args, trained_for or folder_policy(args.model) or SparseConfig())
    sparse = dataclasses.replace(rules, dense_len=args.dense_len)
    config = EngineConfig(
        mode=args.mode,
        offload=args.offload,
        host_kv_dtype=args.host_kv_dtype,
        fetch=args.fetch,
        spare_slots=args.spare_slots,
        prefill_chunk=args.prefill_chunk,
        steps_per_call=args.steps_per_call,
        max_length=args.max_length,
        device_kv_bytes=args.device_kv_gb,
        host_kv_bytes=args.host_kv_gb,
    )
    check_settings(config, sparse)
    return sparse, config


def load_model(
    name: str, dtype: str | None = None, cache_dir: str | Path | None = None
) -> tuple[Any, Any]:
    """Model and tokenizer.

    Args:
        name: "default", a directory, a GGUF file or a hub id.
        dtype: of the weights; None: what suits the device.
        cache_dir: where the default model is kept; None: the user's cache.

    Raises:
        ValueError: no tokenizer.
    """
    import jax
    import jax.numpy as jnp

    from sparda_jax.checkpoints.load import load_pretrained

    dtype = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    model, tokenizer = load_pretrained(name, dtype=jnp.dtype(dtype), cache_dir=cache_dir)
    if tokenizer is None:
        raise ValueError(f"no tokenizer.json in {name}")
    return model, tokenizer


def diffusion_model(name: str, model: Decoder, adapter: str | None = None) -> Decoder:
    """The model itself where its checkpoint is one of block diffusion, else with its adapter.

    Args:
        name: of the model.
        model: what `load_model` gave for it.
        adapter: None: that which ships with the default model.

    Raises:
        ValueError: a causal model and no adapter for it.
    """
    from sparda_jax.diffusion.files import load_adapter

    adapter = adapter or ("default" if name == "default" else None)
    if adapter is not None:
        return load_adapter(adapter, model)
    if model.config.diffusion is None:
        raise ValueError(
            f"--diffusion: {name} is a causal model; name an adapter for it with --adapter"
        )
    return model


def load_selector(
    mode: str, model: Any, tokenizer: Any, forecast: str | None = None, *, verify: bool = True
) -> dict[str, Any]:
    """What the mode needs besides the model, by the engine's name for it.

    Args:
        mode: attention mode.
        model: the decoder.
        tokenizer: its tokenizer.
        forecast: weights for mode "sparda": "default" or a file.
        verify: refuse weights that do not name this model.

    Raises:
        ValueError: mode "sparda" without weights, or with those of another model.
    """
    if mode == "sparda":
        from sparda_jax.forecast.files import load_forecast

        if forecast is None:
            raise ValueError("mode sparda needs Forecast weights of this model")
        found, _ = load_forecast(forecast, model, verify_base=verify)
        return {"forecast": found}
    if mode == "infinigen":
        import jax.numpy as jnp

        from sparda_jax.assets import load_python_topics
        from sparda_jax.sparse.infinigen import calibrate

        length = min(CALIBRATION_TOKENS, model.config.max_position_embeddings)
        text = tokenizer.encode(load_python_topics()[: 16 * length])[:length]
        return {"infinigen": calibrate(model, jnp.asarray([text], jnp.int32))}
    return {}


def note(text: str) -> None:
    """Prints for people, on standard error."""
    print(text, file=sys.stderr, flush=True)


def read_text(path: Path) -> str:
    """A UTF-8 file, without byte order mark.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not UTF-8; says where.
    """
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        byte, at = error.object[error.start], error.start
        raise ValueError(f"{path} is not UTF-8: byte 0x{byte:02x} at offset {at}") from None


def describe(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def guarded(
    name: str,
    run: Callable[[argparse.Namespace], int],
    args: argparse.Namespace,
    *,
    interrupted: str = "interrupted",
) -> int:
    """Runs a command; what goes wrong becomes one line and an exit code.

    Args:
        name: of the program, before the message.
        run: returns the exit code.
        args: for `run`; `args.traceback` lets errors through.
        interrupted: what to say after Ctrl-C.
    """
    try:
        return run(args)
    except KeyboardInterrupt:
        note(interrupted)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough; what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except _ERRORS as error:
        if args.traceback:
            raise
        note(f"{name}: {describe(error)}")
        return 1
