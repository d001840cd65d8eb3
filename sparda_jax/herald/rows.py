"""A session's rows as places for requests that come and go; see `sparda_jax.engine.places`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from host_offload import memory
from sparda_jax.config import SamplingParams
from sparda_jax.diffusion.config import DenoiseParams
from sparda_jax.diffusion.generate import Block
from sparda_jax.engine.batch import Gain
from sparda_jax.engine.capacity import check_count
from sparda_jax.engine.places import Admission, Total
from sparda_jax.engine.plan import check_request
from sparda_jax.herald.report import HeraldReport
from sparda_jax.herald.requests import STOP_TOKENS, Request
from sparda_jax.herald.session import HeraldSession
from sparda_jax.validation import require

if TYPE_CHECKING:
    from sparda_jax.herald.engine import HeraldEngine


class BlockRows:
    """B rows in which blocks of tokens are denoised; requests join and leave between two blocks.

    Prompts that begin alike share nothing: a row's KV goes with its request.

    Args:
        engine: of a block-diffusion model; its mode says where KV lies and what is attended.
        batch: B.
        max_length: tokens that a prompt and its answer may have together.

    Attributes:
        max_length: that, in whole blocks.
        active: rows that still generate.

    Raises:
        ValueError: rows that do not fit in memory; says how many would.
    """

    def __init__(self, engine: HeraldEngine, batch: int, max_length: int):
        width = engine.width
        self.max_length = max_length // width * width
        require(
            self.max_length >= 2 * width,
            f"max_length {max_length} holds less than two blocks of {width} tokens",
        )
        # Sizes of the longest request that there can be.
        longest = [0] * (self.max_length - 1)
        plan = engine.plan([longest], [SamplingParams(max_new_tokens=1)])

        def check(count: int) -> None:
            layout, config = engine.layout(count, plan), engine.config
            what = f"the KV of {count} rows of {plan.num_blocks} blocks on the"
            needed, limit = layout.device_bytes, config.device_kv_bytes
            memory.check_device_budget(f"{what} device", needed, limit, engine.device)
            if config.policy.offload:
                needed, limit = layout.store(config.quantised_keys).nbytes, config.host_kv_bytes
                host = f"{what} host"
                memory.check_host_budget(host, needed, limit, engine.device, pinned=False)

        check_count(check, batch, "rows")
        self._engine, self._blocks = engine, plan.num_blocks
        self._ending = contextlib.ExitStack()
        self._session = self._ending.enter_context(HeraldSession(engine, batch, plan))
        self.active = np.zeros(batch, bool)
        self._requests: list[Request | None] = [None] * batch

    @property
    def batch(self) -> int:
        """B."""
        return len(self._requests)

    @property
    def free(self) -> int:
        """Rows that no request has."""
        return self._requests.count(None)

    @property
    def report(self) -> HeraldReport:
        """Counters of the session."""
        return self._session.report

    @property
    def blocks(self) -> int:
        """KV blocks of each layer that there are for all requests."""
        return self.batch * self._blocks

    def blocks_used(self, running: Mapping[int, int]) -> int:
        """KV blocks of running requests, in each layer.

        Args:
            running: tokens of prompt and answer that each row's request may have.
        """
        return sum(-(-tokens // self._engine.config.kv_block) for tokens in running.values())

    def check(self, prompt: Sequence[int], params: SamplingParams, rule: object) -> None:
        """Raises ValueError for a request that can never run; names what it needs."""
        engine = self._engine
        check_request("the prompt", prompt, params, engine.model.config, self.max_length)
        stops = len(params.stop_token_ids)
        require(stops <= STOP_TOKENS, f"{stops} stop tokens, at most {STOP_TOKENS} are possible")
        require(
            params.logprobs is None,
            "log-probabilities are not reported: a token of a block has one for each step",
        )
        if rule is not None:
            require(isinstance(rule, DenoiseParams), f"denoise must be DenoiseParams, got {rule!r}")
            assert isinstance(rule, DenoiseParams)
            rule.check(engine.width)

    def admit(
        self, prompt: Sequence[int], params: SamplingParams, rule: object
    ) -> Admission | None:
        """Gives a request a row and begins its prefill; None: it has to wait.

        Args:
            prompt: the prompt.
            params: how to sample.
            rule: how to denoise; None: what the model's authors publish.
        """
        if not self.free:
            return None
        model = self._engine.model.config
        rule = rule if isinstance(rule, DenoiseParams) else DenoiseParams.of_family(model)
        row = self._requests.index(None)
        request = Request(row, prompt, params, rule, model)
        self._requests[row] = request
        return Admission(row, 0, self._prefill(request, row))

    def _prefill(self, request: Request, row: int) -> Generator[jax.Array, None, Gain]:
        session, report = self._session, self.report
        begun, compiled = time.perf_counter(), self._engine.compile_seconds
        found = yield from session.prefilling(request)
        session.place(request, found, row)
        self.active[row] = True
        late = self._engine.compile_seconds - compiled
        report.compile_seconds += late
        # Others may have decoded in between.
        report.prefill_seconds += time.perf_counter() - begun - late
        report.prefill_tokens += request.aligned
        return Gain(row, [], None)

    def decode(self) -> list[Gain]:
        """One block for every active row.

        Returns:
            What each gained: nothing, where it failed; and a token that was handed over before.
        """
        session, rows = self._session, np.flatnonzero(self.active).tolist()
        blocks: list[Block] = session.turn()
        if session.broken is not None:
            raise session.broken
        self.active = np.array([request is not None for request in session.requests])
        gains = [Gain(block.row, block.tokens, None, block.steps) for block in blocks]
        given = {gain.row for gain in gains}
        return gains + [Gain(row, [], None) for row in rows if row not in given]

    def failure(self, row: int) -> str | None:
        """Why a row's request failed; None: it did not."""
        request = self._requests[row]
        return None if request is None else request.error

    def remember(self, row: int, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Nothing: a row's KV goes with its request."""

    def leave(self, row: int) -> None:
        """A row's request has ended."""
        request, self._requests[row] = self._requests[row], None
        assert request is not None
        if request.reason is None:
            request.reason = "cancelled"
        if self.active[row]:
            self.active[row] = False
            self._session.drop_ended()

    def compile(self) -> None:
        """Runs a request of two blocks, so that the next ones find most programs compiled."""
        width = self._engine.width
        params = SamplingParams(max_new_tokens=width)
        admission = self.admit([0] * width, params, None)
        assert admission is not None
        for _ in admission.work:
            pass
        while self.active[admission.row]:
            self.decode()
        self.leave(admission.row)

    @property
    def compilations(self) -> tuple[int, float]:
        """Programs compiled so far, and seconds that it took."""
        return self._engine.compilations, self._engine.compile_seconds

    def totals(self) -> dict[str, Total]:
        """Counters for people who watch; see `Places`."""
        report = self.report
        return {
            "decode_seconds": (report.decode_seconds, "Time in turns of one block"),
            "forwards": (report.forwards, "Forwards of all rows"),
            "diffusion_blocks": (report.blocks, "Blocks of tokens given to requests"),
            "retrieval_stall_seconds": (
                report.retrieval_stall_seconds,
                "Time the device waited for rows that the host chose",
            ),
            "fetched_bytes": (report.h2d_bytes, "KV copied from the host to the device"),
            "written_bytes": (report.d2h_bytes, "KV copied from the device to the host"),
        }

    def close(self) -> None:
        """Ends the host's threads, once."""
        self._ending.close()
