"""Brings recorded runs into a trace file: checked, sampled, shortened, with ambiguous call ids repaired on demand."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentspec.errors import TraceError
from agentspec.traces.files import located, read_lines, write_traces
from agentspec.traces.messages import check_messages, repaired_messages
from agentspec.traces.schema import Trace, parse_trace


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """What an import keeps."""

    first_turns: int | None = None
    """Keep each run up to its n-th generated turn; None keeps it whole."""

    limit: int | None = None
    """Keep this many runs, drawn at random; None keeps all."""

    seed: int = 0
    """Makes the draw repeatable."""

    repair: bool = False
    """Give ambiguous tool calls fresh ids in order instead of refusing the run."""


@dataclass(frozen=True, slots=True)
class ImportCount:
    """What an import did."""

    read: int
    written: int
    repaired: int


def import_traces(paths: Sequence[Path], target: Path, options: ImportOptions) -> ImportCount:
    """Writes the runs of `paths` that the options keep to `target`, in the order of the files."""
    repaired = 0
    read = 0

    def checked() -> Iterator[Trace]:
        nonlocal repaired, read
        seen: set[str] = set()
        for where, content in read_lines(paths):
            with located(where):
                read += 1
                if options.repair and is_ambiguous(content):
                    content = {**content, "messages": repaired_messages(content["messages"])}
                    repaired += 1
                trace = parse_trace(content)
                if trace.id in seen:
                    raise TraceError(f"the id {trace.id!r:.200} was used before")
                seen.add(trace.id)
            yield trace

    kept = checked() if options.limit is None else sample(checked(), options.limit, options.seed)
    written = write_traces((shortened(trace, options.first_turns) for trace in kept), target)
    return ImportCount(read, written, repaired)


def is_ambiguous(content: object) -> bool:
    """Whether a record's only fault may be its tool-call ids: well-formed messages that do not fit together."""
    if not isinstance(content, dict) or not isinstance(content.get("messages"), list):
        return False
    try:
        check_messages(content["messages"])
    except TraceError:
        well_formed = all(isinstance(message, dict) for message in content["messages"])
        return well_formed and all(
            isinstance(call, dict) and "id" in call
            for message in content["messages"]
            for call in message.get("tool_calls") or ()
        )
    return False


def sample(traces: Iterable[Trace], count: int, seed: int) -> list[Trace]:
    """`count` of the traces, each equally likely, in their order; holds no more than those in memory."""
    chance = random.Random(seed)
    kept: list[tuple[int, Trace]] = []
    for position, trace in enumerate(traces):
        if len(kept) < count:
            kept.append((position, trace))
        elif (place := chance.randrange(position + 1)) < count:
            kept[place] = (position, trace)
    return [trace for _, trace in sorted(kept, key=lambda pair: pair[0])]


def shortened(trace: Trace, first_turns: int | None) -> Trace:
    """The trace up to its n-th generated turn."""
    generated = trace.generated
    if first_turns is None or len(generated) <= first_turns:
        return trace
    kept = generated[:first_turns]
    meta = {**trace.meta, "generated": list(kept)} if "generated" in trace.meta else trace.meta
    return replace(trace, messages=trace.messages[: kept[-1] + 1], meta=meta)
