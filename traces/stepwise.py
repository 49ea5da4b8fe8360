"""Drafters whose drafts depend on the steps that tokens came in, side by side under several budgets."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from agentspec.cache.automaton import Int32s

if TYPE_CHECKING:
    from agentspec.traces.simulate import Drafting, Nodes, Recording


class Stepwise:
    """Drafters that learn from steps: each budget has one of its own, which is told of its own steps alone."""

    nested = False

    def __init__(self, make: "Callable[[], Drafting]") -> None:
        self.make = make
        self.drafters: dict[int, Drafting] = {}
        self.opened: tuple[Recording, Int32s] | None = None
        self.untold: dict[int, list[Int32s]] = {}
        """Tokens that were committed since a budget's last step."""

    def open(self, recording: "Recording", prompt: Int32s) -> None:
        self.opened = recording, prompt
        for drafter in self.drafters.values():
            drafter.open(recording, prompt.copy())

    def propose(self, budget: int) -> "Nodes":
        if budget not in self.drafters:
            assert self.opened is not None
            self.drafters[budget] = self.make()
            self.drafters[budget].open(*self.opened)
        self.tell(budget)
        return self.drafters[budget].propose(budget)

    def tell(self, budget: int) -> None:
        """Tell a budget's drafter what its last step committed."""
        told = self.untold.get(budget)
        if told:
            self.drafters[budget].observe(np.concatenate(told))
        self.untold[budget] = []

    def observe(self, tokens: Int32s) -> None:
        for told in self.untold.values():
            told.append(tokens)

    def close(self) -> None:
        for budget, drafter in self.drafters.items():
            self.tell(budget)
            drafter.close()
