"""A simulation's figures as one JSON object and as a table: tokens per target step, with intervals over runs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from agentspec.traces.simulate import Simulated

MEANINGS = {
    "lookup": "copies what followed the same last three, two or one tokens earlier in the run",
    "local": "drafts from the run's own history",
    "hybrid": "drafts from the run's own history and those of the runs before it",
    "scaffold": "drafts from these and from what the tools of the run fix of an answer, as a server does",
    "tlar": "drafts from nearly equal contexts in the run's own answers, when and as many as a decayed hit rate says",
}
"""What each arm of a simulation drafts."""

RESAMPLES = 2000
"""Redraws of the runs for an interval."""

GROUPS: Mapping[str, Callable[[Simulated], str]] = {
    "source": lambda run: run.source,
    "domain": lambda run: run.domain,
    "all": lambda run: "all",
}
"""What rows stand for."""


def counts(runs: Sequence[Simulated], arm: str, budget: int) -> NDArray[np.float64]:
    """Tokens, steps and drafted nodes of each run: float64[runs, 3]."""
    tallies = [run.tallies[arm][budget] for run in runs]
    return np.array([(run.tokens, tally.steps, tally.drafted) for run, tally in zip(runs, tallies, strict=True)], float)


def redraws(size: int, seed: int = 0) -> NDArray[np.int64]:
    """How often each of `size` runs is drawn, in each redraw: int64[redraws, size]."""
    return np.random.default_rng(seed).multinomial(size, np.full(size, 1 / size), RESAMPLES)


def interval(values: NDArray[np.float64]) -> list[float]:
    """The middle 95 % of the values of all redraws."""
    return [round(float(bound), 4) for bound in np.quantile(values, (0.025, 0.975))]


def figures(runs: Sequence[Simulated]) -> dict[str, Any]:
    """Tokens per step by arm and budget of some runs."""
    drawn = redraws(len(runs))
    arms = {
        arm: {str(budget): figure(counts(runs, arm, budget), drawn) for budget in budgets}
        for arm, budgets in runs[0].tallies.items()
    }
    return {"trajectories": len(runs), "tokens": sum(run.tokens for run in runs), "arms": arms}


def figure(pairs: NDArray[np.float64], drawn: NDArray[np.int64]) -> dict[str, Any]:
    """One cell; the interval is None for fewer than two runs."""
    tokens, steps, drafted = pairs.sum(axis=0)
    sums = drawn @ pairs
    return {
        "tokens_per_step": round(tokens / steps, 4),
        "interval": interval(sums[:, 0] / sums[:, 1]) if len(pairs) > 1 else None,
        "drafted_per_step": round(drafted / steps, 4),
    }


def simulation_report(runs: Sequence[Simulated], settings: Mapping[str, Any], command: str) -> dict[str, Any]:
    """Figures per source, per domain and over all runs, and what was run. Intervals are 95 % bootstrap intervals over
    runs."""
    kept = [run for run in runs if run.tokens]
    groups: dict[str, Any] = {}
    for name, key in GROUPS.items():
        parts: dict[str, list[Simulated]] = {}
        for run in kept:
            parts.setdefault(key(run), []).append(run)
        groups[name] = {part: figures(chosen) for part, chosen in sorted(parts.items())}
    return {**groups, "settings": dict(settings), "command": command}


def print_simulation(report: Mapping[str, Any], console: Console) -> None:
    """One table: a row for each source, each domain and all, a column for each arm and budget."""
    table = Table(
        title="Tokens per step (a pass of the model)", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("runs of", overflow="fold")
    for heading in ("runs", "tokens"):
        table.add_column(heading, justify="right")
    rows = [(name, row) for group in GROUPS for name, row in report[group].items()]
    for arm, budgets in rows[-1][1]["arms"].items() if rows else ():
        for budget in budgets if arm != "none" else ():
            table.add_column(f"{arm}\n{budget}", justify="right")
    for group in GROUPS:
        for name, row in report[group].items():
            cells = [cell for arm, budgets in row["arms"].items() if arm != "none" for cell in budgets.values()]
            table.add_row(
                name,
                str(row["trajectories"]),
                f"{row['tokens']:,}",
                *(f"{cell['tokens_per_step']:.2f}" for cell in cells),
            )
        table.add_section()
    console.print(table)
    for arm in rows[-1][1]["arms"] if rows else ():
        if arm in MEANINGS:
            console.print(f"{arm}: {MEANINGS[arm]}", highlight=False, markup=False)
    console.print("The number under it is the budget: most draft tokens in one step.", highlight=False)
    console.print("Plain decoding makes one token a step. Intervals over runs are in --json.", highlight=False)
