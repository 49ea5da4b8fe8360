"""What `/metrics` shows. Names beginning with `agentspec_http_` and `agentspec_generation_` are the server's own;
all others come from the worker."""

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from agentspec.server.worker_metrics import WorkerStats
from agentspec.types import Report

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)


class Metrics:
    """Counters of one app, in a registry of their own."""

    def __init__(self, stats: Callable[[], Mapping[str, float]]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(WorkerStats(stats))
        self._requests = self._counter(
            "http_requests", "Requests by route and status; 499: the client left.", "route", "status"
        )
        self._running = Gauge("agentspec_http_requests_running", "Requests being served.", registry=self._registry)
        self._latency = self._histogram(
            "http_request_seconds", "From request to the end of the answer.", "route", "status"
        )
        self._first_token = self._histogram("generation_time_to_first_token_seconds", "From request to first token.")
        self._queue = self._histogram("generation_queue_seconds", "Wait for a place in the batch.")
        self._prefill = self._histogram("generation_prefill_seconds", "From the queue to the first token.")
        self._decode = self._histogram("generation_decode_seconds", "From the first token to the last.")
        self._tokens = self._counter("generation_tokens", "Tokens of finished generations.", "kind")
        self._drafted = self._counter("generation_drafted_tokens", "Draft nodes verified, by source.", "source")
        self._accepted = self._counter("generation_accepted_tokens", "Draft nodes accepted, by source.", "source")

    def request_began(self) -> None:
        self._running.inc()

    def request_ended(self, route: str, status: int, seconds: float) -> None:
        self._running.dec()
        self._requests.labels(route, str(status)).inc()
        self._latency.labels(route, str(status)).observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def finished(self, report: Report) -> None:
        """Counts one finished generation."""
        self._queue.observe(report.queue_s)
        self._prefill.observe(report.prefill_s)
        self._decode.observe(report.decode_s)
        self._tokens.labels("prompt").inc(report.prompt_tokens)
        self._tokens.labels("cached").inc(report.cached_tokens)
        self._tokens.labels("completion").inc(report.completion_tokens)
        for source, count in report.drafted.items():
            self._drafted.labels(source).inc(count)
        for source, count in report.accepted.items():
            self._accepted.labels(source).inc(count)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"agentspec_{name}", help_text, labels, registry=self._registry)

    def _histogram(self, name: str, help_text: str, *labels: str) -> Histogram:
        return Histogram(f"agentspec_{name}", help_text, labels, registry=self._registry, buckets=SECONDS)
