"""Drafts judged without a model: the recorded answer of a turn stands in for what a model would write.

A draft node is accepted when the recorded answer goes on with it, so tokens per target step are those of a model that
answers as the recorded one did, greedily. What drafts is shown nothing but what was committed: the prompt, and of the
answer the tokens before the position where it is asked. Whatever way they were reached, the draft at a position is the
same, so one walk along the answer serves every budget.
"""

import asyncio
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from agentspec.cache.automaton import Int32s
from agentspec.cache.index import SuffixIndex
from agentspec.cache.retrieval import Histories
from agentspec.cache.scaffold import ScaffoldGuide, indexed
from agentspec.cache.session import HistorySession
from agentspec.compiled import compiled
from agentspec.config import CacheConfig
from agentspec.traces.messages import Message
from agentspec.traces.schema import Trace, Turn
from agentspec.traces.stepwise import Stepwise
from agentspec.types import DraftTree, Outcome, Scope, Trajectory

BUDGETS = (8, 16, 32, 64)
"""Draft nodes in one step, the root not counted."""

LOOKUP = 3
"""Prompt lookup matches so many tokens, or else fewer."""

Nodes = tuple[Sequence[int], Sequence[int]]
"""Tokens and parents of a tree, the root first, each parent before its children."""

BARE: Nodes = ((0,), (-1,))
Encode = Callable[[Turn], tuple[Sequence[int], Sequence[int]]]
"""Token ids of a turn's prompt and of its recorded answer."""


@dataclass(frozen=True, slots=True)
class Written:
    """A turn in tokens."""

    kept: int
    """Tokens that its prompt shares with the prompt before it."""

    prompt: Int32s
    """The others."""

    answer: Int32s
    """To the end of the turn."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A trace in tokens."""

    id: str
    source: str
    domain: str
    group: str
    """Task or session, the id where that is not known."""

    turns: tuple[Written, ...]
    scaffold: tuple[Int32s, ...] = ()
    """Documents of what its tools fix of an answer, see `cache.scaffold`."""

    def prompts(self) -> Iterator[tuple[Int32s, Int32s]]:
        """Whole prompts and answers."""
        prompt = np.empty(0, np.int32)
        for turn in self.turns:
            prompt = np.concatenate((prompt[: turn.kept], turn.prompt))
            yield prompt, turn.answer


def recording_of(
    trace: Trace, encode: Encode, most: int | None = None, scaffold: Callable[[Trace], Sequence[Int32s]] = lambda _: ()
) -> Recording:
    """A trace in tokens, at most its first `most` turns, with its scaffold."""
    turns, before = list[Written](), np.empty(0, np.int32)
    for turn in list(trace.turns())[:most]:
        prompt, answer = (np.array(ids, np.int32) for ids in encode(turn))
        size = min(prompt.size, before.size)
        different = np.flatnonzero(prompt[:size] != before[:size])
        kept = int(different[0]) if different.size else size
        turns.append(Written(kept, prompt[kept:].copy(), answer))
        before = prompt
    documents = tuple(scaffold(trace))
    return Recording(trace.id, trace.source, trace.domain, trace.group or trace.id, tuple(turns), documents)


def with_reasoning(message: Message) -> Message:
    """A recorded answer with its reasoning where a model writes it, before the text."""
    reasoning = message.get("reasoning_content")
    if not reasoning:
        return message
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    return {**rest, "content": f"<think>\n{reasoning}\n</think>\n\n{message.get('content') or ''}"}


class Drafting(Protocol):
    """A way of drafting."""

    nested: bool
    """The tree for a smaller budget is the beginning of that for a larger one."""

    def open(self, recording: Recording, prompt: Int32s) -> None:
        """A turn begins, of the run before or of another one."""

    def propose(self, budget: int) -> Nodes:
        """A tree of at most `budget` nodes beside the root after what was committed."""

    def observe(self, tokens: Int32s) -> None:
        """More was committed."""

    def close(self) -> None:
        """The turn ended."""


class Nothing:
    """Drafts nothing."""

    nested = True

    def open(self, recording: Recording, prompt: Int32s) -> None: ...

    def propose(self, budget: int) -> Nodes:
        return BARE

    def observe(self, tokens: Int32s) -> None: ...

    def close(self) -> None: ...


@compiled
def looked_up(known: Int32s, most: int) -> int:
    """Where the last tokens, `most` or else fewer, stood last before, and what followed them begins; -1 for nowhere."""
    best, place, size = 0, -1, known.shape[0]
    for end in range(size - 1, 0, -1):
        length = 0
        while length < min(most, end) and known[end - 1 - length] == known[size - 1 - length]:
            length += 1
        if length > best:
            best, place = length, end
            if best == most:
                break
    return place


class PromptLookup:
    """Copies what followed the last occurrence of the last three tokens, or of the last two, or of the last one."""

    nested = True

    def __init__(self) -> None:
        self.known = np.empty(0, np.int32)
        self.size = 0

    def open(self, recording: Recording, prompt: Int32s) -> None:
        self.known = np.concatenate((prompt, np.zeros(1024, np.int32)))
        self.size = prompt.size

    def propose(self, budget: int) -> Nodes:
        place = looked_up(self.known[: self.size], LOOKUP)
        if place < 0:
            return BARE
        copied = self.known[place : min(place + budget, self.size)].tolist()
        return (0, *copied), tuple(range(-1, len(copied)))

    def observe(self, tokens: Int32s) -> None:
        if self.size + tokens.size > self.known.size:
            self.known = np.concatenate((self.known[: self.size], np.zeros(self.size + tokens.size, np.int32)))
        self.known[self.size : self.size + tokens.size] = tokens
        self.size += tokens.size

    def close(self) -> None: ...


