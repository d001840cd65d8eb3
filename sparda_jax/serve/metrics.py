"""What the server counts, in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sparda_jax.engine.requests import Handle
from sparda_jax.engine.scheduler import Scheduler

_FIRST = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
_BETWEEN = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)


class Metrics(Collector):
    """Counters of a scheduler, read when they are asked for, and latencies of its requests.

    Args:
        scheduler: whose.
    """

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._first = Histogram(
            "sparda_time_to_first_token_seconds",
            "From the arrival of a request to its first token",
            buckets=_FIRST,
            registry=self._registry,
        )
        self._between = Histogram(
            "sparda_time_per_output_token_seconds",
            "From the first token of a request to its last, for each after the first",
            buckets=_BETWEEN,
            registry=self._registry,
        )

    def observe(self, handle: Handle) -> None:
        """Adds the latencies of a request that has ended."""
        timing, count = handle.timing, len(handle.tokens)
        if timing.first_token_seconds is not None:
            self._first.observe(timing.first_token_seconds)
        if count > 1:
            self._between.observe(timing.decode_seconds / (count - 1))

    def page(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The scheduler's counters; called by the registry."""
        scheduler = self._scheduler
        counters, rows = scheduler.counters, scheduler.rows
        report = rows.report
        programs, compile_seconds = rows.compilations
        totals = {
            "requests": (counters.requests, "Requests accepted"),
            "refused": (counters.refused, "Requests refused: too long, or the queue was full"),
            "prompt_tokens": (counters.prompt_tokens, "Prompt tokens, known ones included"),
            "cached_tokens": (counters.cached_tokens, "Prompt tokens whose KV was known"),
            "generated_tokens": (counters.tokens, "Tokens generated"),
            "prefill_seconds": (counters.prefill_seconds, "Time in prefill"),
            "stall_seconds": (counters.stalls, "Time running requests waited for a prefill"),
            "compile_seconds": (compile_seconds, "Time compiling"),
            "programs": (programs, "Programs compiled"),
            **rows.totals(),
        }
        for name, (value, text) in totals.items():
            yield CounterMetricFamily(f"sparda_{name}", text, value=value)
        finished = CounterMetricFamily(
            "sparda_finished", "Requests that ended, by reason", labels=["reason"]
        )
        for reason, count in dict(counters.finished).items():
            finished.add_metric([reason], count)
        yield finished
        gauges = {
            "queue": (scheduler.waiting, "Requests waiting for a row"),
            "rows_used": (scheduler.running, "Rows in use"),
            "rows": (rows.batch, "Rows"),
            "blocks_used": (scheduler.blocks_used, "KV blocks of running requests, each layer"),
            "blocks": (rows.blocks, "KV blocks, each layer"),
            "device_kv_bytes": (report.device_kv_bytes, "KV and what belongs to it on the device"),
            "host_kv_bytes": (report.host_kv_bytes, "KV on the host"),
        }
        for name, (value, text) in gauges.items():
            yield GaugeMetricFamily(f"sparda_{name}", text, value=value)
