"""What the worker's counters and gauges mean, for the help lines of `/metrics`."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

HELP = {
    "steps_total": "Passes of the model.",
    "prefill_tokens_total": "Prompt tokens that were computed.",
    "cached_tokens_total": "Prompt tokens that needed no computing, as their keys and values were kept.",
    "preemptions_total": "Times that a running request gave its place up to another one.",
    "running_requests": "Requests that have a place in the batch; each choice counts.",
    "waiting_requests": "Requests that wait for a place in the batch; each choice counts.",
    "kv_used_bytes": "Bytes of all pages of keys and values.",
    "kv_running_bytes": "Bytes of the pages of running requests.",
    "kv_limit_bytes": "Most bytes of pages (AGENTSPEC_ENGINE_KV_BYTES).",
    "kv_evicted_bytes_total": "Bytes of pages that left for others.",
    "history_bytes": "Memory of indexed histories, about.",
    "history_trajectories": "Trajectories whose history is in memory.",
    "history_scopes": "Tenants and models whose histories are in memory.",
    "history_sessions": "Requests that are drafting from a history.",
    "history_evictions_total": "Histories that left memory for others; deleted ones are not counted.",
    "history_failures_total": "Faults of background work on histories; the log has them.",
    "corpora": "Static corpora that drafts come from.",
    "corpora_bytes": "Bytes of the files of corpora; processes that load the same file share the memory.",
    "scaffold_bytes": "Memory of what is drafted from the tools and schemas of requests.",
    "splice_bytes": "Memory of token ids of answers that later prompts may be spliced with.",
    "returned_identical_total": "Answers that came back in a prompt and whose text gives the tokens generated.",
    "returned_spliced_total": "Answers that came back and whose text gives other tokens, which were replaced.",
    "returned_changed_space_total": "Answers that came back with other white space, and stay as they came.",
    "returned_changed_part_total": "Answers of which a part came back, as without reasoning; it stays as it came.",
    "returned_changed_other_total": "Answers that came back with another text, and stay as they came.",
    "spliced_tokens_total": "Prompt tokens put in as they were generated, where their text gives others.",
    "spliced_cached_tokens_total": "Cached prompt tokens behind the first that was put in, computed without it.",
    "store_bytes": "Memory of what the history file holds.",
    "store_trajectories": "Trajectories in the history file.",
    "store_evictions_total": "Trajectories that left the history file for its limits or their age.",
    "store_refused_total": "Writes that were refused, as they are no histories or too large.",
    "store_file_bytes": "Size of the history file; what was replaced counts until it is written anew.",
    "store_file_rewrites_total": "Times that the history file was written anew.",
    "store_file_behind": "1 while the history file lacks a change, as after a failed write; else 0.",
    "store_file_damaged_copies": "Damaged copies kept beside the history file.",
    "store_errors_total": "Calls to the Redis, or writes of the history file, that failed.",
    "store_skipped_total": "Calls to the Redis that were not made, as it had not answered.",
    "store_busy_total": "Calls to the Redis that were not made, as too many were running.",
    "store_appends_total": "Writes of turns that were queued for the Redis.",
    "store_appended_total": "Writes of turns that the Redis confirmed.",
    "store_appended_tokens_total": "Tokens of the writes that the Redis confirmed.",
    "store_gone_total": "Writes that the Redis did not take, as their trajectory was deleted.",
    "store_newer_left_total": "Writes that were not made, as a newer version of AgentSpec stored the trajectory.",
    "store_newer_read_total": "Parts of histories left unread, as a newer version of AgentSpec stored them.",
    "store_unreadable_total": "Damaged parts of histories that were found in the Redis and left out.",
    "store_evicted_total": "Trajectories that left the Redis for the limit of their tenant and model.",
    "store_dropped_total": "Writes that left the queue for later ones, as it was full.",
    "store_withdrawn_total": "Writes that left the queue, as their trajectory was deleted.",
    "store_queue_bytes": "Bytes of writes that wait for the Redis.",
    "store_queue_writes": "Writes that wait for the Redis.",
    "store_breaker_open": "1 while the Redis is left alone, as it did not answer; else 0.",
}
"""By the names of `Worker.stats`."""


class WorkerStats(Collector):
    """The worker's own counters and gauges, read at each scrape."""

    def __init__(self, stats: Callable[[], Mapping[str, float]]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        for name, value in sorted(self._stats().items()):
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield family(f"agentspec_{name}", HELP.get(name, "Of the worker."), value=value)

    def describe(self) -> Iterator[Metric]:
        """Nothing: the names are not known before the worker runs."""
        return iter(())
