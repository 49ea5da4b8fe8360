"""Retrieval of drafts beside Arctic Inference's suffix decoding: speed, memory, and tokens per step without a model.

    PYTHONPATH=.:FOLDER python -m bench.arctic speed trajectories.jsonl.gz [more ...]
    PYTHONPATH=.:FOLDER python -m bench.arctic steps trajectories.jsonl.gz [more ...] --json FILE
    python -m bench.arctic merge FILE [more ...]

FOLDER holds `arctic_inference`; of its build only the suffix decoding is needed. Both sides see the same tokens in one
process, one after the other. `steps` writes counts of every run, `merge` makes the tables of several such files: those
of runs whose task's hash is odd, the half on which no constant was fitted.
"""

import argparse
import asyncio
import gc
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from agentspec.cache.automaton import Int32s
from agentspec.cache.draft import compile_kernels
from agentspec.cache.index import SuffixIndex
from agentspec.cache.retrieval import Histories
from agentspec.commands.simulate import encoder, scaffolder, tokenizer_of
from agentspec.config import CacheConfig, Config, ModelConfig
from agentspec.traces.files import read_traces
from agentspec.traces.gain import counts, interval, redraws
from agentspec.traces.simulate import (
    ARMS,
    BARE,
    BUDGETS,
    Drafting,
    Nodes,
    Recording,
    Simulated,
    Tally,
    recording_of,
    simulate,
)
from agentspec.types import DraftTree, Outcome, Scope, Trajectory

DEPTH = 64
HISTORY = 100_000
"""Tokens of the history that drafts are timed on."""

DRAFTS = 3000


def arctic_cache(**options: Any) -> Any:
    """An empty cache of Arctic's."""
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    return SuffixDecodingCache(max_tree_depth=DEPTH, **options)


class Arctic:
    """Arctic's suffix decoding in tree mode, as its serving code calls it: a tree over the request's prompt and output,
    and one over all outputs."""

    nested = False

    def __init__(self, factor: float, least: float, *, outputs: bool = True) -> None:
        self.cache = arctic_cache(max_cached_requests=-1 if outputs else 0)
        self.factor = factor
        self.least = least
        self.requests = 0
        self.context = np.empty(0, np.int32)

    def open(self, recording: Recording, prompt: Int32s) -> None:
        self.cache.start_request(self.requests, prompt)
        self.context = prompt[-DEPTH:]

    def propose(self, budget: int) -> Nodes:
        draft = self.cache.speculate(
            self.requests,
            self.context,
            max_spec_tokens=budget,
            max_spec_factor=self.factor,
            min_token_prob=self.least,
            use_tree_spec=True,
        )
        return ((0, *draft.token_ids), (-1, *[parent + 1 for parent in draft.parents])) if draft.token_ids else BARE

    def observe(self, tokens: Int32s) -> None:
        self.cache.add_active_response(self.requests, tokens)
        self.context = np.concatenate((self.context, tokens))[-DEPTH:]

    def close(self) -> None:
        self.cache.stop_request(self.requests)
        self.requests += 1


def arms_of(names: Sequence[str]) -> dict[str, Drafting]:
    """Ours by name; Arctic's as `arctic:FACTOR:LEAST`, without earlier outputs as `arctic-local:FACTOR:LEAST`."""
    arms: dict[str, Drafting] = {}
    for name in names:
        kind, _, rest = name.partition(":")
        if kind in ARMS:
            arms[name] = ARMS[kind](CacheConfig())
        else:
            factor, least = rest.split(":")
            arms[name] = Arctic(float(factor), float(least), outputs=kind == "arctic")
    return arms


def recordings(
    files: Sequence[Path], model: str, limit: int | None, most: int | None = None, turns: int | None = None
) -> Iterable[Recording]:
    """The first runs of each file, in tokens, at most their first `turns` turns, until their answers have `most`."""
    chat = tokenizer_of(Config(model=ModelConfig(name=model)))
    encode, scaffold = encoder(chat), scaffolder(chat, CacheConfig().scaffold_tokens)
    for file in files:
        answered = 0
        for trace in list(read_traces([file]))[:limit]:
            if most is not None and answered >= most:
                break
            recording = recording_of(trace, encode, turns, scaffold)
            answered += sum(turn.answer.size for turn in recording.turns)
            yield recording


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def indexed(texts: Sequence[Int32s], build: Callable[[Sequence[Int32s]], Any]) -> tuple[float, float]:
    """Microseconds and bytes of resident memory that a token takes."""
    tokens = sum(text.size for text in texts)
    before, start = resident(), time.perf_counter()
    kept = build(texts)
    seconds = time.perf_counter() - start
    size = resident() - before
    del kept
    return seconds / tokens * 1e6, size / tokens


