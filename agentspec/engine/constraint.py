"""What a request's grammar does to the target's choices: at each position it hides the tokens that it forbids.

The grammar's state follows the chosen tokens alone, so a node of a tree is judged by its own path, and a run of
accepted drafts gives what plain decoding gives.
"""

from collections.abc import Callable, Collection
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentspec.errors import InvalidRequest

SECONDS, SECONDS_PER_TOKEN = 1.0, 0.05
"""What the masks of one request may take, so that no grammar stalls the requests beside it."""


class Constraint:
    """The grammar of one request. `push` tells it every token that is chosen, in order."""

    def __init__(
        self,
        matcher: Any,
        plain: Tensor,
        ends: Collection[int],
        *,
        param: str,
        ends_early: bool = True,
        spoiled: Callable[[], object] = lambda: None,
    ) -> None:
        """`matcher`: an `LLMatcher` of llguidance at its start, for this request alone. `plain` (vocabulary,): the
        tokens that stand for bytes. `ends`: tokens that may come once the grammar is complete; with `ends_early`
        wherever it is, otherwise only where nothing else may. `spoiled` is called when the matcher fails."""
        self.matcher = matcher
        self.plain = plain
        self.ends = frozenset(ends)
        self.end_places = torch.tensor(sorted(ends), dtype=torch.long)
        self.param = param
        self.ends_early = ends_early
        self.spoiled = spoiled
        self.length = 0
        self.complete_at: int | None = None
        """Number of tokens after which nothing may follow; None while something may."""

        self.seconds = 0.0
        self.forces = True
        """Whether forced tokens are looked for: not after a run that was too long to find quickly."""

    def __call__(self, logits: Tensor) -> Tensor:
        """The next token's logits (vocabulary,) with minus infinity for what may not come; a copy.

        Where only the end is left it may come, whatever else hides it. Raises `InvalidRequest` when the grammar
        cannot go on: its limits are exceeded, or no token of the model spells what has to come.
        """
        legal, complete = self._legal()
        allowed = logits.masked_fill(~legal, float("-inf"))
        if bool(allowed.max() > float("-inf")):
            return allowed
        if not complete:
            raise InvalidRequest(f"{self.param}: no token of the model can continue the grammar", param=self.param)
        allowed[self.end_places] = 0.0
        return allowed

    def push(self, token: int) -> None:
        """`token` was chosen."""
        self.length += 1
        if token in self.ends or self.complete_at is not None:
            return
        self.matcher.consume_token(token)
        self._check()
        if self.matcher.is_stopped():
            self.complete_at = self.length

    def fork(self) -> Any:
        """A matcher of its own in the present state, to try drafts on."""
        return self.matcher.deep_copy()

    def _legal(self) -> tuple[Tensor, bool]:
        """The tokens that may come (vocabulary,), and whether the grammar is complete."""
        began = perf_counter()
        mask = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        self.seconds += perf_counter() - began
        self._check()
        bits = np.unpackbits(mask, count=len(self.plain), bitorder="little")
        legal = torch.from_numpy(bits).bool() & self.plain
        complete = bool(self.matcher.is_accepting())
        if complete and self.ends_early:
            legal[self.end_places] = True
        return legal, complete

    def _check(self) -> None:
        if self.matcher.is_error():
            self.spoiled()
            reason = brief(self.matcher.get_error())
            raise InvalidRequest(f"{self.param}: the grammar is too complex: {reason}", param=self.param)
        if self.seconds > SECONDS + SECONDS_PER_TOKEN * self.length:
            raise InvalidRequest(f"{self.param}: the grammar's masks take too long to compute", param=self.param)


def brief(error: str) -> str:
    """An error of llguidance in one line, without its traces."""
    return " ".join(error.split("<backtrace>")[0].replace("<non-verbose/>", "").split())[:300]
