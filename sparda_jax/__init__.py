"""Long-context LLM inference in JAX: host-resident KV cache, block-sparse attention.

Importing this package imports nothing else: pick what you need from the modules. Offered here, and
imported when asked for: `from_pretrained` (`sparda_jax.pretrained`), `Engine`
(`sparda_jax.engine.generate`) for autoregressive models and `HeraldEngine`
(`sparda_jax.herald.engine`) for block diffusion.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparda_jax.engine.generate import Engine as Engine
    from sparda_jax.herald.engine import HeraldEngine as HeraldEngine
    from sparda_jax.pretrained import from_pretrained as from_pretrained

_OFFERED = {
    "Engine": "sparda_jax.engine.generate",
    "HeraldEngine": "sparda_jax.herald.engine",
    "from_pretrained": "sparda_jax.pretrained",
}
__all__ = ["Engine", "HeraldEngine", "from_pretrained"]


def __getattr__(name: str) -> Any:
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_OFFERED[name]), name)
