"""`agentspec cache`: what the store of histories holds, carrying it elsewhere, checking it."""

import argparse
import asyncio
import json
import os
import sys
from collections import defaultdict
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentspec.commands.settings import add_settings, chosen_config
from agentspec.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentspec.cache.automaton import Int32s
    from agentspec.cache.inventory import Inventory, Kept
    from agentspec.cache.store import HistoryStore
    from agentspec.types import Trajectory

ABOUT = """Works on the histories in a Redis or in a history file, the one that the settings name. A server may run
meanwhile, but for an import into its history file. docs/format/histories.md describes the formats."""

ABOUT_STATS = """Counts trajectories, tokens, turns and bytes, by tenant and model. Stored bytes are those of the chunks
in a Redis, or of the records in a file, which has 12 more and keeps what was replaced until it is written anew."""

PATIENCE_MS = 10_000
FAILURES = ("store_errors_total", "store_dropped_total", "store_queue_bytes", "store_file_behind")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser("cache", help="count, export, import and check stored histories", description=ABOUT)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    counting = actions.add_parser(
        "stats", help="count trajectories, tokens and bytes, by tenant and model", description=ABOUT_STATS
    )
    checking = actions.add_parser("verify", help="read everything and name what is damaged; exit code 1 if anything is")
    exporting = actions.add_parser("export", help="write all histories to a file of JSON lines")
    exporting.add_argument("--out", type=file_name, required=True, metavar="FILE", help="file to write")
    importing = actions.add_parser("import", help="add the histories of such a file; those that are there stay")
    importing.add_argument("file", type=file_name, metavar="FILE", help="file that export wrote")
    importing.add_argument("--replace", action="store_true", help="put them in place of those that are there")
    for action, run in (
        (counting, run_stats), (checking, run_verify), (exporting, run_export), (importing, run_import),
    ):  # fmt: skip
        add_settings(
            action, "cache.redis_url", "cache.redis_password_file", "cache.redis_ca_file", "cache.history_file"
        )
        action.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        action.set_defaults(run=run)


def file_name(text: str) -> Path:
    """The path of a file that a flag names."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a file")
    return Path(text)


def found(arguments: argparse.Namespace) -> "Inventory":
    """All that the configured store holds."""
    from agentspec.cache.inventory import inventory

    return asyncio.run(inventory(chosen_config(arguments).cache))


def run_stats(arguments: argparse.Namespace) -> None:
    """Prints counts per tenant and model."""
    inventory = found(arguments)
    scopes: dict[tuple[str, str], list[Kept]] = defaultdict(list)
    for kept in inventory.kept:
        scopes[kept.trajectory.scope.tenant, kept.trajectory.scope.model].append(kept)
    rows = [{"tenant": tenant, "model": model, **counts(kept)} for (tenant, model), kept in sorted(scopes.items())]
    total = counts(inventory.kept)
    if arguments.json:
        print(json.dumps({**total, "scopes": rows}))
    else:
        print_rows([*rows, {"tenant": "total", "model": "", **total}] if len(rows) != 1 else rows)


def counts(kept: "list[Kept]") -> dict[str, Any]:
    """Numbers of some trajectories."""
    return {
        "trajectories": len(kept),
        "tokens": sum(int(one.tokens.size) for one in kept),
        "turns": sum(one.turns for one in kept),
        "stored_bytes": sum(one.bytes for one in kept),
        "last_write": max((one.updated for one in kept), default=None),
        "newer_version": sum(one.newer for one in kept),
    }


def print_rows(rows: list[dict[str, Any]]) -> None:
    """A table of counts."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in rows[0]:
        justify: Any = "left" if name in ("tenant", "model") else "right"
        table.add_column(name.replace("_", " "), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(shown(name, value) for name, value in row.items()))
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table, markup=False)


def shown(name: str, value: Any) -> str:
    """A value of a table; of a time, the minute."""
    if name == "last_write":
        return "" if value is None else datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M")
    return f"{value:,}" if isinstance(value, int) else repr(value)[1:-1]


def run_verify(arguments: argparse.Namespace) -> int:
    """Names what is damaged."""
    inventory = found(arguments)
    problems = [{"trajectory": None, "problem": problem} for problem in inventory.problems]
    for kept in inventory.kept:
        name = "/".join((kept.trajectory.scope.tenant, kept.trajectory.scope.model, kept.trajectory.id))
        problems += [{"trajectory": name, "problem": problem} for problem in kept.problems]
    total = counts(inventory.kept)
    if arguments.json:
        print(json.dumps({**total, "problems": problems}))
        return int(bool(problems))
    for entry in problems:
        print(f"{entry['trajectory'] or inventory.place}: {entry['problem']}")
    later = f", {total['newer_version']} of a newer version not read" if total["newer_version"] else ""
    verdict = f"{len(problems)} problems" if problems else "nothing is damaged"
    print(f"{total['trajectories']} trajectories, {total['tokens']} tokens{later}: {verdict}")
    return int(bool(problems))


def run_export(arguments: argparse.Namespace) -> None:
    """Writes all that can be read; a file that is not whole never has the name that was asked for."""
    from agentspec.cache.portable import lines

    check_target(arguments)
    inventory = found(arguments)
    readable = [kept for kept in inventory.kept if kept.tokens.size]
    part = arguments.out.with_name(f"{arguments.out.name}.part")
    try:
        part.unlink(missing_ok=True)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines(readable))
        os.replace(part, arguments.out)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    report(arguments, {"exported": len(readable), "left_out": len(inventory.kept) - len(readable)})


def check_target(arguments: argparse.Namespace) -> None:
    """Raises `ConfigError` for a target not to be replaced: what is no plain file, and the history file itself."""
    from agentspec.cache.journal import file_at

    target: Path = arguments.out
    if target.exists() and not target.is_file():
        raise ConfigError(f"--out: {str(target)!r} is no plain file, and would be replaced")
    source = chosen_config(arguments).cache.history_file
    if source and target.resolve() == file_at(source).resolve():
        raise ConfigError(f"--out: {str(target)!r} is the history file itself")


def run_import(arguments: argparse.Namespace) -> None:
    """Adds histories, once all of the file has been checked."""
    from agentspec.cache.inventory import configured
    from agentspec.cache.portable import read_lines
    from agentspec.cache.store import make_store

    config = chosen_config(arguments).cache
    configured(config)
    histories = read_lines(arguments.file)
    store = make_store(replace(config, deadline_ms=PATIENCE_MS))
    assert store is not None
    report(arguments, asyncio.run(imported(store, histories, arguments.replace)))


async def imported(
    store: "HistoryStore", histories: "Sequence[tuple[Trajectory, Int32s]]", anew: bool
) -> dict[str, int]:
    """Adds histories to a store; how many were added and how many were there already."""
    done = {"imported": 0, "kept": 0}
    try:
        for trajectory, tokens in histories:
            there = await store.describe(trajectory) is not None
            if there and not anew:
                done["kept"] += 1
                continue
            if there and await store.delete(trajectory) is None:
                raise StoreError("the store did not confirm a deletion")
            await store.append(trajectory, tokens)
            await store.flush()
            stats = store.stats()
            if any(stats.get(name) for name in FAILURES):
                raise StoreError(f"the store takes no more; {done['imported']} histories were imported")
            done["imported"] += 1
    finally:
        await store.close()
    return done


def report(arguments: argparse.Namespace, done: dict[str, int]) -> None:
    """Says what was done."""
    if arguments.json:
        print(json.dumps(done))
    else:
        words = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in done.items())
        print(f"histories: {words}", file=sys.stderr)
