"""`agentspec bench`: measurements of this machine."""

import argparse

from agentspec.commands.engine import limit_spinning
from agentspec.commands.models import pulled
from agentspec.commands.settings import add_settings, chosen_config

ABOUT = """Measures what verification costs on this machine; nothing else should run meanwhile."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser("bench", help="measure this machine", description=ABOUT)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    cost = kinds.add_parser("cost", help="seconds of a verification pass by its number of tokens")
    add_settings(cost, "model.name", "model.home", "model.dtype", "engine.device", "model.threads")
    cost.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    cost.set_defaults(run=run_cost)


def run_cost(arguments: argparse.Namespace) -> None:
    """Measures the cost table of the configured model and prints it."""
    config = chosen_config(arguments)
    limit_spinning()
    pulled(config.model.name, config)
    from agentspec.engine.cost import run_cost_bench

    run_cost_bench(config, as_json=arguments.json)
