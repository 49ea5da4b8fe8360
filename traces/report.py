"""A replay's figures as one JSON object and as a table."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import takewhile
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from agentspec.traces.measure import TurnResult, bootstrap, rounded, summarise
from agentspec.traces.options import ReplayOptions
from agentspec.traces.replay import Replayed

MISSING = "-"
HEADINGS = ("turns", "tokens", "per\nstep", "drafts\nused", "off\ntok/s", "on\ntok/s", "ratio", "same\noutput")
"""Of the figures; narrow enough for ten runs on a terminal of 80 columns."""


def report_of(replayed: Replayed, options: ReplayOptions, command: str) -> dict[str, Any]:
    """Totals, the same per trajectory, and what was run; figures that the server did not give are null.

    `speed_ratio_interval` is the 95 % bootstrap interval of `speed_ratio` over trajectories.
    """
    groups = [turns for turns in replayed.trajectories.values() if turns]
    turns = [turn for group in groups for turn in group]
    interval = bootstrap(groups) if options.baseline else None
    return {
        **summarise(turns),
        "speed_ratio_interval": None if interval is None else [rounded(bound) for bound in interval],
        "trajectories": len(replayed.trajectories),
        "skipped": sum(replayed.skipped.values()),
        "different": [difference(turn) for turn in turns if turn.identical is False],
        "per_trajectory": [
            {"id": identifier, "skipped": replayed.skipped[identifier], **summarise(group)}
            for identifier, group in replayed.trajectories.items()
        ],
        "model": replayed.model,
        "command": command,
        "settings": {name: value for name, value in asdict(options).items() if name != "api_key"},
    }


def difference(turn: TurnResult) -> dict[str, Any]:
    """Where two arms part: the first token that differs, if the server gives tokens."""
    reports = [answer.report or {} for answer in (turn.answer, turn.baseline) if answer is not None]
    tokens = [report.get("token_ids") for report in reports]
    position = None
    if len(tokens) == 2 and tokens[0] is not None and tokens[1] is not None:
        position = common_length(tokens[0], tokens[1])
    return {"trajectory": turn.trajectory, "message": turn.index, "first_different_token": position}


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens that two sequences have in common at their start."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """The table of trajectories and totals, then the speed ratio and what was not measured."""
    table = Table(title=f"Replay on {report['model']}", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("trajectory", overflow="fold")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for row in report["per_trajectory"]:
        table.add_row(row["id"], *cells(row, report["settings"]))
    table.add_section()
    table.add_row("total", *cells(report, report["settings"]), style="bold")
    console.print(table)
    for line in notes(report):
        console.print(line, highlight=False)


def cells(row: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """The figures of one row after its name."""
    rate = number(row["decode_tokens_per_s"], 1)
    off = number(row["baseline_decode_tokens_per_s"], 1) if settings["baseline"] else MISSING
    alone_off = not settings["baseline"] and not settings["speculation"]
    identical = row["identical_turns"]
    return [
        str(row["turns"]),
        str(row["tokens"]),
        number(row["tokens_per_step"], 2),
        accepted(row),
        rate if alone_off else off,
        MISSING if alone_off else rate,
        number(row["speed_ratio"], 2),
        MISSING if identical is None else f"{identical}/{row['turns']}",
    ]


def accepted(row: Mapping[str, Any]) -> str:
    """Share of the drafted tokens that the model chose too."""
    return f"{row['accepted_total'] / row['drafted_total']:.0%}" if row["drafted_total"] else MISSING


def number(value: float | None, digits: int) -> str:
    """A figure, or a dash where there is none."""
    return MISSING if value is None else f"{value:.{digits}f}"


def notes(report: Mapping[str, Any]) -> list[str]:
    """What the table leaves unsaid."""
    lines = []
    if report["speed_ratio"] is not None:
        interval = report["speed_ratio_interval"]
        spread = f", 95 % interval {interval[0]:.2f} to {interval[1]:.2f} over trajectories" if interval else ""
        lines.append(f"Decode speed with speculation over without: {report['speed_ratio']:.2f}{spread}.")
        lines.append(f"Identical output: {report['identical_turns']} of {report['turns']} turns.")
    if report["skipped"]:
        lines.append(f"{report['skipped']} turns were skipped: their prompt is too long.")
    if report["turns"] and report["steps"] is None:
        lines.append("The server reports no steps and drafts; speed is by this client's clock.")
    return lines
