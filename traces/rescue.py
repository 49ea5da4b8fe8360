"""What continuations add to another drafter's chain, judged on recorded answers: many rules walk the same runs.

The chain at a position, and what each text would say there, do not depend on how the position was reached. They are
found once, token by token; a rule's walk then only chooses among them. Only steps behind the gate of the run's own
answers are counted, where any rule may retrieve.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agentspec.cache.activation import NOTHING, Activation, Credit
from agentspec.cache.automaton import Int32s, Int64s
from agentspec.compiled import compiled
from agentspec.traces.controls import Text
from agentspec.traces.simulate import LOOKUP, Recording, looked_up

DEPTH = 4
"""Tokens of the chain and of a continuation."""

WIDTH = 4
"""Continuations that are prepared at each position."""

OWN = "own"
"""Name of the text of the run's own answers."""

NONE = -1
"""Stands where a chain or a continuation has no token."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A turn, position by position."""

    answer: Int32s
    chains: Int32s
    """int32[positions, DEPTH]."""

    alone: Sequence[int]
    """Tokens of the chain that are accepted, by position."""

    continuations: Mapping[str, Int32s]
    """By text: int32[positions, WIDTH, DEPTH]."""

    starts: Mapping[str, int]
    """By text: its tokens when the turn began."""


Chains = Callable[[Int32s, Int32s], Int32s]
"""From a prompt and an answer what a drafter would propose at each position: int32[positions, DEPTH]."""


def no_chains(prompt: Int32s, answer: Int32s) -> Int32s:
    """Those of no drafter."""
    return np.full((answer.size, DEPTH), NONE, np.int32)


def lookup_chains(prompt: Int32s, answer: Int32s) -> Int32s:
    """Those of prompt lookup."""
    known, chains = np.concatenate((prompt, answer)), no_chains(prompt, answer)
    for at in range(answer.size):
        size = prompt.size + at
        place = looked_up(known[:size], LOOKUP)
        if place >= 0:
            copied = known[place : min(place + DEPTH, size)]
            chains[at, : copied.size] = copied
    return chains


def greedy_chains(choices: Int32s, answer: Int32s) -> Int32s:
    """Those of a model that would choose these tokens in the place of the answer's, each after the answer before it:
    right up to the first wrong token, behind which no token can be accepted and none is known."""
    chains = no_chains(answer, answer)
    for at in range(answer.size):
        size = agrees(choices[at : at + DEPTH], answer, at) + 1
        known = choices[at : min(at + size, at + DEPTH)]
        chains[at, : known.size] = known
    return chains


def prepared(
    recording: Recording, texts: Mapping[str, Text], with_prompts: frozenset[str], gate: int, drafter: Chains
) -> Iterator[Prepared]:
    """The turns of a run. Texts are asked behind the gate; those of `with_prompts` are told what is new of a prompt."""
    for turn, (prompt, answer) in zip(recording.turns, recording.prompts(), strict=True):
        for name in with_prompts:
            texts[name].extend(turn.prompt)
        starts = {name: len(text) for name, text in texts.items()}
        chains = drafter(prompt, answer)
        found = {name: np.full((answer.size, WIDTH, DEPTH), NONE, np.int32) for name in texts}
        for at in range(answer.size):
            token = answer[at : at + 1].copy()
            for name, text in texts.items():
                paths = text.continuations(WIDTH) if len(text) > gate else []
                for rank, path in enumerate(paths):
                    found[name][at, rank, : len(path)] = path
                text.extend(token)
        alone = [agrees(chains[at], answer, at) for at in range(answer.size)]
        yield Prepared(answer, chains, alone, found, starts)


@compiled
def agrees(path: Int32s, answer: Int32s, at: int) -> int:
    """How many tokens of a path the answer goes on with."""
    depth = 0
    while depth < path.shape[0] and at + depth < answer.shape[0] and path[depth] == answer[at + depth]:
        depth += 1
    return depth


@compiled
def shared(first: Int32s, second: Int32s) -> int:
    """Length of the common beginning of two paths, as far as they have tokens."""
    depth = 0
    while depth < first.shape[0] and first[depth] >= 0 and first[depth] == second[depth]:
        depth += 1
    return depth


@compiled
def judged(
    chain: Int32s, alone: int, paths: Int32s, answer: Int32s, at: int, width: int, cap: int, ranks: Int32s
) -> tuple[int, bool]:
    """A step at a position whose tree is the chain, of which `alone` tokens are accepted, and at most `cap` further
    nodes of the first `width` paths: how many nodes were added, and whether a path in the tree began rightly. Sets how
    many more tokens each path would give."""
    nodes, hit = 0, False
    kept = np.zeros(WIDTH, np.int32)
    for rank in range(width):
        known = shared(paths[rank], chain)
        for other in range(rank):
            known = max(known, min(shared(paths[rank], paths[other]), kept[other]))
        size = 0
        while size < paths.shape[1] and paths[rank, size] >= 0:
            size += 1
        kept[rank] = min(size, known + cap - nodes)
        nodes += kept[rank] - known
        right = min(agrees(paths[rank], answer, at), kept[rank])
        hit = hit or right > 0
        ranks[rank] = max(right - alone, 0)
    return nodes, hit


@dataclass(slots=True)
class Steps:
    """What a rule achieved on one run, in steps behind the gate."""

    tokens: int = 0
    steps: int = 0
    nodes: int = 0
    """Added to chains."""

    extra: int = 0
    """Tokens accepted because of them."""

    misses: int = 0
    """Steps whose chain was not accepted to its full depth, though the answer was long enough."""

    rescues: int = 0
    """Those of them with extra tokens."""

    active: int = 0
    """Steps that asked for continuations."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A way of retrieving."""

    rule: Callable[[], Activation]
    """A new rule, for a request."""

    cap: float
    """Most nodes of a step; between two whole numbers, one or the other, so often that this is the mean."""

    text: str = OWN
    lasting: bool = False
    """One rule for all requests of a run."""


def walk(turns: Sequence[Prepared], arm: Arm, gate: int, widths: Int64s | None = None) -> Steps:
    """Commit the answers of a run step by step; `widths` counts how often each width was asked for."""
    total, ranks, rule, owed = Steps(), np.zeros(WIDTH, np.int32), arm.rule(), 0.0
    for number, turn in enumerate(turns):
        rule = rule if arm.lasting or number == 0 else arm.rule()
        start, paths, at = turn.starts[arm.text], turn.continuations[arm.text], 0
        while at < turn.answer.size:
            width, alone, left = rule.width(start + at), turn.alone[at], turn.answer.size - at
            nodes, credit = 0, NOTHING
            if width:
                owed += arm.cap % 1
                cap, owed = int(arm.cap) + int(owed), owed % 1
                nodes, hit = judged(turn.chains[at], alone, paths[at], turn.answer, at, width, cap, ranks)
                gained = tuple(ranks[:width].tolist())
                credit = Credit(hit, max(gained), gained)
            committed = min(alone + credit.extra + 1, left)
            rule.observe(credit, committed)
            if turn.starts[OWN] + at > gate:
                total.steps += 1
                total.tokens += committed
                total.nodes += nodes
                total.extra += credit.extra
                total.misses += alone < min(DEPTH, left)
                total.rescues += credit.extra > 0
                total.active += width > 0
                if widths is not None:
                    widths[width] += 1
            at += committed
    return total
