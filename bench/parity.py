"""Whether drafts change any token: greedy against plain decoding and against transformers, sampled against plain.

    python -m bench.parity [--turns 40] [--tokens 64] [--sampled-turns 12] [--seeds 1 2 3] [traces.jsonl ...]

Generates recorded turns on the same float32 weights, with drafts from the run's history and without. By default every
draft is verified whatever it costs (`--cost flat`), so that as many as possible are put to the test; `--cost measured`
drafts as the server does. Prints a table and, at a first difference, how far the two best logits are apart there. The
last line is one JSON object.
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch
from transformers import AutoModelForCausalLM

from agentspec.cache.retrieval import Histories
from agentspec.config import CacheConfig, ModelConfig, load
from agentspec.engine.models import ensure
from agentspec.engine.service import Engine
from agentspec.policies.cost import FixedCost
from agentspec.server.convert import fold_system
from agentspec.traces.files import read_traces
from agentspec.types import GenerationRequest, Report, SamplingParams, Scope, SpeculationParams, Trajectory

RECORDED = Path(__file__).resolve().parents[1] / "traces" / "recorded"
OFF = SpeculationParams(enabled=False)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One recorded turn, ready to be generated again."""

    trace: str
    turn: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two token sequences part."""

    against: str
    trace: str
    turn: int
    position: int
    tokens: tuple[int | None, int | None]
    gap: float
    """Distance of the two best logits there, by transformers."""


@dataclass(slots=True)
class Outcome:
    """What comparing one way of sampling gave."""

    way: str
    turns: int = 0
    tokens: int = 0
    steps_on: int = 0
    steps_off: int = 0
    drafted: int = 0
    accepted: int = 0
    same_off: int = 0
    same_transformers: int | None = None
    differences: list[Difference] = field(default_factory=list)


class Plain:
    """The same weights under transformers' own generation."""

    def __init__(self, folder: Path, ends: Sequence[int]) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.ends = list(ends)

    def greedy(self, prompt: Sequence[int], tokens: int) -> tuple[int, ...]:
        """Greedy continuation, the end token included."""
        ids = torch.tensor([list(prompt)])
        made = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=self.ends,
            pad_token_id=self.ends[0],
        )
        return tuple(made[0, len(prompt) :].tolist())

    @torch.inference_mode()
    def gap(self, tokens: Sequence[int]) -> float:
        """How far the two best next tokens are apart after `tokens`."""
        logits = self.model(torch.tensor([list(tokens)]), logits_to_keep=1).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        return float(best - second)


def prompts(engine: Engine, files: Sequence[Path], turns: int, most_tokens: int) -> list[Prompt]:
    """The first `turns` recorded turns in the order of the files, those with short prompts before the others."""
    found: list[Prompt] = []
    for trace in read_traces(files):
        for turn in trace.turns():
            tokens = engine.render(fold_system(list(turn.prompt)), trace.tools)
            if len(tokens) < engine.window - 1:
                found.append(Prompt(trace.id, turn.index, tokens))
    short = [prompt for prompt in found if len(prompt.tokens) <= most_tokens]
    long = [prompt for prompt in found if len(prompt.tokens) > most_tokens]
    return (short + long)[:turns]


async def generated(engine: Engine, request: GenerationRequest) -> Report:
    """The report of a finished generation."""
    report = None
    async for delta in engine.generate(request):
        report = delta.report
    assert report is not None
    return report


async def compare(
    engine: Engine, plain: Plain, wanted: Sequence[Prompt], tokens: int, way: str, sampling: SamplingParams
) -> Outcome:
    """Generate every turn with drafts, without, and for greedy decoding by transformers too."""
    outcome = Outcome(way, same_transformers=0 if sampling.temperature == 0 else None)
    for prompt in wanted:
        run = Trajectory(prompt.trace, Scope(f"{way} on", engine.model))
        request = GenerationRequest(prompt.tokens, run, tokens, sampling)
        on = await generated(engine, request)
        apart = replace(run, scope=Scope(f"{way} off", engine.model))
        off = await generated(engine, replace(request, trajectory=apart, speculation=OFF))
        count(outcome, on, off)
        outcome.same_off += same(outcome, plain, prompt, "off", on, off.token_ids)
        if outcome.same_transformers is not None:
            made = plain.greedy(prompt.tokens, tokens)
            outcome.same_transformers += same(outcome, plain, prompt, "transformers", on, made)
    return outcome


