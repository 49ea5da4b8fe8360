"""`agentspec config`: every setting, its environment variable and its value."""

import argparse
import json

from agentspec.commands.settings import all_settings, shown
from agentspec.config import load


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser("config", help="print every setting, its environment variable and its value")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the list")
    parser.set_defaults(run=run_config)


def run_config(arguments: argparse.Namespace) -> None:
    """Prints the configuration; passwords in URLs are masked."""
    config = load()
    settings = list(all_settings())
    if arguments.json:
        print(json.dumps({setting.variable: shown_value(setting.value(config)) for setting in settings}))
        return
    for setting in settings:
        value = setting.value(config)
        origin = "" if value == setting.default else f"  (default {shown(setting.default) or 'none'})"
        print(f"{setting.part}.{setting.field} = {shown(value) or 'none'}{origin}")
        print(f"    {setting.variable}: {setting.meaning or f'{setting.field} of the {setting.part}'}")


def shown_value(value: object) -> object:
    """Numbers as they are, everything else as text."""
    return value if isinstance(value, int | float) else shown(value)
