"""`agentspec models`: list, pull and find models."""

import argparse
from pathlib import Path

from agentspec.commands.settings import add_settings, chosen_config
from agentspec.config import Config
from agentspec.errors import ModelError

ABOUT = """Models are kept in one folder, each converted to float32 once. 'serve' pulls by itself what is missing."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser("models", help="list, pull and find models", description=ABOUT)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="models known by name, their download size and whether they are here")
    pulling = actions.add_parser("pull", help="download and convert models; checks the files of those already here")
    pulling.add_argument("names", nargs="+", metavar="NAME", help="name, folder, .gguf file or hub id")
    finding = actions.add_parser("path", help="print the folder of a model that is here")
    finding.add_argument("name", metavar="NAME", help="name of a model or a folder")
    for action, run in ((listing, run_list), (pulling, run_pull), (finding, run_path)):
        add_settings(action, "model.home")
        action.set_defaults(run=run)


def run_list(arguments: argparse.Namespace) -> None:
    """Prints the catalog."""
    from rich.console import Console
    from rich.table import Table

    from agentspec.engine.catalog import MODELS
    from agentspec.engine.models import ready

    home = chosen_config(arguments).model.home
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "model", "licence", "download", "here"):
        table.add_column(heading, justify="right" if heading == "download" else "left")
    for model in MODELS.values():
        here = "yes" if ready(model.name, home) else "no"
        table.add_row(model.name, model.title, model.licence, f"{model.size / 1e6:,.0f} MB", here)
    Console(width=None if Console().is_terminal else 160).print(table)


def run_pull(arguments: argparse.Namespace) -> None:
    """Pulls models and prints their folders, one a line."""
    from agentspec.engine.models import repair

    config = chosen_config(arguments)
    for name in arguments.names:
        repair(name, config.model.home)
        print(pulled(name, config), flush=True)


def run_path(arguments: argparse.Namespace) -> None:
    """Prints the folder of a model that needs no pull."""
    from agentspec.engine.catalog import MODELS
    from agentspec.engine.hub import is_hub_id
    from agentspec.engine.models import checked_folder, ready, unknown

    home = chosen_config(arguments).model.home
    folder = ready(arguments.name, home)
    if folder is None and Path(arguments.name).expanduser().is_dir():
        folder = checked_folder(Path(arguments.name).expanduser())
    if folder is None and arguments.name not in MODELS and not is_hub_id(arguments.name):
        raise ModelError(unknown(arguments.name, MODELS))
    if folder is None:
        raise ModelError(f"model {arguments.name} is not here; run: agentspec models pull {arguments.name}")
    print(folder)


def pulled(name: str, config: Config) -> Path:
    """The model's folder, fetched and converted with progress on the terminal."""
    from agentspec.commands.display import model_progress
    from agentspec.engine.models import ensure

    with model_progress() as progress:
        return ensure(name, config.model.home, progress=progress)
