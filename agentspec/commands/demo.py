"""`agentspec serve --demo`: the server replays two shipped runs against itself, so that a first start shows figures."""

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from agentspec.errors import AgentSpecError, TraceError
from agentspec.traces.options import ReplayOptions

if TYPE_CHECKING:
    from agentspec.traces.replay import Replayed
    from agentspec.traces.schema import Trace

log = logging.getLogger(__name__)

RUNS = ("recorded/inventory-reservations", "recorded/order-exchange")
OPTIONS = ReplayOptions(turns=4, max_tokens=48, baseline=True)
COMMAND = "agentspec serve --demo"

ABOUT = "Replaying the first {turns} turns of {runs} shipped agent runs, each turn with speculation off and on ..."
CAVEAT = (
    "These runs were written for this project: they show that it works, not what\n"
    "your agents gain. Replies are cut short and histories begin empty, so that\n"
    "the ratio is lower than over whole runs.\n"
    "Measure your own runs: agentspec replay --baseline FILE"
)


async def demonstrate(url: str) -> None:
    """Replays against the server at `url` and prints the report; a failure is told, not raised."""
    try:
        runs = demonstration_runs()
        print(ABOUT.format(turns=OPTIONS.turns, runs=len(runs)), flush=True)
        with no_access_log():
            replayed = await replayed_runs(runs, url)
        show(replayed)
    except AgentSpecError as error:
        print(f"The demonstration failed: {error.message}\nThe server keeps serving.", flush=True)
    except Exception:
        log.exception("the demonstration failed; the server keeps serving")


@contextlib.contextmanager
def no_access_log() -> Iterator[None]:
    """Keeps the lines of the server's own requests off the terminal."""
    access = logging.getLogger("agentspec.server.access")
    level = access.level
    access.setLevel(logging.WARNING)
    try:
        yield
    finally:
        access.setLevel(level)


def demonstration_runs() -> "list[Trace]":
    """The pair of recorded runs that is replayed."""
    from agentspec.commands.replay import recorded_files
    from agentspec.traces.files import read_traces

    runs = [trace for trace in read_traces(recorded_files()) if trace.id in RUNS]
    if len(runs) != len(RUNS):
        raise TraceError(f"the recorded runs lack one of {', '.join(RUNS)}")
    return runs


async def replayed_runs(runs: "list[Trace]", url: str) -> "Replayed":
    """The replay, with a bar on the terminal."""
    from agentspec.commands.display import turn_progress
    from agentspec.traces.replay import replay

    with turn_progress() as progress:
        return await replay(runs, url, OPTIONS, progress=progress)


def show(replayed: "Replayed") -> None:
    """Prints the figures and what they do not say."""
    from rich.console import Console

    from agentspec.traces.report import print_report, report_of

    console = Console()
    print_report(report_of(replayed, OPTIONS, COMMAND), console if console.is_terminal else Console(width=160))
    print(CAVEAT, flush=True)