def arctic_trees(texts: Sequence[Int32s], *, together: bool) -> Any:
    """Arctic's trees: one for all texts or one for each."""
    from arctic_inference.suffix_decoding._C import SuffixTree

    trees = [SuffixTree(DEPTH) for _ in texts[: 1 if together else None]]
    for number, text in enumerate(texts):
        trees[0 if together else number].extend_ndarray(number if together else 0, text)
    return trees


def our_indexes(texts: Sequence[Int32s], *, together: bool) -> Any:
    """Our indexes: one for all texts or one for each."""
    indexes = [SuffixIndex() for _ in texts[: 1 if together else None]]
    for number, text in enumerate(texts):
        index = indexes[0 if together else number]
        index.extend(text, index.new_document() if together else -1)
    return indexes


def arctic_drafts(history: Int32s, following: Int32s, earlier: Sequence[Int32s]) -> list[float]:
    """Seconds of each draft of 32 nodes while `following` is written."""
    drafting = Arctic(4.0, 0.1)
    for text in earlier:
        drafting.open(None, text[:1])  # type: ignore[arg-type]
        drafting.observe(text[1:])
        drafting.close()
    drafting.open(None, history)  # type: ignore[arg-type]
    return timed(lambda: drafting.propose(32), drafting.observe, following)


def our_drafts(history: Int32s, following: Int32s, earlier: Sequence[Int32s]) -> list[float]:
    """The same with a session as the engine has it."""
    histories, scope, loop = Histories(CacheConfig()), Scope("bench", "arctic"), asyncio.new_event_loop()
    for number, text in enumerate(earlier):
        loop.run_until_complete(histories.open(Trajectory(f"earlier{number}", scope), text.tolist())).close()
        loop.run_until_complete(histories.flush())
    session = loop.run_until_complete(histories.open(Trajectory("now", scope), history.tolist()))
    observe = lambda tokens: session.observe(Outcome(tuple(tokens.tolist()), DraftTree.root(0), ()))  # noqa: E731
    return timed(lambda: session.propose(32), observe, following)


def timed(propose: Callable[[], object], observe: Callable[[Int32s], None], following: Int32s) -> list[float]:
    """Seconds of each proposal."""
    seconds = []
    for at in range(following.size):
        start = time.perf_counter()
        propose()
        seconds.append(time.perf_counter() - start)
        observe(following[at : at + 1].copy())
    return seconds


def speed(arguments: argparse.Namespace) -> None:
    """Print microseconds and bytes per token, and microseconds per draft."""
    chosen = list(recordings(arguments.files, arguments.model, arguments.limit))
    conversations = [np.concatenate(list(recording.prompts())[-1]) for recording in chosen if recording.turns]
    outputs = [turn.answer for recording in chosen for turn in recording.turns]
    compile_kernels()
    print(
        f"{sum(text.size for text in conversations):,} tokens of conversations, each in a tree of its own (prompt tree)"
    )
    print(f"{sum(text.size for text in outputs):,} tokens of outputs in one tree (global tree)")
    for name, texts, together in (("prompt", conversations, False), ("global", outputs, True)):
        for side, build in (("arctic", arctic_trees), ("agentspec", our_indexes)):
            micros, size = indexed(texts, lambda texts, b=build, t=together: b(texts, together=t))  # type: ignore[misc]
            print(f"{name:8} {side:10} {micros:6.2f} us/token {size:6.0f} bytes/token")
    whole = np.concatenate(conversations)
    history, following = whole[:HISTORY], whole[HISTORY : HISTORY + DRAFTS]
    earlier = outputs[-2000:] if arguments.outputs else []
    for side, measure in (("arctic", arctic_drafts), ("agentspec", our_drafts)):
        seconds = measure(history, following, earlier)
        middle, high = np.percentile(seconds, (50, 99)) * 1e6
        print(f"draft of 32 nodes, {history.size:,} tokens: {side:10} median {middle:6.1f} us, 99th {high:6.1f} us")


