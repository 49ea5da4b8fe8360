"""`agentspec replay`: have a server generate recorded agent turns again, and measure it."""

import argparse
import asyncio
import contextlib
import json
import random
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import agentspec
from agentspec.commands.engine import loaded_engine
from agentspec.commands.numbers import NumberIn, positive, whole
from agentspec.commands.settings import add_settings, chosen_config
from agentspec.commands.simulate import run_simulation
from agentspec.config import Config
from agentspec.errors import TraceError
from agentspec.traces.options import ReplayOptions

if TYPE_CHECKING:
    from agentspec.traces.replay import Replayed
    from agentspec.traces.schema import Trace

RECORDED = Path("traces") / "recorded"

ABOUT = """Sends the recorded messages before every generated assistant turn to a server and lets it write that turn
again. Decode speed is generated tokens per second of decoding, prefill left out. With --baseline each
turn is generated with speculation off and on, and both must give the same tokens. Answers of an earlier replay on
the same server help a later one: compare on servers that were started fresh. Without --url a server is started in
this process with the configured model. With --simulate no model runs and the recorded turns are what it would
write: a table says how many tokens a step would make at budgets of 8, 16, 32 and 64 draft tokens, for drafts by prompt
lookup (lookup), from the run's own history (local), from that and the runs before it (hybrid), and from nearly equal
contexts in the run's own answers (tlar)."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser("replay", help="replay recorded agent runs and measure speed", description=ABOUT)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help=f"trace files (default {RECORDED}/*.jsonl)")
    server = parser.add_argument_group("server")
    server.add_argument("--url", help="OpenAI-compatible server to measure (default: one in this process)")
    server.add_argument(
        "--model", dest="asked_model", metavar="NAME", help="model to serve, as in serve, or with --url to ask for"
    )
    server.add_argument("--api-key", metavar="KEY", help="key for --url (default none)")
    add_settings(
        server,
        "model.home",
        "model.dtype",
        "engine.device",
        "model.threads",
        "engine.max_running",
        "engine.max_draft_tokens",
    )
    add_selection(parser.add_argument_group("what is replayed"))
    add_generation(parser.add_argument_group("how it is generated"))
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.set_defaults(run=run_replay)


def add_selection(group: "argparse._ArgumentGroup") -> None:
    """Which turns are replayed."""
    group.add_argument("--trajectories", type=positive, metavar="N", help="runs to draw at random (default all)")
    group.add_argument("--seed", type=whole, default=0, metavar="N", help="makes the draw repeatable (default 0)")
    group.add_argument(
        "--turns", type=positive, metavar="N", help="most turns of one run, from its start (default all)"
    )
    group.add_argument(
        "--max-prompt-tokens", type=positive, metavar="N",
        help="skip turns with a longer prompt, at an estimated 4 characters a token (default: skip none)",
    )  # fmt: skip


def add_generation(group: "argparse._ArgumentGroup") -> None:
    """How turns are generated."""
    default = ReplayOptions()
    for name, kind, unit in (
        ("--max-tokens", positive, "most tokens to generate per turn"),
        ("--temperature", NumberIn(0, 2), "0 is greedy"),
        ("--top-p", NumberIn(0, 1, above=True), "share of probability to sample from"),
        ("--sampling-seed", whole, "seed of the sampler"),
        ("--clients", positive, "runs replayed at the same time"),
    ):
        value = getattr(default, name.removeprefix("--").replace("-", "_"))
        group.add_argument(name, type=kind, default=value, metavar="N", help=f"{unit} (default {value:g})")
    arms = group.add_mutually_exclusive_group()
    arms.add_argument("--baseline", action="store_true", help="run each turn with speculation off and on and compare")
    arms.add_argument(
        "--simulate", action="store_true",
        help="run no model; count the tokens that a step would make, by way of drafting and budget",
    )  # fmt: skip
    arms.add_argument("--no-speculation", action="store_true", help="run with speculation off only")


def run_replay(arguments: argparse.Namespace) -> None:
    """Replays and prints the report."""
    from rich.console import Console

    from agentspec.traces.report import print_report, report_of

    traces = chosen_traces(arguments)
    if arguments.simulate:
        command = without_key(arguments.command_line, arguments.api_key)
        return run_simulation(traces, hosted_config(arguments), arguments.turns, command, as_json=arguments.json)
    options = replay_options(arguments)
    with contextlib.ExitStack() as stack:
        own = arguments.url is None
        url = stack.enter_context(own_server(hosted_config(arguments))) if own else arguments.url
        replayed = replay_with_progress(traces, url, options)
    report = report_of(replayed, options, without_key(arguments.command_line, arguments.api_key))
    if arguments.json:
        print(json.dumps(report))
    else:
        console = Console()
        print_report(report, console if console.is_terminal else Console(width=160))


def without_key(command_line: Sequence[str], key: str | None) -> str:
    """The command as it was given, to run it again, but for the key."""
    return shlex.join(word.replace(key, "***") if key else word for word in command_line)


def replay_with_progress(traces: "Sequence[Trace]", url: str, options: ReplayOptions) -> "Replayed":
    """Replays with a bar on the terminal."""
    from agentspec.commands.display import turn_progress
    from agentspec.traces.replay import replay

    with turn_progress() as progress:
        return asyncio.run(replay(traces, url, options, progress=progress))


def chosen_traces(arguments: argparse.Namespace) -> "list[Trace]":
    """The traces of the files, or as many of them as were asked for, drawn at random, in their order."""
    from agentspec.traces.files import read_traces

    traces = list(read_traces(arguments.files or recorded_files()))
    if not traces:
        raise TraceError("the files hold no trace")
    count = arguments.trajectories
    if count is None or count >= len(traces):
        return traces
    return [traces[at] for at in sorted(random.Random(arguments.seed).sample(range(len(traces)), count))]


def recorded_files() -> list[Path]:
    """The recorded runs of the source tree this package runs from."""
    folder = Path(agentspec.__file__).resolve().parents[1] / RECORDED
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise TraceError(
            f"no recorded runs in {folder}: they come with the source tree, not with the wheel; name files"
        )
    return files


def replay_options(arguments: argparse.Namespace) -> ReplayOptions:
    """The options of a replay from the arguments."""
    return ReplayOptions(
        model=None if arguments.url is None else arguments.asked_model,
        turns=arguments.turns,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        sampling_seed=arguments.sampling_seed,
        baseline=arguments.baseline,
        speculation=not arguments.no_speculation,
        clients=arguments.clients,
        max_prompt_tokens=arguments.max_prompt_tokens,
        api_key=arguments.api_key,
    )


def hosted_config(arguments: argparse.Namespace) -> Config:
    """The configuration of the server in this process."""
    config = chosen_config(arguments)
    if arguments.asked_model is None:
        return config
    return replace(config, model=replace(config.model, name=arguments.asked_model))


@contextlib.contextmanager
def own_server(config: Config) -> Iterator[str]:
    """The base URL of a server in this process, with its own engine."""
    engine = loaded_engine(config)
    from agentspec.server.run import serve_in_thread

    with serve_in_thread(engine, config.server) as url:
        yield url
