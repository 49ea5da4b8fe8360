"""`agentspec bench`: measurements of this machine."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentspec.commands.engine import limit_spinning, ready_device
from agentspec.commands.models import pulled
from agentspec.commands.numbers import positive
from agentspec.commands.replay import RECORDED, recorded_files
from agentspec.commands.settings import add_settings, chosen_config

if TYPE_CHECKING:
    from agentspec.engine.chat import Chat

ABOUT = """Measures this machine; nothing else should run meanwhile."""

ABOUT_INT8 = """Computes the model in float32 and in 8-bit whole numbers in turns: steps of 1, 8 and 16 tokens behind
1024 cached ones, a prompt of 1024 tokens, and the perplexity of recorded runs, rendered with the model's chat
template."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser("bench", help="measure this machine", description=ABOUT)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    cost = kinds.add_parser("cost", help="seconds of a verification pass by its number of tokens")
    add_settings(cost, "model.name", "model.home", "model.dtype", "engine.device", "model.threads")
    cost.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    cost.set_defaults(run=run_cost)
    int8 = kinds.add_parser("int8", help="speed and perplexity of 8-bit whole numbers", description=ABOUT_INT8)
    int8.add_argument("files", nargs="*", type=Path, metavar="FILE", help=f"trace files (default {RECORDED}/*.jsonl)")
    add_settings(int8, "model.name", "model.home", "model.threads")
    int8.add_argument(
        "--tokens", type=positive, default=16384, metavar="N", help="tokens of text, about (default 16384)"
    )
    int8.add_argument("--rounds", type=positive, default=11, metavar="N", help="rounds of timing (default 11)")
    int8.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    int8.set_defaults(run=run_int8)


def run_cost(arguments: argparse.Namespace) -> None:
    """Measures the cost table of the configured model and prints it."""
    config = chosen_config(arguments)
    ready_device(config)
    pulled(config.model.name, config)
    from agentspec.engine.cost import run_cost_bench

    run_cost_bench(config, as_json=arguments.json)


def run_int8(arguments: argparse.Namespace) -> None:
    """Measures both ways of computing the configured model and prints them."""
    config = chosen_config(arguments)
    limit_spinning()
    from agentspec.traces.files import read_traces

    traces = list(read_traces(arguments.files or recorded_files()))
    pulled(config.model.name, config)
    from agentspec.commands.display import model_progress
    from agentspec.engine.precision import measure, print_report
    from agentspec.server.convert import fold_system

    def conversations(chat: "Chat") -> Sequence[Sequence[int]]:
        return [chat.render(fold_system(list(trace.messages)), trace.tools) for trace in traces]

    with model_progress() as progress:
        report = measure(config, conversations, tokens=arguments.tokens, rounds=arguments.rounds, progress=progress)
    print_report(report, arguments.json)
