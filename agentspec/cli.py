"""The `agentspec` command."""

import argparse
import os
import sys
from collections.abc import Sequence

from agentspec import __version__
from agentspec.commands import bench, config, models, parity, replay, serve, traces
from agentspec.errors import AgentSpecError, ConfigError

INTERRUPTED = 130
BROKEN_PIPE = 141


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="agentspec",
        description="Serves a model to agents, drafting from their own history without changing what it says.",
    )
    parser.add_argument("--version", action="version", version=f"agentspec {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (serve, replay, parity, traces, models, bench, config):
        module.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Exit code 0, 1 on failure, 2 on wrong usage or settings, 130 on Ctrl-C."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    parsed = build_parser().parse_args(words)
    parsed.command_line = ["agentspec", *words]
    try:
        code: int | None = parsed.run(parsed)
        sys.stdout.flush()
    except AgentSpecError as error:
        print(f"agentspec: {' '.join(error.message.split())}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("agentspec"):
            raise
        print(f"agentspec: {error}; this command needs: pip install 'agentspec-proxy[worker]'", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return code or 0


if __name__ == "__main__":
    sys.exit(main())
