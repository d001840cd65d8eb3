"""What a HERALD generation did: the counters of block decoding and those of the host's side."""

from __future__ import annotations

import dataclasses
from typing import Any

from host_offload.memory import format_bytes
from host_offload.retrieval import Retrieved
from sparda_jax.diffusion.report import BlockReport

# What ran, and when it began and ended, in seconds on one clock.
Event = tuple[str, float, float]


def host_events(found: Retrieved) -> list[Event]:
    """What the host did for one layer."""
    events = [("copy", found.sending, found.arrived)]
    for began, chosen, gathered in found.parts:
        events += [("scan", began, chosen), ("gather", chosen, gathered)]
    return events


@dataclasses.dataclass
class HeraldReport(BlockReport):
    """Counters of one session. Times exclude compilation.

    Attributes:
        mode: of the engine.
        host_kv_bytes: of the store.
        pinning_seconds: time that making the staging buffers took, once.
        turns: rounds in which every row gave one block.
        retrieval_stall_seconds: time the device had nothing to do but wait for chosen rows.
        host_seconds: of the host's side by part, added up over threads: "query" (its way to the
            host), "scan", "gather", "copy" (starting it).
        scanned_bytes: of keys.
        h2d_bytes: chosen rows, whole slots.
        d2h_bytes: committed rows.
        chosen_rows: by selection (one layer of one request), summed.
        attended_rows: those, the init rows and the previous block, summed.
        prefix_rows: rows before the block, summed likewise.
        selections: how many.
        drafted: positions of blocks that a draft guessed.
        draft_equal: of these, guesses that came true.
    """

    mode: str = "herald"
    host_kv_bytes: int = 0
    pinning_seconds: float = 0.0
    turns: int = 0
    retrieval_stall_seconds: float = 0.0
    host_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    scanned_bytes: int = 0
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    chosen_rows: int = 0
    attended_rows: int = 0
    prefix_rows: int = 0
    selections: int = 0
    drafted: int = 0
    draft_equal: int = 0

    def add(self, found: Retrieved) -> None:
        """Counts one layer's retrieval."""
        self.scanned_bytes += found.scanned_bytes
        self.h2d_bytes += found.copied_bytes
        for part, seconds in found.seconds.items():
            self.host_seconds[part] = self.host_seconds.get(part, 0.0) + seconds

    @property
    def effective_share(self) -> float:
        """Share of the prefix that is attended, init rows and previous block included."""
        return self.attended_rows / self.prefix_rows if self.prefix_rows else 1.0

    @property
    def retrieval_stall_ms(self) -> float:
        """Per turn."""
        return 1e3 * self.retrieval_stall_seconds / self.turns if self.turns else 0.0

    @property
    def draft_agreement(self) -> float:
        """Share of drafted tokens that came true."""
        return self.draft_equal / self.drafted if self.drafted else 0.0

    def summary(self) -> list[str]:
        """The counters as lines of text."""
        lines = super().summary()
        if self.selections:
            lines.append(
                f"attended         {100 * self.effective_share:9.1f} %       of the prefix "
                f"({self.chosen_rows / self.selections:.0f} chosen rows a layer and block)"
            )
        if self.host_kv_bytes:
            lines.append(f"KV on the host   {format_bytes(self.host_kv_bytes):>14}")
            lines.append(
                f"retrieval stall  {self.retrieval_stall_ms:9.1f} ms      a block "
                f"({format_bytes(self.scanned_bytes)} scanned, {format_bytes(self.h2d_bytes)} "
                "to the device)"
            )
        if self.drafted:
            lines.append(f"draft            {100 * self.draft_agreement:9.1f} %       came true")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """All fields and derived figures, ready for JSON."""
        derived = ("effective_share", "retrieval_stall_ms", "draft_agreement")
        return super().as_dict() | {name: getattr(self, name) for name in derived}