def count(outcome: Outcome, on: Report, off: Report) -> None:
    """Add a turn to the sums."""
    outcome.turns += 1
    outcome.tokens += off.completion_tokens
    outcome.steps_on += on.steps
    outcome.steps_off += off.steps
    outcome.drafted += on.drafted_total
    outcome.accepted += on.accepted_total


def same(outcome: Outcome, plain: Plain, prompt: Prompt, against: str, on: Report, other: tuple[int, ...]) -> bool:
    """Whether the tokens are the same; notes and prints the first difference."""
    mine = on.token_ids
    if mine == other:
        return True
    longest = max(len(mine), len(other))
    at = next(i for i in range(longest) if mine[i : i + 1] != other[i : i + 1])
    pair = (mine[at] if at < len(mine) else None, other[at] if at < len(other) else None)
    gap = plain.gap((*prompt.tokens, *mine[:at]))
    difference = Difference(against, prompt.trace, prompt.turn, at, pair, gap)
    outcome.differences.append(difference)
    print(f"{outcome.way}: differs from {against} in {prompt.trace}, messages[{prompt.turn}], token {at}: "
          f"{pair[0]} and {pair[1]}, the two best logits are {gap:.6f} apart", flush=True)  # fmt: skip
    return False


def show(outcomes: Sequence[Outcome]) -> None:
    """The table."""
    print(f"{'way':18} turns tokens  steps on/off  drafted accepted  same as off  same as transformers")
    for one in outcomes:
        reference = "-" if one.same_transformers is None else f"{one.same_transformers}/{one.turns}"
        print(
            f"{one.way:18} {one.turns:5d} {one.tokens:6d} {one.steps_on:6d}/{one.steps_off:<6d} {one.drafted:7d} "
            f"{one.accepted:8d} {f'{one.same_off}/{one.turns}':>12} {reference:>21}"
        )


async def measure(engine: Engine, plain: Plain, files: Sequence[Path], options: argparse.Namespace) -> list[Outcome]:
    """All comparisons that the options ask for; closes the engine."""
    try:
        wanted = prompts(engine, files, options.turns, options.prompt_tokens)
        outcomes = [await compare(engine, plain, wanted, options.tokens, "greedy", SamplingParams())]
        for seed in options.seeds:
            sampling = SamplingParams(temperature=0.7, top_p=0.95, seed=seed)
            some = wanted[: options.sampled_turns]
            outcomes.append(await compare(engine, plain, some, options.tokens, f"sampled, seed {seed}", sampling))
        return outcomes
    finally:
        await engine.close()


def run(options: argparse.Namespace) -> list[Outcome]:
    """Load both sides and compare them."""
    config = load()
    config = replace(config, model=replace(config.model, name=options.model))
    torch.set_num_threads(config.model.threads or os.cpu_count() or 1)
    folder = ensure(options.model, config.model.home)
    engine = Engine.from_folder(config, folder, Histories(CacheConfig()))
    if options.cost == "flat":
        engine.loop.cost = FixedCost()
    plain = Plain(folder, sorted(engine.end_tokens))
    return asyncio.run(measure(engine, plain, options.files or sorted(RECORDED.glob("*.jsonl")), options))


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("files", nargs="*", type=Path, help="trace files; those shipped by default")
    made.add_argument("--model", default=ModelConfig().name)
    made.add_argument("--turns", type=int, default=40, help="turns decoded greedily")
    made.add_argument("--tokens", type=int, default=64, help="most tokens of a turn")
    made.add_argument("--prompt-tokens", type=int, default=2500, help="turns with longer prompts come last")
    made.add_argument("--sampled-turns", type=int, default=12, help="turns sampled with each seed")
    made.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    made.add_argument("--cost", choices=("flat", "measured"), default="flat")
    return made


def main() -> None:
    """Compare and print."""
    options = parser().parse_args()
    start = time.perf_counter()
    outcomes = run(options)
    show(outcomes)
    seconds = round(time.perf_counter() - start, 1)
    print(json.dumps({"model": options.model, "cost": options.cost, "tokens": options.tokens, "seconds": seconds,
                      "ways": [asdict(one) for one in outcomes]}))  # fmt: skip


if __name__ == "__main__":
    main()
