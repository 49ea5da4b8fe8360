"""TLAR's activation and width beside plainer rules and other texts, at matched budgets, without a model.

    python -m bench.tlar trajectories.jsonl.gz [more ...] --limit 20

Each step verifies a chain of 4 tokens (of prompt lookup, or of a small model) and further nodes from continuations.
Every rule sees the same chains and continuations, and walks along the recorded answers by itself. Budgets are matched
by the mean number of further nodes in a step behind the gate, all runs together: each plain rule has one number (how
often, or how many nodes) that is searched for until it verifies as many as the adaptive rule does, within 1 %.
`ratio` is the adaptive rule's extra tokens per step over those of the row, with a 95 % interval over runs.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.cache.activation import Activation, ActivationRule, Adaptive, CostAware, CostRule
from agentspec.cache.automaton import Int64s
from agentspec.traces.controls import FixedWidth, LastHit, PeriodicProbes, RandomActivation
from agentspec.traces.gain import interval, redraws
from agentspec.traces.rescue import OWN, WIDTH, Arm, Steps
from bench.tlar_runs import BASES, Runs, runs_of

CAPS = (4, 6, 8, 12)
"""Most further nodes of a step."""

WIDTHS = (1, 4)
"""Widths of the plain rules."""

CLOSE = 0.01
"""Budgets that differ by such a part count as matched."""

TRIES = 12
FEW, MANY = 1.0, 4096.0
"""Tokens between two probes, at least and at most."""


def per_step(walks: Sequence[Steps]) -> float:
    """Further nodes of a step."""
    return sum(steps.nodes for steps in walks) / sum(steps.steps for steps in walks)


def matched(runs: Runs, arm: Callable[[float], Arm], bounds: tuple[float, float], target: float) -> list[Steps]:
    """Steps of the arm that verifies `target` nodes a step, or as near as it comes. The number that makes an arm is
    searched for between two bounds, of which the second makes most nodes."""
    ends = [(bound, runs.walks(arm(bound))) for bound in bounds]
    best = min((made for _, made in ends), key=lambda made: abs(per_step(made) - target))
    for _ in range(TRIES):
        if abs(per_step(best) - target) < CLOSE * target:
            break
        (few, less), (many, more) = ends
        low, high = per_step(less), per_step(more)
        share = (target - low) / (high - low) if high > low else 0.5
        between = few * (many / few) ** min(max(share, 0.1), 0.9)
        made = runs.walks(arm(between))
        ends[per_step(made) > target] = between, made
        best = min(best, made, key=lambda walks: abs(per_step(walks) - target))
    return best


def fixed(width: int, text: str, gate: int) -> Callable[[float], Arm]:
    """One width everywhere, and so many nodes of it."""
    return lambda most: Arm(lambda: FixedWidth(width, gate), most, text)


def probing(rule: Callable[[float], Activation], cap: int) -> Callable[[float], Arm]:
    """A rule with probes after every so many tokens."""
    return lambda every: Arm(partial(rule, every), cap)


def plain_rules(runs: Runs, cap: int, target: float, asked: Int64s, widths: Sequence[int]) -> dict[str, list[Steps]]:
    """The plain rules at a matched budget; random widths come as often as the adaptive rule asked for each."""
    gate, seeds, chances = runs.gate, count(), asked[1:].tolist()
    random = lambda active: Arm(lambda: RandomActivation(active, chances, next(seeds), gate), cap)  # noqa: E731
    found = {"random": matched(runs, random, (0.001, 1.0), target)}
    for width in widths:
        periodic = probing(partial(PeriodicProbes, width, gate=gate), cap)
        last_hit = probing(partial(LastHit, width, gate=gate), cap)
        found[f"fixed {width}"] = matched(runs, fixed(width, OWN, gate), (0.01, float(cap)), target)
        found[f"periodic {width}"] = matched(runs, periodic, (MANY, FEW), target)
        found[f"last hit {width}"] = matched(runs, last_hit, (MANY, FEW), target)
    return found


def family(runs: Runs, cap: int, rule: ActivationRule, widths: Sequence[int]) -> dict[str, list[Steps]]:
    """An adaptive rule, and the plain ones at its budget."""
    asked = np.zeros(WIDTH + 1, np.int64)
    adaptive = runs.walks(Arm(lambda: Adaptive(rule), cap), asked)
    return {"adaptive": adaptive} | plain_rules(runs, cap, per_step(adaptive), asked, widths)


def other_texts(runs: Runs, cap: int, rule: ActivationRule, target: float) -> dict[str, list[Steps]]:
    """Histories that are not the run's own, with the adaptive rule, and with as many nodes as it takes."""
    found = {}
    for text in ("cross", "shuffled", "unigram"):
        found[f"{text}, adaptive"] = runs.walks(Arm(lambda: Adaptive(rule), cap, text))
        found[f"{text}, fixed 4"] = matched(runs, fixed(WIDTH, text, runs.gate), (0.01, float(cap)), target)
    return found


