"""Counts over trace files."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from agentspec.traces.schema import Trace


def count_traces(traces: Iterable[Trace]) -> dict[str, Any]:
    """Numbers of trajectories, turns, messages, tool calls and generated characters, and trajectories by domain.

    Characters are those of the generated turns: text, reasoning, and names and arguments of calls.
    """
    totals: Counter[str] = Counter()
    domains: Counter[str] = Counter()
    for trace in traces:
        totals["trajectories"] += 1
        totals["turns"] += len(trace.generated)
        totals["messages"] += len(trace.messages)
        totals["with_tools"] += trace.tools is not None
        domains[trace.domain] += 1
        for index in trace.generated:
            message = trace.messages[index]
            calls = message.get("tool_calls", ())
            totals["tool_calls"] += len(calls)
            totals["characters"] += len(message.get("content") or "") + len(message.get("reasoning_content", ""))
            totals["characters"] += sum(len(c["function"]["name"]) + len(c["function"]["arguments"]) for c in calls)
    names = ("trajectories", "turns", "messages", "tool_calls", "characters", "with_tools")
    return {**{name: totals[name] for name in names}, "domains": dict(sorted(domains.items()))}
