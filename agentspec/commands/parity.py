"""`agentspec parity`: check on recorded turns that speculation changes nothing."""

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentspec.commands.engine import loaded_engine
from agentspec.commands.numbers import NumberIn, natural, positive, whole
from agentspec.commands.replay import RECORDED, recorded_files
from agentspec.commands.settings import add_settings, chosen_config
from agentspec.config import CacheConfig, Config
from agentspec.errors import TraceError
from agentspec.types import SamplingParams

if TYPE_CHECKING:
    from agentspec.engine.parity import Comparison, RecordedTurn
    from agentspec.engine.service import Engine
    from agentspec.traces.schema import Trace

ABOUT = """Generates recorded turns without speculation, one by one, and with it, in batches; compares the tokens
and the bits of all logits they were chosen from. Every draft is verified whatever it costs, so that as many as
possible are put to the test. Shows where two generations part first, and how far the two best logits are apart there.
Ends with a verdict; the exit code is 1 when a token differs."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser("parity", help="check that speculation changes nothing", description=ABOUT)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help=f"trace files (default {RECORDED}/*.jsonl)")
    add_settings(parser, "model.name", "model.home", "model.dtype", "engine.device", "model.threads")
    parser.add_argument("--turns", type=positive, default=40, metavar="N", help="turns decoded greedily (default 40)")
    parser.add_argument(
        "--sampled-turns", type=natural, default=12, metavar="N", help="turns sampled with each seed (default 12)"
    )
    parser.add_argument("--max-tokens", type=positive, default=64, metavar="N", help="tokens of a turn (default 64)")
    parser.add_argument(
        "--max-prompt-tokens", type=positive, default=2500, metavar="N",
        help="turns with longer prompts come last (default 2500)",
    )  # fmt: skip
    parser.add_argument(
        "--at-once", type=positive, nargs="+", default=[1, 3], metavar="N",
        help="requests generated at the same time with speculation, one comparison each (default 1 3)",
    )  # fmt: skip
    parser.add_argument("--seeds", type=whole, nargs="*", default=[1, 2, 3], metavar="N", help="seeds (default 1 2 3)")
    parser.add_argument(
        "--temperature", type=NumberIn(0, 2), default=0.7, metavar="N", help="of sampling (default 0.7)"
    )
    parser.add_argument(
        "--top-p", type=NumberIn(0, 1, above=True), default=0.95, metavar="N", help="of sampling (default 0.95)"
    )
    parser.add_argument(
        "--transformers", action="store_true", help="compare greedy tokens with transformers' own generation too"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.set_defaults(run=run_parity)


def run_parity(arguments: argparse.Namespace) -> int:
    """Compares, prints, and returns the exit code."""
    config = chosen_config(arguments)
    most = max(arguments.at_once)
    config = replace(
        config,
        cache=CacheConfig(),
        engine=replace(config.engine, max_running=max(config.engine.max_running, most)),
    )
    from agentspec.commands.display import turn_progress
    from agentspec.traces.files import read_traces

    traces = list(read_traces(arguments.files or recorded_files()))
    engine = loaded_engine(config)
    with turn_progress() as progress:
        comparisons = asyncio.run(compared(engine, config, traces, arguments, progress))
    print_parity(comparisons, arguments.json, Path(config.model.name).name)
    return 0 if all(comparison.holds for comparison in comparisons) else 1


async def compared(
    engine: "Engine", config: Config, traces: "Sequence[Trace]", arguments: argparse.Namespace, progress: Any
) -> "Sequence[Comparison]":
    """All comparisons that the arguments ask for; closes the engine."""
    from agentspec.engine.models import ensure
    from agentspec.engine.parity import Parity, Transformers, Way
    from agentspec.policies.cost import FixedCost

    try:
        engine.loop.cost = FixedCost()
        turns = recorded_turns(engine, traces, arguments)
        reference = None
        if arguments.transformers:
            reference = Transformers(ensure(config.model.name, config.model.home), engine.end_tokens)
        ways = [Way("greedy", SamplingParams(), arguments.turns)]
        for seed in arguments.seeds:
            sampling = SamplingParams(temperature=arguments.temperature, top_p=arguments.top_p, seed=seed)
            ways.append(Way(f"sampled, seed {seed}", sampling, arguments.sampled_turns))
        parity = Parity(engine, arguments.max_tokens, arguments.at_once, reference, progress)
        return await parity.compare(turns, [way for way in ways if way.turns])
    finally:
        await engine.close()


def recorded_turns(engine: "Engine", traces: "Sequence[Trace]", arguments: argparse.Namespace) -> "list[RecordedTurn]":
    """The recorded turns in the order of the files, those with short prompts before the others."""
    from agentspec.engine.parity import RecordedTurn
    from agentspec.server.convert import fold_system

    found = []
    for trace in traces:
        for turn in trace.turns():
            tokens = engine.render(fold_system(list(turn.prompt)), trace.tools)
            if len(tokens) < engine.window - 1:
                found.append(RecordedTurn(trace.id, turn.index, tokens))
    if not found:
        raise TraceError("the files hold no turn that fits the model's window")
    found.sort(key=lambda turn: len(turn.prompt) > arguments.max_prompt_tokens)
    return found[: max(arguments.turns, arguments.sampled_turns)]


def verdict(comparisons: "Sequence[Comparison]") -> str:
    """One sentence."""
    turns = sum(comparison.turns for comparison in comparisons)
    same = sum(comparison.identical_turns for comparison in comparisons)
    bits = sum(comparison.identical_logits_turns for comparison in comparisons)
    if not all(comparison.holds for comparison in comparisons):
        return f"NOT identical: tokens differ in {turns - same} of {turns} turns with speculation, or from transformers"
    if bits < turns:
        return f"identical tokens in {turns} of {turns} turns; logits differ in their last bits in {turns - bits}"
    return f"identical: the same tokens, from the same bits of every logit, in {turns} of {turns} turns"


def print_parity(comparisons: "Sequence[Comparison]", as_json: bool, model: str) -> None:
    """One JSON object, or a table for people."""
    if as_json:
        ways = [asdict(comparison) for comparison in comparisons]
        print(json.dumps({"model": model, "verdict": verdict(comparisons), "comparisons": ways}))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console = console if console.is_terminal else Console(width=160)
    table = Table(title=f"{model}: with speculation against without")
    for column in ("way", "at once", "turns", "tokens", "steps on / off", "drafted", "accepted", "same tokens"):
        table.add_column(column, justify="left" if column == "way" else "right")
    table.add_column("same bits", justify="right")
    table.add_column("as transformers", justify="right")
    for one in comparisons:
        theirs = "-" if one.identical_to_transformers is None else f"{one.identical_to_transformers}/{one.turns}"
        table.add_row(
            one.way, str(one.at_once), str(one.turns), str(one.tokens), f"{one.steps_on} / {one.steps_off}",
            str(one.drafted), str(one.accepted), f"{one.identical_turns}/{one.turns}",
            f"{one.identical_logits_turns}/{one.turns}", theirs,
        )  # fmt: skip
    console.print(table)
    for one in comparisons:
        for difference in one.differences:
            what = (
                "other logits"
                if difference.tokens[0] == difference.tokens[1]
                else "tokens {} and {}".format(*difference.tokens)
            )
            console.print(
                f"{one.way}, {one.at_once} at once, against {difference.against}: {difference.trace}, "
                f"messages[{difference.turn}], token {difference.position}: {what}; "
                f"the two best logits are {difference.gap:.6f} apart",
                soft_wrap=True,
                highlight=False,
            )
    console.print(verdict(comparisons), soft_wrap=True, highlight=False)
