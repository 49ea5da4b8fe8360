"""How many tokens a step commits when drafts come from histories alone, without a model.

    python bench/retrieval.py --tokenizer tokenizer.json trajectories.jsonl.gz [more.jsonl ...]

The recorded answers stand in for the model: a draft node is accepted when the recorded answer goes on with it.
Each line of a file holds one trajectory with OpenAI chat `messages`. Prints tables; the last line is one JSON object.
"""

import argparse
import asyncio
import gzip
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from agentspec.cache.retrieval import Histories
from agentspec.config import CacheConfig
from agentspec.types import DraftTree, Outcome, Scope, Trajectory

BUDGETS = (8, 16, 32)
SOURCES = {"local": frozenset({"trajectory"}), "local+scope": None}
BUCKETS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1.01)


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens up to an answer, and the answer's."""

    prompt: list[int]
    answer: list[int]


@dataclass(slots=True)
class Tally:
    """What one way of drafting achieved."""

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    draft_s: float = 0.0
    observe_s: float = 0.0
    predicted: list[float] = field(default_factory=lambda: [0.0] * len(BUCKETS))
    accepted: list[int] = field(default_factory=lambda: [0] * len(BUCKETS))
    tried: list[int] = field(default_factory=lambda: [0] * len(BUCKETS))

    def judge(self, tree: DraftTree, path: Sequence[int]) -> None:
        """Compare the estimates of the nodes whose parent was accepted with what happened."""
        reached = {0, *path}
        for node in range(1, len(tree)):
            if tree.parent[node] in reached:
                chance = math.exp(tree.logp[node])
                bucket = next(at for at, limit in enumerate(BUCKETS) if chance < limit)
                self.predicted[bucket] += chance
                self.tried[bucket] += 1
                self.accepted[bucket] += node in reached


def text_of(message: dict[str, Any]) -> str:
    """A message as ChatML text, tool calls as the JSON that a model would write."""
    text = message.get("content") or ""
    if not isinstance(text, str):
        text = "".join(part.get("text", "") for part in text)
    for call in message.get("tool_calls") or ():
        function = call["function"]
        text += f'\n<tool_call>\n{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}\n</tool_call>'
    return text


def turns(messages: Sequence[dict[str, Any]], tokenizer: Any) -> Iterator[Turn]:
    """A trajectory's answers, each with everything before it."""
    tokens: list[int] = []
    for message in messages:
        head = tokenizer.encode(f"<|im_start|>{message['role']}\n", add_special_tokens=False).ids
        body = tokenizer.encode(f"{text_of(message)}<|im_end|>", add_special_tokens=False).ids
        if message["role"] == "assistant":
            yield Turn(tokens + head, body)
        tokens += head + body + tokenizer.encode("\n", add_special_tokens=False).ids


def accepted(tree: DraftTree, answer: Sequence[int]) -> list[int]:
    """The nodes that the answer runs through."""
    children = {(tree.parent[node], tree.token[node]): node for node in range(1, len(tree))}
    path, node = list[int](), 0
    for token in answer:
        child = children.get((node, token))
        if child is None:
            break
        path.append(child)
        node = child
    return path


async def simulate(runs: Sequence[Sequence[Turn]], budget: int, sources: frozenset[str] | None) -> Tally:
    """Answer every turn of every run with drafts from histories."""
    histories, tally, scope = Histories(CacheConfig()), Tally(), Scope("bench", "recorded")
    for number, run in enumerate(runs):
        for turn in run:
            session = await histories.open(Trajectory(str(number), scope), turn.prompt, sources)
            at = 0
            while at < len(turn.answer):
                start = time.perf_counter()
                tree = session.propose(budget)
                proposed = time.perf_counter()
                path = accepted(tree, turn.answer[at:])
                step = tuple(turn.answer[at : at + len(path) + 1])
                observing = time.perf_counter()
                session.observe(Outcome(step, tree, tuple(path)))
                tally.observe_s += time.perf_counter() - observing
                tally.draft_s += proposed - start
                tally.tokens += len(step)
                tally.steps += 1
                tally.drafted += len(tree) - 1
                tally.judge(tree, path)
                at += len(step)
            session.close()
            await histories.flush()
    return tally


def lookup(runs: Sequence[Sequence[Turn]], budget: int, size: int = 3) -> Tally:
    """Answer every turn with prompt lookup: what followed the last occurrence of the last three tokens."""
    tally = Tally()
    for run in runs:
        for turn in run:
            known, places = list(turn.prompt), dict[tuple[int, ...], int]()
            seen, at = size, 0
            while at < len(turn.answer):
                for end in range(seen, len(known)):
                    places[tuple(known[end - size : end])] = end
                seen = max(seen, len(known))
                start = places.get(tuple(known[-size:]))
                draft = known[start : start + budget] if start is not None else []
                agreed = 0
                for guess, token in zip(draft, turn.answer[at:], strict=False):
                    if guess != token:
                        break
                    agreed += 1
                step = turn.answer[at : at + agreed + 1]
                known += step
                at += len(step)
                tally.tokens += len(step)
                tally.steps += 1
                tally.drafted += len(draft)
    return tally


def read(path: Path, limit: int) -> list[list[dict[str, Any]]]:
    """The messages of a file's first trajectories."""
    data = path.read_bytes()
    lines = (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()
    return [json.loads(line)["messages"] for line in lines[:limit]]


def index_speed(runs: Sequence[Sequence[Turn]]) -> float:
    """Microseconds to index a token of all runs' text."""
    from agentspec.cache.index import SuffixIndex

    texts = [run[-1].prompt for run in runs if run]
    index = SuffixIndex()
    start = time.perf_counter()
    for text in texts:
        index.extend(text, index.new_document())
    return (time.perf_counter() - start) / max(index.tokens, 1) * 1e6


def show_calibration(tally: Tally) -> None:
    """Predicted and observed acceptance, by predicted acceptance."""
    print("\npredicted  observed  nodes (local+scope, 16 nodes)")
    for predicted, hits, tried in zip(tally.predicted, tally.accepted, tally.tried, strict=True):
        if tried:
            print(f"{predicted / tried:9.3f} {hits / tried:9.3f} {tried:6d}")


def main() -> None:
    """Run the simulations and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--tokenizer", required=True, type=Path, help="path of a tokenizer.json")
    parser.add_argument("--limit", type=int, default=20, help="trajectories per file")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    results: dict[str, Any] = {"limit": arguments.limit, "files": {}}
    for path in arguments.files:
        runs = [list(turns(messages, tokenizer)) for messages in read(path, arguments.limit)]
        tallies = {f"lookup/{budget}": lookup(runs, budget) for budget in BUDGETS}
        for name, sources in SOURCES.items():
            for budget in BUDGETS:
                tallies[f"{name}/{budget}"] = asyncio.run(simulate(runs, budget, sources))
        print(f"\n{path.name}: {len(runs)} trajectories, index {index_speed(runs):.2f} us/token")
        print(f"{'way/budget':16} tokens/step  nodes/step  us/draft  us/observe")
        for name, tally in tallies.items():
            steps = max(tally.steps, 1)
            print(
                f"{name:16} {tally.tokens / steps:11.3f} {tally.drafted / steps:11.2f} "
                f"{tally.draft_s / steps * 1e6:9.1f} {tally.observe_s / steps * 1e6:11.1f}"
            )
        show_calibration(tallies["local+scope/16"])
        results["files"][path.name] = {name: asdict(tally) for name, tally in tallies.items()}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
