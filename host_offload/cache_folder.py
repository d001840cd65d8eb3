"""Where this project keeps files for later that can be made or fetched again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/sparda_jax``, or ``~/.cache/sparda_jax`` where that is not set."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "sparda_jax"
