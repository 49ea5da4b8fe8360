"""Figures of a simulation from counts that are known."""

import io

import numpy as np
import pytest
from rich.console import Console

from agentspec.traces.gain import MEANINGS, interval, print_simulation, redraws, simulation_report
from agentspec.traces.simulate import ARMS, Simulated, Tally


def simulated(name: str, source: str, tokens: int, steps: int) -> Simulated:
    tallies = {"none": {8: Tally(tokens, 0)}, "hybrid": {8: Tally(steps, 3 * steps)}}
    return Simulated(name, source, "domain of " + source, name, tokens, tallies)


RUNS = [
    simulated("a", "x", 100, 50),
    simulated("b", "x", 300, 100),
    simulated("c", "y", 40, 40),
    simulated("d", "y", 0, 0),
]


def test_tokens_per_step_are_totals_over_totals() -> None:
    report = simulation_report(RUNS, {"model": "m"}, "command")
    x = report["source"]["x"]
    assert (x["trajectories"], x["tokens"]) == (2, 400)
    assert x["arms"]["hybrid"]["8"]["tokens_per_step"] == pytest.approx(400 / 150, abs=1e-4)
    assert x["arms"]["hybrid"]["8"]["drafted_per_step"] == 3
    assert x["arms"]["none"]["8"] == {"tokens_per_step": 1, "interval": [1, 1], "drafted_per_step": 0}
    assert report["domain"]["domain of y"]["arms"]["hybrid"]["8"]["interval"] is None
    assert report["all"]["all"]["trajectories"] == 3
    assert (report["settings"], report["command"]) == ({"model": "m"}, "command")


def test_an_interval_holds_the_total_and_lies_between_the_runs() -> None:
    cell = simulation_report(RUNS, {}, "")["source"]["x"]["arms"]["hybrid"]["8"]
    low, high = cell["interval"]
    assert 2 <= low <= cell["tokens_per_step"] <= high <= 3
    assert low < high


def test_redraws_draw_as_many_runs_as_there_are() -> None:
    drawn = redraws(5)
    assert (drawn.sum(axis=1) == 5).all() and drawn.std() > 0
    assert (redraws(5) == drawn).all()
    assert interval(np.arange(1001.0)) == [25, 975]


def test_the_table_has_a_row_for_each_source_and_domain() -> None:
    console = Console(file=io.StringIO(), width=120)
    print_simulation(simulation_report(RUNS, {}, ""), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(name in text for name in ("x", "y", "domain of x", "all", "2.67", "hybrid"))
    assert "none" not in text
    assert f"hybrid: {MEANINGS['hybrid']}" in text.replace("\n", " ") and "lookup:" not in text


def test_every_arm_that_the_table_shows_is_explained() -> None:
    assert {*MEANINGS, "none"} == set(ARMS)
