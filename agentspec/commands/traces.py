"""`agentspec traces`: import, validate and count recorded agent runs."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from agentspec.commands.numbers import positive, whole

ABOUT = """A trace file has one recorded agent run a line; docs/format/trace.md describes it."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser("traces", help="import, validate and count recorded agent runs", description=ABOUT)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    importing = actions.add_parser("import", help="write checked runs of .jsonl and .jsonl.gz files to one file")
    add_import_arguments(importing)
    validating = actions.add_parser("validate", help="check files; names the first wrong line")
    counting = actions.add_parser("stats", help="count runs, turns, messages, tool calls and characters")
    counting.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    for action, run in ((importing, run_import), (validating, run_validate), (counting, run_stats)):
        action.add_argument("files", nargs="+", type=Path, metavar="FILE", help=".jsonl or .jsonl.gz file")
        action.set_defaults(run=run)


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """What an import keeps and where it goes."""
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="file to write, .jsonl or .jsonl.gz")
    parser.add_argument("--first-turns", type=positive, metavar="N", help="cut runs after N generated turns")
    parser.add_argument("--limit", type=positive, metavar="N", help="keep N runs, drawn at random (default all)")
    parser.add_argument("--seed", type=whole, default=0, metavar="N", help="makes the draw repeatable (default 0)")
    parser.add_argument("--repair", action="store_true", help="number ambiguous tool calls anew, by their order")
    parser.add_argument("--skip-invalid", action="store_true", help="leave out runs that are refused and count them")
    parser.add_argument(
        "--plain", action="store_true",
        help='lines are {"messages": [...], "tools": [...]} as clients log them: name runs after their file and line, '
        "leave out fields that a trace does not have and what follows the last assistant turn",
    )  # fmt: skip


def run_import(arguments: argparse.Namespace) -> None:
    """Imports and says what was kept."""
    from agentspec.traces.importer import ImportOptions, import_traces

    options = ImportOptions(
        arguments.first_turns,
        arguments.limit,
        arguments.seed,
        arguments.repair,
        arguments.skip_invalid,
        arguments.plain,
    )
    count = import_traces(arguments.files, arguments.out, options)
    print(
        f"{arguments.out}: {count.written} of {count.read} runs, {count.repaired} repaired, {count.skipped} refused",
        file=sys.stderr,
    )


def run_validate(arguments: argparse.Namespace) -> None:
    """Says how many valid runs each file has; raises at the first other one."""
    from agentspec.traces.files import read_traces

    counts = dict.fromkeys(arguments.files, 0)
    for path in counts:
        counts[path] = sum(1 for _ in read_traces([path]))
        print(f"{path}: {counts[path]} valid runs")
    if len(counts) > 1:
        print(f"ids are unique over all {sum(1 for _ in read_traces(counts))} runs")


def run_stats(arguments: argparse.Namespace) -> None:
    """Prints counts per file and in total."""
    from agentspec.traces.files import read_traces
    from agentspec.traces.statistics import count_traces

    per_file = {str(path): count_traces(read_traces([path])) for path in arguments.files}
    total = count_traces(read_traces(arguments.files))
    if arguments.json:
        print(json.dumps({**total, "per_file": per_file}))
    else:
        print_counts({**per_file, "total": total} if len(per_file) > 1 else per_file)


def print_counts(rows: dict[str, dict[str, Any]]) -> None:
    """A table of counts."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    names = [name for name in next(iter(rows.values())) if name != "domains"]
    table.add_column("file", overflow="fold")
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    table.add_column("domains", overflow="fold")
    for file, counts in rows.items():
        domains = ", ".join(f"{domain} {count}" for domain, count in counts["domains"].items())
        table.add_row(file, *(f"{counts[name]:,}" for name in names), domains)
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)
