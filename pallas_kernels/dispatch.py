"""Choice between the Mosaic GPU kernel and the jax.numpy reference of an operation."""

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax

from pallas_kernels import interpret

Implementation = Literal["auto", "mosaic", "xla"]

# Written for Hopper (wgmma, TMA); the Mosaic GPU API we use exists from jax 0.11 on.
MINIMUM_CAPABILITY = (9, 0)

_logger = logging.getLogger("pallas_kernels")


def run(
    op: str,
    implementation: Implementation,
    reference: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls the reference or the kernel of the same name in ``pallas_kernels.<op>.mosaic``.

    "auto" takes the kernel on a GPU of compute capability 9.0 or more with jax 0.11 or
    more, where it exists and accepts the arguments, and the reference otherwise; each
    distinct choice is logged once at INFO by the logger "pallas_kernels".  "mosaic" never falls
    back.
    A kernel refuses arguments by raising NotImplementedError while it is traced.

    Args:
        op: name of the operation's folder.
        implementation: "auto", "mosaic" or "xla".
        reference: the reference function; its ``__name__`` is also the kernel's.
        *args: passed on.
        **kwargs: passed on.

    Returns:
        What the chosen function returns.

    Raises:
        ValueError: unknown ``implementation``.
        NotImplementedError: "mosaic" was asked for and cannot be served.
    """
    if implementation not in get_args(Implementation):
        raise ValueError(
            f"implementation must be one of {get_args(Implementation)}, got {implementation!r}"
        )
    name = reference.__name__
    if implementation == "xla":
        return reference(*args, **kwargs)
    if implementation == "mosaic":
        reason = None if interpret.is_active() else unavailable()
        if reason is None:
            kernel, reason = _kernel(op, name)
            if kernel is not None:
                return kernel(*args, **kwargs)
        raise NotImplementedError(f"{op}.{name} cannot run as a Mosaic kernel: {reason}")
    reason = unavailable()
    if reason is None:
        kernel, reason = _kernel(op, name)
        if kernel is not None:
            try:
                result = kernel(*args, **kwargs)
            except NotImplementedError as error:
                reason = str(error)
            else:
                _log_choice(f"{op}.{name}", "mosaic", "")
                return result
    _log_choice(f"{op}.{name}", "xla", f": {reason}")
    return reference(*args, **kwargs)


def unavailable() -> str | None:
    """Why no Mosaic kernel can run where this process computes, or None."""
    if jax.__version_info__ < interpret.MINIMUM_JAX:
        return f"jax {jax.__version__} is older than 0.11"
    device = _default_device()
    if device.platform != "gpu":
        return f"the platform is {device.platform}, not gpu"
    capability = tuple(int(x) for x in str(device.compute_capability).split("."))
    if capability < MINIMUM_CAPABILITY:
        return f"compute capability {device.compute_capability} is below 9.0"
    return None


def _default_device() -> jax.Device:
    """The device that ``jax.default_device`` names, else the first one."""
    device = jax.config.jax_default_device
    if device is None:
        return jax.local_devices()[0]
    if isinstance(device, str):
        return jax.local_devices(backend=device)[0]
    return device


@functools.cache
def _kernel(op: str, name: str) -> tuple[Callable[..., Any] | None, str | None]:
    """The kernel function, or the reason why there is none."""
    module_name = f"pallas_kernels.{op}.mosaic"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A missing dependency of an existing kernel is an error, not a missing kernel.
        if error.name != module_name:
            raise
        return None, f"there is no Mosaic kernel for {op}"
    kernel = getattr(module, name, None)
    if kernel is None:
        return None, f"there is no Mosaic kernel for {name}"
    return kernel, None


@functools.cache
def _log_choice(function: str, choice: str, reason: str) -> None:
    """Logs one choice; the cache makes it once per distinct choice."""
    _logger.info("%s uses %s%s", function, choice, reason)
