"""Brings recorded runs into a trace file: checked, sampled, shortened, with ambiguous call ids repaired on demand."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentspec.errors import TraceError
from agentspec.traces.files import located, read_lines, write_traces
from agentspec.traces.messages import check_messages, repaired_messages
from agentspec.traces.plain import as_trace
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

    skip_invalid: bool = False
    """Leave out and count a run that is refused instead of stopping there."""

    plain: bool = False
    """The records are conversations as clients log them."""


@dataclass(frozen=True, slots=True)
class ImportCount:
    """What an import did."""

    read: int
    written: int
    repaired: int
    skipped: int


class Source:
    """The runs of some files, checked and counted while they are read."""

    def __init__(self, paths: Sequence[Path], options: ImportOptions) -> None:
        self._paths = paths
        self._options = options
        self._seen: set[str] = set()
        self.read = self.repaired = self.skipped = 0

    def traces(self) -> Iterator[Trace]:
        """The valid runs in order; raises `TraceError` at the first other one unless those are skipped."""
        for where, content in read_lines(self._paths):
            self.read += 1
            try:
                with located(where):
                    trace = self._checked(as_trace(content, where) if self._options.plain else content)
            except TraceError:
                if not self._options.skip_invalid:
                    raise
                self.skipped += 1
            else:
                yield trace

    def _checked(self, content: Any) -> Trace:
        needs_repair = self._options.repair and is_ambiguous(content)
        if needs_repair:
            content = {**content, "messages": repaired_messages(content["messages"])}
        trace = parse_trace(content)
        if trace.id in self._seen:
            raise TraceError(f"the id {trace.id!r:.200} was used before")
        self._seen.add(trace.id)
        self.repaired += needs_repair
        return trace


def import_traces(paths: Sequence[Path], target: Path, options: ImportOptions) -> ImportCount:
    """Writes the runs of `paths` that the options keep to `target`, in the order of the files."""
    source = Source(paths, options)
    traces = source.traces()
    kept = traces if options.limit is None else sample(traces, options.limit, options.seed)
    written = write_traces((shortened(trace, options.first_turns) for trace in kept), target)
    return ImportCount(source.read, written, source.repaired, source.skipped)


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
