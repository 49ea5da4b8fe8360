"""Writes `docs/cli.md` and `docs/settings.md` from the code; with `--check`, fails when they are not current.

python docs/reference.py [--check]
"""

import argparse
import os
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

os.environ["XDG_CACHE_HOME"] = "~/.cache"

from agentspec.cli import build_parser
from agentspec.commands.settings import all_settings, shown

DOCS = Path(__file__).resolve().parent
WRITTEN_BY = "<!-- written by docs/reference.py -->"


def main() -> int:
    """Writes or compares; 1 when a page is not current."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    stale = False
    for name, text in (("cli.md", cli_page()), ("settings.md", settings_page())):
        page = DOCS / name
        if not check:
            page.write_text(text)
        elif not page.exists() or page.read_text() != text:
            stale = True
            print(f"docs/{name} is not current; run: python docs/reference.py", file=sys.stderr)
    return int(stale)


def cli_page() -> str:
    """Every command with its arguments."""
    lines = ["# The `agentspec` command", "", WRITTEN_BY, ""]
    for name, parser in commands(build_parser()):
        lines += [f"## {name}", ""]
        if parser.description:
            lines += [" ".join(parser.description.split()), ""]
        rows = list(arguments(parser))
        if rows:
            lines += ["| argument | meaning |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """A parser and all below it, by their full names."""
    yield parser.prog, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from commands(below)


def arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Rows of a table: an argument or a command, and what it means."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                yield row(choice.dest, choice.help)
        elif not isinstance(action, argparse._HelpAction):
            value = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
            yield row(" ".join((", ".join(action.option_strings), str(value))).strip(), action.help)


def row(name: str, meaning: str | None) -> str:
    """One row; what would end a cell is escaped."""
    return f"| `{name}` | {(meaning or '').replace('%%', '%').replace('|', '&#124;')} |"


def settings_page() -> str:
    """Every setting with its variable, default and meaning."""
    lines = [
        "# Settings", "", WRITTEN_BY, "",
        "Each setting is an environment variable; the most used ones are flags of the commands too, and a flag wins.",
        "An unknown variable that begins with `AGENTSPEC_` is refused. `agentspec config` prints all values in use.",
        "",
    ]  # fmt: skip
    for part, settings in groupby(all_settings(), lambda setting: setting.part):
        lines += [f"## {part}", "", "| variable | default | meaning |", "|---|---|---|"]
        for setting in settings:
            meaning = setting.meaning or f"{setting.field.replace('_', ' ')} of the {part}"
            default = shown(setting.default)
            lines.append(f"| `{setting.variable}` | {f'`{default}`' if default else 'none'} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
