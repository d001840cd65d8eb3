"""What a generation did: counters, times and memory, added up on the host."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np

from host_offload.memory import format_bytes
from sparda_jax.engine.state import StepOutput

FinishReason = Literal["stop", "length", "failed", "cancelled", "interrupted"]


@dataclasses.dataclass
class RequestResult:
    """One request's outcome.

    Attributes:
      prompt_tokens: tokens of the prompt.
      tokens: every token drawn, the stop token included.
      finish_reason: "stop" a stop token was drawn; "length" max_new_tokens reached; "failed" logits
        were not finite; "cancelled" by `Generation.cancel`; "interrupted" the caller stopped early.
    """

    prompt_tokens: int
    tokens: list[int]
    finish_reason: FinishReason


@dataclasses.dataclass
class Report:
    """Counters of one batch. Times exclude compilation, which has its own fields.

    Attributes:
      prefill_tokens: prompt tokens, padding not counted.
      prefill_seconds: wall time of prefill, the first token included.
      prefill_compile_seconds: compile time met during prefill.
      decode_tokens: tokens emitted by decode steps (the first of each request is prefill's).
      decode_seconds: wall time of the decode calls.
      decode_compile_seconds: compile time met during decode.
      steps: decode steps that were run.
      context_tokens: tokens in the longest sequence at the end.
      device_kv_bytes: KV, slots and compressed keys on the device.
      host_kv_bytes: KV in host memory.
      full_kv_bytes: KV of the same sequences when all of it is on the device.
      free_blocks: selected blocks that no rule forced, from the second step on; the first step
        meets empty slots and is counted in `cold_runs` instead.
      hit_blocks: how many of them were in slots already.
      fetched_runs: (block, KV head) runs copied from the host, from the second step on.
      cold_runs: those of the first step.
      run_bytes: bytes of one run.
      written_back_runs: runs copied to the host during decode.
    """

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    prefill_compile_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    decode_compile_seconds: float = 0.0
    steps: int = 0
    context_tokens: int = 0
    device_kv_bytes: int = 0
    host_kv_bytes: int = 0
    full_kv_bytes: int = 0
    free_blocks: int = 0
    hit_blocks: int = 0
    fetched_runs: int = 0
    cold_runs: int = 0
    run_bytes: int = 0
    written_back_runs: int = 0

    def add_steps(self, outputs: StepOutput) -> None:
        """Adds the stacked outputs (numpy, leading axis n) of one decode call."""
        ran = np.any(outputs.emitted, axis=1)
        self.decode_tokens += int(np.sum(outputs.emitted))
        warm = np.arange(len(ran)) + self.steps > 0
        self.cold_runs += int(np.sum(outputs.fetched[~warm]))
        self.fetched_runs += int(np.sum(outputs.fetched[warm]))
        self.free_blocks += int(np.sum(outputs.free[warm]))
        self.hit_blocks += int(np.sum(outputs.hits[warm]))
        self.steps += int(np.sum(ran))

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens per second; 0 before prefill."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Decoded tokens per second, all requests together; 0 before decode."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def hit_rate(self) -> float | None:
        """Share of free selected blocks already on the device; None if there were none."""
        return self.hit_blocks / self.free_blocks if self.free_blocks else None

    @property
    def bytes_per_token(self) -> float:
        """Bytes that crossed between host and device for each decoded token, both directions."""
        runs = self.fetched_runs + self.cold_runs + self.written_back_runs
        return runs * self.run_bytes / self.decode_tokens if self.decode_tokens else 0.0

    def summary(self) -> list[str]:
        """The counters as lines of text."""
        rate = "none selected" if self.hit_rate is None else f"{100 * self.hit_rate:.1f} %"
        share = self.device_kv_bytes / self.full_kv_bytes
        return [
            f"prefill          {self.prefill_tokens_per_second:9.1f} tok/s   "
            f"({self.prefill_tokens} tokens, {self.prefill_seconds:.1f} s, "
            f"and {self.prefill_compile_seconds:.1f} s to compile)",
            f"decode           {self.decode_tokens_per_second:9.1f} tok/s   "
            f"({self.decode_tokens} tokens, {self.decode_seconds:.1f} s, "
            f"and {self.decode_compile_seconds:.1f} s to compile)",
            f"context          {self.context_tokens:9d} tokens",
            f"KV on the device {format_bytes(self.device_kv_bytes):>14}   "
            f"({100 * share:.1f} % of the full cache, {format_bytes(self.full_kv_bytes)})",
            f"KV on the host   {format_bytes(self.host_kv_bytes):>14}",
            f"hit rate         {rate:>14}   (free blocks already on the device)",
            f"moved per token  {format_bytes(self.bytes_per_token):>14}",
        ]

    def as_dict(self) -> dict[str, Any]:
        """All fields and derived figures, ready for JSON."""
        derived = (
            "prefill_tokens_per_second",
            "decode_tokens_per_second",
            "hit_rate",
            "bytes_per_token",
        )
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}
