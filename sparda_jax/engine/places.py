"""What the scheduler needs of the rows in which requests run, whatever the model does there."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from sparda_jax.config import SamplingParams
from sparda_jax.engine.batch import Gain

# A counter, and what it counts.
Total = tuple[float, str]


@dataclass(frozen=True)
class Admission:
    """A request that has a row.

    Attributes:
      row: which.
      known: tokens of its prompt that need no prefill.
      work: its prefill in units; yields after each an array to wait for, and returns its first
        tokens, if it has any. Then the row decodes.
    """

    row: int
    known: int
    work: Generator[jax.Array, None, Gain]


class Places(Protocol):
    """Rows of one fixed-shape program.

    Attributes:
      max_length: tokens that a prompt and its answer may have together.
      active: rows that still generate, `bool[B]`.
    """

    max_length: int
    active: np.ndarray

    @property
    def report(self) -> Any:
        """Counters of the engine."""
        ...

    @property
    def batch(self) -> int:
        """B."""
        ...

    @property
    def free(self) -> int:
        """Rows that no request has."""
        ...

    @property
    def blocks(self) -> int:
        """KV blocks of each layer that there are for all requests."""
        ...

    def blocks_used(self, running: Mapping[int, int]) -> int:
        """KV blocks of running requests, by row the tokens they may have; shared ones once."""
        ...

    def check(self, prompt: Sequence[int], params: SamplingParams, rule: Any) -> None:
        """Raises ValueError for a request that can never run."""
        ...

    def admit(self, prompt: Sequence[int], params: SamplingParams, rule: Any) -> Admission | None:
        """Gives a request a row; None: it has to wait for others to end."""
        ...

    def decode(self) -> list[Gain]:
        """One call for all active rows: what each gained."""
        ...

    def failure(self, row: int) -> str | None:
        """Why a row's request failed; None: it did not."""
        ...

    def remember(self, row: int, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """What a row has computed so far may serve prompts that begin alike."""
        ...

    def leave(self, row: int) -> None:
        """A row's request has ended, by itself or not."""
        ...

    def compile(self) -> object:
        """Compiles what decodes."""
        ...

    @property
    def compilations(self) -> tuple[int, float]:
        """Programs compiled so far, and seconds that it took."""
        ...

    def totals(self) -> dict[str, Total]:
        """Counters that only go up, and what they count, by name."""
        ...

    def close(self) -> None:
        """Nothing runs here any more."""
        ...
