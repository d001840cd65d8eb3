"""What a block-wise generation did, added up on the host."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from host_offload.memory import format_bytes


@dataclasses.dataclass
class BlockReport:
    """Counters of one batch. Times exclude compilation, which has its own fields.

    Attributes:
        prefill_tokens: aligned prompt tokens, padding not counted.
        prefill_seconds: wall time of prefill.
        decode_tokens: tokens handed out.
        decode_seconds: wall time of the decode calls.
        compile_seconds: compile time met in both.
        forwards: forwards of the whole batch.
        narrow_forwards: how many of these ran sub-blocks alone (dual cache).
        steps: how many blocks took so many denoising forwards (the commit is one more).
        device_kv_bytes: of the caches.
    """

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    compile_seconds: float = 0.0
    forwards: int = 0
    narrow_forwards: int = 0
    steps: Counter[int] = dataclasses.field(default_factory=Counter)
    device_kv_bytes: int = 0

    @property
    def blocks(self) -> int:
        """Blocks handed out."""
        return sum(self.steps.values())

    @property
    def steps_per_block(self) -> float:
        """Mean denoising forwards a block; 0 before the first."""
        total = sum(steps * count for steps, count in self.steps.items())
        return total / self.blocks if self.blocks else 0.0

    @property
    def tokens_per_forward(self) -> float:
        """Tokens handed out for each forward of a request's block, commits included."""
        total = sum((steps + 1) * count for steps, count in self.steps.items())
        return self.decode_tokens / total if total else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """All requests together; 0 before decode."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def summary(self) -> list[str]:
        """The counters as lines of text."""
        speed = self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0
        lines = [
            f"prefill          {speed:9.1f} tok/s   "
            f"({self.prefill_tokens} tokens, {self.prefill_seconds:.1f} s)",
            f"decode           {self.decode_tokens_per_second:9.1f} tok/s   "
            f"({self.decode_tokens} tokens, {self.decode_seconds:.1f} s, "
            f"and {self.compile_seconds:.1f} s to compile)",
            f"blocks           {self.blocks:9d}         "
            f"({self.steps_per_block:.1f} denoising forwards each, and one commit)",
            f"per forward      {self.tokens_per_forward:9.2f} tokens",
            f"KV on the device {format_bytes(self.device_kv_bytes):>14}",
        ]
        if self.narrow_forwards:
            lines.append(f"sub-blocks alone {self.narrow_forwards:9d} of {self.forwards} forwards")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """All fields and derived figures, ready for JSON."""
        derived = ("blocks", "steps_per_block", "tokens_per_forward", "decode_tokens_per_second")
        fields = dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}
        return fields | {"steps": {str(k): v for k, v in sorted(self.steps.items())}}
