"""When retrieval from a run's own answers is worth nodes, and how many: decided for each request as it goes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Credit:
    """What a step's continuations turned out to be worth."""

    hit: bool
    """One of them began with the token that came."""

    extra: int = 0
    """Tokens that were accepted because of them: beyond those that would have been accepted without."""

    ranks: tuple[int, ...] = ()
    """How many of `extra` each of them would have given alone, in order."""


NOTHING = Credit(hit=False)


class Activation(Protocol):
    """A rule that decides, step by step, how many continuations are retrieved."""

    def width(self, position: int) -> int:
        """Continuations to retrieve after `position` tokens of the history; asked at most once before `observe`."""
        ...

    def observe(self, credit: Credit, tokens: int) -> None:
        """Learn from a step that committed so many tokens, one at least; called once per step."""
        ...


@dataclass(frozen=True, slots=True)
class ActivationRule:
    """Constants of `Adaptive`; the defaults are those of the paper."""

    gate: int = 512
    """Nothing is retrieved before the history has more tokens than this."""

    least: int = 1
    most: int = 4
    """Limits of the width while retrieval is active."""

    half_life: float = 32.0
    """Tokens after which a hit counts half."""

    threshold: float = 0.05
    """Hit rate from which retrieval stays active."""

    probe_every: int = 32
    """Tokens between two positions at which retrieval is tried whatever the hit rate is."""

    marginal: bool = False
    """A step counts as a hit if it brought extra tokens, rather than if a continuation began rightly."""


class Probes:
    """Positions at which retrieval is tried in any case: the first one behind the gate that is asked about, then those
    a whole number of intervals behind the gate. One that a step jumped over is made up for at the next position."""

    def __init__(self, gate: int, every: int) -> None:
        self.gate = gate
        self.every = every
        self.next: int | None = None

    def due(self, position: int) -> bool:
        """Whether a position is to be tried; asked in ascending order."""
        if position <= self.gate or (self.next is not None and position < self.next):
            return False
        self.next = self.after(position)
        return True

    def after(self, position: int) -> int:
        """The first one of the regular positions behind a position."""
        if position <= self.gate:
            return self.gate + 1
        return position + self.every - (position - self.gate - 1) % self.every


class Adaptive:
    """Retrieval is active while a decayed average of hits is high, after a hit, and at probes; its width follows the
    average.

    Tokens that a step jumped over count as misses.
    """

    def __init__(self, rule: ActivationRule = ActivationRule()) -> None:
        self.rule = rule
        self.decay = 2.0 ** (-1.0 / rule.half_life)
        self.probes = Probes(rule.gate, rule.probe_every)
        self.rate = 0.0
        """Decayed average of hits."""

        self.hit = False
        """The last step that retrieved had a hit."""

        self.active = False
        """The step under way retrieves."""

    def width(self, position: int) -> int:
        rule, probe = self.rule, self.probes.due(position)
        self.active = position > rule.gate and (probe or self.hit or self.rate >= rule.threshold)
        if not self.active:
            return 0
        return rule.least if probe else min(max(math.ceil(rule.most * self.rate), rule.least), rule.most)

    def observe(self, credit: Credit, tokens: int) -> None:
        good = self.active and (credit.extra > 0 if self.rule.marginal else credit.hit)
        self.rate = (self.decay * self.rate + (1 - self.decay) * good) * self.decay ** (tokens - 1)
        if self.active:
            self.hit = good
        self.active = False

    def commit_limit(self, position: int) -> int:
        """Most tokens that a step at a position may commit without jumping over a regular probe."""
        return self.probes.after(position) - position


@dataclass(frozen=True, slots=True)
class CostRule:
    """Constants of `CostAware`."""

    gate: int = 512
    most: int = 4
    half_life: float = 32.0
    probe_every: int = 32
    depth: int = 4
    """Nodes of a continuation."""

    node_cost: float = 0.03
    """What a node adds to a pass, as a part of a pass without any: a step of 8 tokens takes 1.24 times one of 1."""


def best_width(tokens: float, gains: Sequence[float], cost: float) -> int:
    """How many of the first continuations make most tokens per time.

    Without any, a pass takes 1 and makes `tokens`; each takes `cost` more and makes its own gain more. This is the
    ratio that Dinkelbach's iteration converges to, found by looking at every width.
    """
    rates = [tokens]
    for width, gain in enumerate(gains, start=1):
        tokens += gain
        rates.append(tokens / (1 + width * cost))
    return rates.index(max(rates))


class CostAware:
    """As many continuations as pay for their nodes, by decayed averages of what each rank brings; probes try all."""

    def __init__(self, rule: CostRule = CostRule()) -> None:
        self.rule = rule
        self.decay = 2.0 ** (-1.0 / rule.half_life)
        self.probes = Probes(rule.gate, rule.probe_every)
        self.plain = 1.0
        """Decayed average of tokens that a step makes without continuations."""

        self.gains = [0.0] * rule.most
        """Decayed averages of what each rank adds to the ranks before it."""

        self.asked = 0

    def width(self, position: int) -> int:
        probe = self.probes.due(position)
        if position <= self.rule.gate:
            return 0
        cost = self.rule.depth * self.rule.node_cost
        self.asked = self.rule.most if probe else best_width(self.plain, self.gains, cost)
        return self.asked

    def observe(self, credit: Credit, tokens: int) -> None:
        self.plain += (1 - self.decay) * (tokens - credit.extra - self.plain)
        before = 0
        for rank in range(self.asked):
            best = max(before, credit.ranks[rank] if rank < len(credit.ranks) else 0)
            self.gains[rank] += (1 - self.decay) * (best - before - self.gains[rank])
            before = best
        self.asked = 0
