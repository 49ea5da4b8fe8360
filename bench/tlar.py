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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from agentspec.cache.activation import Activation, ActivationRule, Adaptive, CostAware, CostRule
from agentspec.cache.automaton import Int32s
from agentspec.cache.masked import MaskedIndex
from agentspec.commands.simulate import encoder, tokenizer_of
from agentspec.config import Config, ModelConfig
from agentspec.traces.controls import (
    FixedWidth,
    LastHit,
    PeriodicProbes,
    RandomActivation,
    Replaced,
    Shuffled,
    Text,
    Unigram,
)
from agentspec.traces.files import read_traces
from agentspec.traces.gain import interval, redraws
from agentspec.traces.rescue import OWN, WIDTH, Arm, Chains, Prepared, Steps, lookup_chains, no_chains, prepared, walk
from agentspec.traces.simulate import Recording, recording_of
from bench.small_model import SmallModel

CAPS = (4, 6, 8, 12)
"""Most further nodes of a step."""

WIDTHS = (1, 4)
"""Widths of the plain rules."""

CLOSE = 0.01
"""Budgets that differ by such a part count as matched."""

TRIES = 12
FEW, MANY = 1.0, 4096.0
"""Tokens between two probes, at least and at most."""


BASES: Mapping[str, Callable[[str], Chains]] = {
    "lookup": lambda _: lookup_chains,
    "model": lambda name: SmallModel(name).chains,
    "none": lambda _: no_chains,
}
"""What drafts the chain of each step."""


@dataclass(frozen=True, slots=True)
class Runs:
    """What the rules walk over."""

    names: Sequence[str]
    sources: Sequence[str]
    turns: Sequence[Sequence[Prepared]]
    gate: int

    def walks(self, arm: Arm, widths: NDArray[np.int64] | None = None) -> list[Steps]:
        """An arm's steps of every run."""
        return [walk(turns, arm, self.gate, widths) for turns in self.turns]


def said(recording: Recording) -> Int32s:
    """All answers of a run."""
    return np.concatenate([np.empty(0, np.int32), *[turn.answer for turn in recording.turns]])


def shortened(recording: Recording, most: int, context: int | None) -> Recording:
    """The first turns of a run, up to the one whose answer exceeds `most` tokens of answers, and before the one that
    exceeds `context` tokens together with its prompt."""
    answers, turns = 0, 0
    for turn, (prompt, _) in zip(recording.turns, recording.prompts(), strict=True):
        if answers > most or (context and prompt.size + turn.answer.size > context):
            break
        answers, turns = answers + turn.answer.size, turns + 1
    return replace(recording, turns=recording.turns[:turns])


def chosen(arguments: argparse.Namespace) -> Iterator[tuple[Recording, Int32s]]:
    """The first runs of each file whose answers reach behind the gate, each with the answers of the one before."""
    encode = encoder(tokenizer_of(Config(model=ModelConfig(name=arguments.model))))
    for file in arguments.files:
        found = list[Recording]()
        for trace in read_traces([file]):
            recording = shortened(recording_of(trace, encode), arguments.tokens, arguments.context)
            if said(recording).size > arguments.gate + 1:
                found.append(recording)
            if len(found) == arguments.limit:
                break
        for at, recording in enumerate(found):
            yield recording, said(found[at - 1]) if at or len(found) > 1 else np.empty(0, np.int32)


def runs_of(arguments: argparse.Namespace) -> Runs:
    """Runs, prepared."""
    drafter = BASES[arguments.base](arguments.model)
    names, sources, turns = list[str](), list[str](), list[list[Prepared]]()
    for recording, other in chosen(arguments):
        texts: dict[str, Text] = {
            OWN: MaskedIndex(),
            "prompts": MaskedIndex(),
            "cross": Replaced(other),
            "shuffled": Shuffled(crc32(recording.id.encode())),
            "unigram": Unigram(),
        }
        turns.append(list(prepared(recording, texts, frozenset({"prompts"}), arguments.gate, drafter)))
        names.append(recording.id)
        sources.append(recording.source)
    return Runs(names, sources, turns, arguments.gate)


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


def plain_rules(runs: Runs, cap: int, target: float, widths: Int32s | NDArray[np.int64]) -> dict[str, list[Steps]]:
    """The plain rules at a matched budget."""
    gate, seeds, chances = runs.gate, count(), widths[1:].tolist()
    found = {
        "random": matched(
            runs,
            lambda active: Arm(lambda: RandomActivation(active, chances, next(seeds), gate), cap),
            (0.001, 1.0),
            target,
        )
    }
    for width in WIDTHS:
        periodic = probing(partial(PeriodicProbes, width, gate=gate), cap)
        last_hit = probing(partial(LastHit, width, gate=gate), cap)
        found[f"fixed {width}"] = matched(runs, fixed(width, OWN, gate), (0.01, float(cap)), target)
        found[f"periodic {width}"] = matched(runs, periodic, (MANY, FEW), target)
        found[f"last hit {width}"] = matched(runs, last_hit, (MANY, FEW), target)
    return found


def arms_at(runs: Runs, cap: int) -> dict[str, list[Steps]]:
    """All rules and texts under one cap, the adaptive rule first."""
    gate, widths = runs.gate, np.zeros(WIDTH + 1, np.int64)
    paper = ActivationRule(gate=gate)
    adaptive = lambda: Adaptive(paper)  # noqa: E731
    found = {"adaptive": runs.walks(Arm(adaptive, cap), widths)}
    target = per_step(found["adaptive"])
    found |= plain_rules(runs, cap, target, widths)
    for text in ("cross", "shuffled", "unigram"):
        found[f"{text}, adaptive"] = runs.walks(Arm(adaptive, cap, text))
        found[f"{text}, fixed 4"] = matched(runs, fixed(4, text, gate), (0.01, float(cap)), target)
    found["all, fixed 4"] = runs.walks(Arm(lambda: FixedWidth(4, gate), cap))
    found["prompts, adaptive"] = runs.walks(Arm(adaptive, cap, "prompts"))
    found["adaptive, lasting"] = runs.walks(Arm(adaptive, cap, lasting=True))
    wide, marginal = replace(paper, least=WIDTH), replace(paper, least=WIDTH, marginal=True)
    found["adaptive, width 4"] = runs.walks(Arm(lambda: Adaptive(wide), cap))
    found["marginal, width 4"] = runs.walks(Arm(lambda: Adaptive(marginal), cap))
    found["marginal credit"] = runs.walks(Arm(lambda: Adaptive(replace(paper, marginal=True)), cap))
    found["cost-aware"] = runs.walks(Arm(lambda: CostAware(CostRule(gate=gate)), cap))
    return found


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


def print_table(cap: int, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Figures of all arms under one cap."""
    print(f"\nat most {cap} nodes a step")
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
    print(
        f"{len(runs.turns)} runs, {sum(turn.answer.size for turns in runs.turns for turn in turns):,} tokens of answers"
    )
    report = {}
    for cap in arguments.caps:
        arms = arms_at(runs, cap)
        rows = {name: figures(walks, arms["adaptive"]) for name, walks in arms.items()}
        print_table(cap, rows)
        report[cap] = {name: [asdict(steps) for steps in walks] for name, walks in arms.items()}
    if arguments.json:
        arguments.json.write_text(json.dumps({"runs": runs.names, "sources": runs.sources, "arms": report}))


if __name__ == "__main__":
    main()
