"""Drafters with a will of their own, and a harness that runs jobs on a step loop without threads."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentspec.config import EngineConfig
from agentspec.engine.commit import Completion
from agentspec.engine.job import Job
from agentspec.engine.kv import PageTable
from agentspec.engine.loop import StepLoop
from agentspec.engine.prefix import KVPool, Node
from agentspec.engine.target import Target
from agentspec.engine.text import TextStream
from agentspec.policies.cost import FixedCost
from agentspec.types import Delta, Drafter, DraftTree, GenerationRequest, Outcome, SamplingParams, Scope, Trajectory

PIECES = [bytes([i % 256]) for i in range(300)]
END = 256


def chain(root: int, tokens: Sequence[int], wrong_twins: bool = False) -> DraftTree:
    """A confident chain below `root`, optionally with a wrong sibling at every node."""
    token, parent, depth = [root], [-1], [0]
    at = 0
    for t in tokens:
        token.append(t)
        parent.append(at)
        depth.append(depth[at] + 1)
        spine = len(token) - 1
        if wrong_twins:
            token.append((t + 1) % 256)
            parent.append(at)
            depth.append(depth[spine])
        at = spine
    n = len(token)
    logp = (0.0, *[-0.01] * (n - 1))
    return DraftTree(
        tuple(token), tuple(parent), tuple(depth), logp, tuple(-0.01 * d for d in depth), (0, *[1] * (n - 1))
    )


@dataclass
class Scripted:
    """Knows the whole answer and proposes what its kind makes of it."""

    prompt: Sequence[int]
    answer: Sequence[int]
    kind: str
    dice: random.Random = field(default_factory=lambda: random.Random(5))
    seen: list[int] = field(default_factory=list)

    def propose(self, budget: int) -> DraftTree:
        root = [*self.prompt, *self.seen][-1]
        rest = list(self.answer[len(self.seen) : len(self.seen) + 6])
        if self.kind == "raising" and len(self.seen) > 3:
            raise RuntimeError("a drafter's own fault")
        if self.kind == "malformed" and len(self.seen) > 3:
            return DraftTree((root, 1), (-1, 5), (0, 1), (0.0, -1.0), (0.0, -1.0), (0, 1))
        if self.kind == "wrong":
            rest = [(t + 1) % 256 for t in rest]
        if self.kind == "noisy":
            rest = [t if self.dice.random() < 0.7 else self.dice.randrange(256) for t in rest]
        if self.kind == "tree":
            return chain(root, rest[: budget // 2], wrong_twins=True)
        return chain(root, rest[:budget])

    def observe(self, outcome: Outcome) -> None:
        self.seen.extend(outcome.tokens)


@dataclass
class Result:
    """What came back for one request."""

    deltas: list[Delta] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)

    @property
    def tokens(self) -> tuple[int, ...]:
        report = self.deltas[-1].report
        assert report is not None
        return report.token_ids


class Harness:
    """A target, its plain transformers twin, and step loops on demand."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.target = Target.load(folder)
        models: Any = AutoModelForCausalLM
        self.plain = models.from_pretrained(folder, dtype=torch.float32).eval()

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Greedy continuation by transformers' own generation, end token included."""
        ids = torch.tensor([list(prompt)])
        out = self.plain.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=END
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    def loop(self, per_row: float = 0.0, **config: Any) -> StepLoop:
        return StepLoop(self.target, EngineConfig(**config), FixedCost(per_row))

    def job(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        drafter: Drafter | None = None,
        sampling: SamplingParams | None = None,
        trajectory: str = "t",
        stop: tuple[str, ...] = (),
        tenant: str = "default",
        priority: int = 0,
    ) -> tuple[Job, Result]:
        result = Result()
        request = GenerationRequest(
            tuple(prompt),
            Trajectory(trajectory, Scope(tenant, "m")),
            max_tokens,
            sampling or SamplingParams(),
            stop=stop,
            priority=priority,
        )
        completion = Completion(TextStream(PIECES, stop), max_tokens, frozenset({END}))
        job = Job(request, completion, drafter, result.deltas.append, result.errors.append, list(prompt))
        return job, result


def drain(loop: StepLoop, limit: int = 2000) -> None:
    """Step until nothing is left."""
    for _ in range(limit):
        if loop.idle:
            return
        loop.step()
    raise AssertionError("the loop does not end")


@dataclass
class Kept:
    """A sequence that a pool keeps, with its tokens."""

    tokens: list[int]
    table: PageTable


def sequences(pool: KVPool) -> list[Kept]:
    """What the prefix tree holds, from every root to every leaf."""
    found = []

    def descend(node: Node, above: list[Node]) -> None:
        path = [*above, node] if node.page is not None else above
        for child in node.children.values():
            descend(child, path)
        if not node.children:
            table = PageTable(pool.shape)
            table.pages = [at.page for at in path if at.page is not None]
            tokens = [token for at in path for token in np.frombuffer(at.key, np.int32).tolist()]
            table.length = len(tokens)
            found.append(Kept(tokens, table))

    for root in pool.roots.values():
        descend(root, [])
    return found


@pytest.fixture(scope="session")
def harness(tiny_model: Path) -> Harness:
    return Harness(tiny_model)


@pytest.fixture(scope="session")
def kit() -> Any:
    """The names above, for test modules that pytest imports without a package."""
    from types import SimpleNamespace

    return SimpleNamespace(chain=chain, Scripted=Scripted, drain=drain, sequences=sequences, END=END)