class Retrieval:
    """The histories that serve drafts from; `sources` as in a request. All runs of a file are one scope."""

    nested = True

    def __init__(self, config: CacheConfig, sources: frozenset[str] | None) -> None:
        self.sources = sources
        self.histories = Histories(config)
        self.loop = asyncio.new_event_loop()
        weakref.finalize(self, self.loop.close)
        self.session: HistorySession | None = None

    @property
    def current(self) -> HistorySession:
        """The open turn's."""
        assert self.session is not None
        return self.session

    def open(self, recording: Recording, prompt: Int32s) -> None:
        trajectory = Trajectory(recording.id, Scope("simulation", recording.source))
        self.session = self.loop.run_until_complete(self.histories.open(trajectory, prompt, self.sources))  # type: ignore[arg-type]

    def propose(self, budget: int) -> Nodes:
        tree = self.current.propose(budget)
        return tree.token, tree.parent

    def observe(self, tokens: Int32s) -> None:
        self.current.observe(Outcome(tuple(tokens.tolist()), DraftTree.root(0), ()))

    def close(self) -> None:
        self.current.close()
        self.loop.run_until_complete(self.histories.flush())


class Scaffolded(Retrieval):
    """The histories with what the tools of a run fix of its answers."""

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config, None)
        self.scaffold = "", SuffixIndex()
        """Of the run with an id."""

    def open(self, recording: Recording, prompt: Int32s) -> None:
        super().open(recording, prompt)
        if self.scaffold[0] != recording.id:
            self.scaffold = recording.id, indexed(recording.scaffold)
        index = self.scaffold[1]
        self.current.guides.append(ScaffoldGuide(lambda: index, prompt))


ARMS: Mapping[str, Callable[[CacheConfig], Drafting]] = {
    "none": lambda _: Nothing(),
    "lookup": lambda _: PromptLookup(),
    "local": lambda config: Retrieval(config, frozenset({"trajectory"})),
    "hybrid": lambda config: Retrieval(config, None),
    "scaffold": Scaffolded,
    "tlar": lambda config: Stepwise(lambda: Retrieval(config, frozenset({"tlar"}))),
}
"""What a simulation compares, by name."""


@dataclass(slots=True)
class Tally:
    """What a way of drafting achieved on one run with one budget."""

    steps: int = 0
    drafted: int = 0
    """Nodes, the roots not counted."""


@dataclass(slots=True)
class Simulated:
    """One run: tallies by arm and budget."""

    id: str
    source: str
    domain: str
    group: str
    tokens: int = 0
    """Of its answers."""

    tallies: dict[str, dict[int, Tally]] = field(default_factory=dict)


def accepted(nodes: Nodes, answer: Sequence[int]) -> list[int]:
    """The nodes that the answer runs through, from the root's child on."""
    tokens, parents = nodes
    path, last = list[int](), 0
    for node in range(1, len(tokens)):
        if len(path) == len(answer):
            break
        if parents[node] == last and tokens[node] == answer[len(path)]:
            path.append(node)
            last = node
    return path


def simulate_turn(drafting: Drafting, answer: Int32s, tallies: Mapping[int, Tally]) -> None:
    """Commit an answer step by step with every budget, and count. The turn is open."""
    at = dict.fromkeys(tallies, 0)
    rest, now = answer.tolist(), 0
    while now < answer.size:
        due = sorted((budget for budget in tallies if at[budget] == now), reverse=True)
        nodes = BARE
        for budget in due:
            if budget == due[0] or not drafting.nested:
                nodes = drafting.propose(budget)
            path = accepted(nodes, rest[now:])
            at[budget] = now + 1 + sum(node <= budget for node in path)
            tallies[budget].steps += 1
            tallies[budget].drafted += min(budget, len(nodes[0]) - 1)
        committed = min(min(at.values()), answer.size)
        drafting.observe(answer[now:committed].copy())
        now = committed


def simulate(
    recordings: Iterable[Recording],
    arms: Mapping[str, Drafting],
    budgets: Sequence[int] = BUDGETS,
    progress: Callable[[int], Any] = lambda turns: None,
) -> list[Simulated]:
    """Runs one after the other: each arm may know the earlier ones. `progress` is told how many turns are done."""
    runs, done = list[Simulated](), 0
    for recording in recordings:
        run = Simulated(recording.id, recording.source, recording.domain, recording.group)
        run.tallies = {name: {budget: Tally() for budget in budgets} for name in arms}
        runs.append(run)
        for prompt, answer in recording.prompts():
            for name, drafting in arms.items():
                drafting.open(recording, prompt.copy())
                simulate_turn(drafting, answer, run.tallies[name])
                drafting.close()
            run.tokens += answer.size
            done += 1
            progress(done)
    return runs
