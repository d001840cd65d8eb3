"""Long-context LLM inference in JAX: host-resident KV cache, block-sparse attention.

Importing this package imports nothing else: pick what you need from the modules.
`sparda_jax.from_pretrained` is `sparda_jax.pretrained.from_pretrained`, imported when asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparda_jax.pretrained import from_pretrained as from_pretrained

__all__ = ["from_pretrained"]


def __getattr__(name: str) -> Any:
    if name == "from_pretrained":
        from sparda_jax.pretrained import from_pretrained

        return from_pretrained
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
