"""The `agentspec` command."""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence

from agentspec import __version__
from agentspec.commands import bench, cache, config, corpus, models, parity, replay, serve, traces
from agentspec.commands.settings import in_flags
from agentspec.errors import AgentSpecError, ConfigError

INTERRUPTED = 130
BROKEN_PIPE = 141


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="agentspec",
        description="Serves a model to agents, drafting from their own history without changing what it says.",
        epilog="First steps: 'agentspec serve --demo' fetches a small model, compares speculation off and on, and then "
        "serves. 'agentspec COMMAND --help' explains a command; 'agentspec config' lists all settings.",
    )
    parser.add_argument("--version", action="version", version=f"agentspec {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (serve, replay, parity, traces, cache, corpus, models, bench, config):
        module.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Exit code 0, 1 on failure, 2 on wrong usage or settings, 130 on Ctrl-C."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return run(words)
    except AgentSpecError as error:
        complain(error.message)
        return 2 if isinstance(error, ConfigError) else 1
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("agentspec"):
            raise
        print(f"agentspec: {error}; this command needs: pip install 'agentspec-proxy[worker]'", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        discard_output()
        return BROKEN_PIPE
    except OSError as error:
        place = "" if error.filename is None else f"{error.filename}: "
        complain(f"{place}{error.strerror or error}")
        discard_output()
        return 1


def complain(message: str) -> None:
    """One line on standard error; what would control the terminal is escaped."""
    line = " ".join(message.split())
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)
    print(f"agentspec: {shown}", file=sys.stderr)


def run(words: Sequence[str]) -> int:
    """Parses and runs a command, and sees its output written: raises `OSError` where that fails."""
    try:
        parsed = build_parser().parse_args(words)
        parsed.command_line = ["agentspec", *words]
        return ran(parsed)
    finally:
        sys.stdout.flush()


def ran(parsed: argparse.Namespace) -> int:
    """Runs a command; what is wrong with a flag's value is told with the flag, not with its variable."""
    try:
        code: int | None = parsed.run(parsed)
        return code or 0
    except AgentSpecError as error:
        error.message = in_flags(error.message, parsed)
        raise


def discard_output() -> None:
    """Sends what standard output still holds nowhere: the interpreter would fail on it once more at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