def knobs(runs: Runs, cap: int, rule: ActivationRule) -> dict[str, list[Steps]]:
    """What may be switched on, at whatever budget it takes."""
    marginal, aware = replace(rule, marginal=True), CostRule(gate=runs.gate)
    return {
        "all positions, 4": runs.walks(Arm(lambda: FixedWidth(WIDTH, runs.gate), cap)),
        "with prompts": runs.walks(Arm(lambda: Adaptive(rule), cap, "prompts")),
        "lasting": runs.walks(Arm(lambda: Adaptive(rule), cap, lasting=True)),
        "marginal": runs.walks(Arm(lambda: Adaptive(marginal), cap)),
        "marginal, 4": runs.walks(Arm(lambda: Adaptive(replace(marginal, least=WIDTH)), cap)),
        "cost-aware": runs.walks(Arm(lambda: CostAware(aware), cap)),
    }


def families_at(runs: Runs, cap: int) -> dict[str, dict[str, list[Steps]]]:
    """All arms under one cap, by what they are compared with: the first one of each."""
    paper = ActivationRule(gate=runs.gate)
    first = family(runs, cap, paper, WIDTHS)
    others = other_texts(runs, cap, paper, per_step(first["adaptive"]))
    return {
        "the paper's rule": first | others | knobs(runs, cap, paper),
        "active as by the paper's rule, always width 4": family(runs, cap, replace(paper, least=WIDTH), (WIDTH,)),
    }


def sums(walks: Sequence[Steps]) -> NDArray[np.float64]:
    """float64[runs, 4]: steps, tokens, nodes, extra tokens."""
    return np.array([(steps.steps, steps.tokens, steps.nodes, steps.extra) for steps in walks], float)


def figures(walks: Sequence[Steps], adaptive: Sequence[Steps]) -> dict[str, Any]:
    """An arm's figures, and the adaptive rule's extra tokens per step over its own."""
    own, first, drawn = sums(walks), sums(adaptive), redraws(len(walks))
    steps, tokens, nodes, extra = own.sum(axis=0)
    misses, rescues = sum(one.misses for one in walks), sum(one.rescues for one in walks)
    rates = [(drawn @ part)[:, 3] / (drawn @ part)[:, 0] for part in (first, own)]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = (first[:, 3].sum() / first[:, 0].sum()) / (extra / steps)
        ratios = rates[0] / rates[1]
        per_node = (drawn @ own)[:, 3] / (drawn @ own)[:, 2]
    return {
        "tokens_per_step": tokens / steps,
        "nodes_per_step": nodes / steps,
        "active": sum(one.active for one in walks) / steps,
        "extra_per_step": extra / steps,
        "extra_per_node": extra / max(nodes, 1),
        "extra_per_node_interval": interval(per_node),
        "recovery": rescues / steps,
        "recovery_given_a_miss": rescues / max(misses, 1),
        "ratio": float(ratio),
        "ratio_interval": interval(ratios),
    }


HEADINGS = ("tokens", "nodes", "active", "extra", "extra/node", "(interval)", "recovery", "of misses", "ratio", "")


def print_table(title: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Figures of some arms."""
    print(f"\n{title}")
    print(
        f"{'':20}"
        + "".join(f"{heading:>18}" if heading in ("(interval)", "") else f"{heading:>11}" for heading in HEADINGS)
    )
    for name, row in rows.items():
        low, high = row["extra_per_node_interval"]
        least, most = row["ratio_interval"]
        print(
            f"{name:20}{row['tokens_per_step']:11.3f}{row['nodes_per_step']:11.3f}{row['active']:11.1%}"
            f"{row['extra_per_step']:11.4f}{row['extra_per_node']:11.4f}{f'{low:.4f} to {high:.4f}':>18}"
            f"{row['recovery']:11.2%}{row['recovery_given_a_miss']:11.2%}"
            f"{row['ratio']:11.2f}{f'{least:.2f} to {most:.2f}':>18}",
            flush=True,
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer and template")
    parser.add_argument("--limit", type=int, help="runs of each file, of those that reach behind the gate")
    parser.add_argument("--tokens", type=int, default=4096, help="of answers of a run, the last turn whole")
    parser.add_argument("--context", type=int, help="of a prompt and its answer; a turn beyond ends the run")
    parser.add_argument("--gate", type=int, default=512, help="tokens of answers before which nothing is retrieved")
    parser.add_argument("--base", choices=BASES, default="lookup", help="what drafts the chain")
    parser.add_argument("--caps", type=int, nargs="+", default=CAPS)
    parser.add_argument("--json", type=Path, help="file for the steps of every run")
    arguments = parser.parse_args()
    runs = runs_of(arguments)
    total = sum(turn.answer.size for turns in runs.turns for turn in turns)
    print(f"{len(runs.turns)} runs, {total:,} tokens of answers, chains of {arguments.base}", flush=True)
    report: dict[str, Any] = {}
    for cap in arguments.caps:
        for name, arms in families_at(runs, cap).items():
            title = f"{name}, at most {cap} nodes a step"
            print_table(title, {arm: figures(walks, arms["adaptive"]) for arm, walks in arms.items()})
            report[title] = {arm: [asdict(steps) for steps in walks] for arm, walks in arms.items()}
    if arguments.json:
        arguments.json.write_text(json.dumps({"runs": runs.names, "sources": runs.sources, "families": report}))


if __name__ == "__main__":
    main()