def steps(arguments: argparse.Namespace) -> None:
    """Simulate, and write the counts of every run."""
    runs = list[Simulated]()
    for file in arguments.files:
        start = time.perf_counter()
        chosen = recordings([file], arguments.model, arguments.limit, arguments.tokens, arguments.turns)
        runs += simulate(chosen, arms_of(arguments.arms))
        print(f"{file.name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(run) for run in runs]))
    tables(runs if arguments.everything else reported(runs))


def merge(arguments: argparse.Namespace) -> None:
    """Print the tables of files that `steps` wrote."""
    runs: dict[str, Simulated] = {}
    for file in arguments.files:
        for row in json.loads(file.read_text()):
            tallies = {
                arm: {int(budget): Tally(**tally) for budget, tally in budgets.items()}
                for arm, budgets in row.pop("tallies").items()
            }
            runs.setdefault(row["id"], Simulated(**row)).tallies.update(tallies)
    tables(list(runs.values()) if arguments.everything else reported(list(runs.values())))


def reported(runs: Sequence[Simulated]) -> list[Simulated]:
    """The half that nothing was fitted on."""
    return [run for run in runs if not for_fitting(run.group)]


def for_fitting(group: str) -> bool:
    """Whether constants may be fitted on the runs of a task."""
    return hashlib.sha256(group.encode()).digest()[0] % 2 == 0


def tables(runs: Sequence[Simulated]) -> None:
    """Tokens per step by source and domain, and ours over Arctic's best setting."""
    runs = [run for run in runs if run.tokens]
    if not runs:
        print("no answers of runs whose task's hash is odd; take more of them, or --everything")
        return
    arms = list(runs[0].tallies)
    arctic = [arm for arm in arms if arm.startswith("arctic:")]
    for budget in BUDGETS:
        print(f"\n{budget} nodes")
        print(" ".join([f"{'':22}{'runs':>6}{'tokens':>10}", *(f"{arm:>12.12}" for arm in arms), "hybrid / arctic"]))
        ratios = []
        for kind in ("source", "domain"):
            for name in sorted({getattr(run, kind) for run in runs}):
                ratio = line(name, [run for run in runs if getattr(run, kind) == name], arms, arctic, budget)
                if kind == "source" and ratio:
                    ratios.append(ratio)
        line("all", runs, arms, arctic, budget)
        if ratios:
            print(f"mean ratio of the {len(ratios)} sources {np.mean(ratios):.3f}, least {min(ratios):.3f}")


def line(name: str, runs: Sequence[Simulated], arms: Sequence[str], arctic: Sequence[str], budget: int) -> float | None:
    """Print a row; the ratio of hybrid to Arctic's best setting."""
    drawn = redraws(len(runs))
    pairs = {arm: counts(runs, arm, budget) for arm in arms}
    rates = {arm: float(pair[:, 0].sum() / pair[:, 1].sum()) for arm, pair in pairs.items()}
    text = [f"{name:22}{len(runs):6}{sum(run.tokens for run in runs):10,}", *(f"{rates[arm]:12.3f}" for arm in arms)]
    ratio = None
    if arctic and "hybrid" in arms:
        best = max(arctic, key=lambda arm: rates[arm])
        ratio = rates["hybrid"] / rates[best]
        low, high = interval((drawn @ pairs[best])[:, 1] / (drawn @ pairs["hybrid"])[:, 1])
        text.append(f"{ratio:.3f} ({low:.3f} to {high:.3f})")
    print(" ".join(text), flush=True)
    return ratio


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("speed", "steps", "merge"))
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer and template")
    parser.add_argument("--limit", type=int, help="runs of each file")
    parser.add_argument("--turns", type=int, help="of each run, for `steps`")
    parser.add_argument("--tokens", type=int, help="no further run of a file once its answers have so many tokens")
    parser.add_argument("--arms", nargs="+", default=["lookup", "local", "hybrid", "arctic:4:0.1"])
    parser.add_argument("--outputs", action="store_true", help="time drafts beside a tree over earlier outputs")
    parser.add_argument("--everything", action="store_true", help="tables of all runs")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    {"speed": speed, "steps": steps, "merge": merge}[arguments.action](arguments)


if __name__ == "__main__":
    main()
