"""Constrained requests on the tiny model, and drafters that mean no good."""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentspec.engine.chat import Chat
from agentspec.engine.grammar import Grammars
from agentspec.engine.text import TokenBytes
from agentspec.server.constrain import schema_text
from agentspec.types import (
    DraftTree,
    FinishReason,
    Grammar,
    GrammarKind,
    Outcome,
    SamplingParams,
    SpeculationParams,
)

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, seed=11)
PENALISED = SamplingParams(0.9, 1.0, 40, 0.0, 5, 1.2, 0.5, 0.4, ((34, 2.0), (125, -1.0)), 4)
SAMPLINGS = [GREEDY, SAMPLED, PENALISED]
OFF = SpeculationParams(enabled=False)


def schema_of(schema: Any) -> Grammar:
    text = schema_text(schema, "response_format") if isinstance(schema, dict) else json.dumps(schema)
    return Grammar(GrammarKind.JSON_SCHEMA, text, "response_format")


def regex_of(pattern: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, pattern, "guided_regex")


def lark_of(text: str) -> Grammar:
    return Grammar(GrammarKind.CONTEXT_FREE, text, "guided_grammar")


@dataclass
class Forger:
    """Proposes what its kind makes of the answer, legal or not; `kind` random knows nothing."""

    prompt: Sequence[int]
    answer: Sequence[int]
    kind: str
    dice: random.Random
    likely: Sequence[int]
    """Tokens that JSON is made of."""

    made: int = 0
    last: int = -1

    def propose(self, budget: int) -> DraftTree:
        rest = [*self.answer[self.made : self.made + 6]]
        if self.kind == "wrong":
            rest = [(token + 1) % 256 for token in rest]
        if self.kind == "random":
            rest = [self.dice.choice(self.likely) for _ in range(5)]
        if self.kind == "illegal":
            rest = [*rest[:1], 257, 256, 10, 3]
        root = self.last if self.made else self.prompt[-1]
        nodes = [(root, -1, 0)]
        spine = 0
        for guess in rest[: budget // 2]:
            nodes += [(guess, spine, nodes[spine][2] + 1), ((guess + 7) % 256, spine, nodes[spine][2] + 1)]
            spine = len(nodes) - 2
        count = len(nodes)
        token, parent, levels = (tuple(column) for column in zip(*nodes, strict=True))
        logp = (0.0, *[-0.1] * (count - 1))
        return DraftTree(token, parent, levels, logp, tuple(-0.1 * level for level in levels), (0, *[1] * (count - 1)))

    def observe(self, outcome: Outcome) -> None:
        self.made += len(outcome.tokens)
        self.last = outcome.tokens[-1]


@dataclass
class Made:
    """One constrained completion."""

    tokens: tuple[int, ...]
    text: str
    finish: FinishReason
    report: Any
    result: Any


class Bench:
    """Runs constrained requests on the tiny model."""

    def __init__(self, harness: Any, kit: Any, folder: Path) -> None:
        self.harness, self.kit = harness, kit
        tokenizer = Chat.load(folder).tokenizer
        self.end, self.start = tokenizer.eos_token_id, tokenizer.bos_token_id
        self.token_bytes = TokenBytes(tokenizer)
        self.tokenizer = tokenizer
        self.grammars = Grammars(tokenizer, self.token_bytes, harness.target.vocabulary, {self.end})

    def tokens(self, text: str) -> list[int]:
        return [self.token_bytes.bytes.index(bytes([byte])) for byte in text.encode()]

    def eager(self, **wanted: float) -> SamplingParams:
        """Greedy, with something added to the logits of tokens by their text."""
        return SamplingParams(logit_bias=tuple((self.tokens(text)[0], value) for text, value in wanted.items()))

    def start_of(self, grammar: Grammar) -> Any:
        """A matcher at the grammar's start."""
        constraint = self.job(grammar, GREEDY, 5, 1)[0].constraint
        return constraint.fork()

    def drafter(self, job: Any, kind: str, answer: Sequence[int], seed: int) -> Forger:
        likely = self.tokens('{}[]":, 01aetrufls\\\n')
        return Forger(job.request.prompt, answer, kind, random.Random(seed), likely)

    def job(self, grammar: Grammar, sampling: SamplingParams, count: int, seed: int, **options: Any) -> Any:
        prompt = [random.Random(seed).randrange(256) for _ in range(12)]
        speculation = options.pop("speculation", SpeculationParams(report=True))
        job, result = self.harness.job(prompt, count, None, sampling, trajectory=str(seed))
        job.request = replace(job.request, grammar=grammar, speculation=speculation, **options)
        job.completion.text.token_bytes = self.token_bytes
        job.completion.text.stop = tuple(options.get("stop", ()))
        job.completion.end_tokens = frozenset({self.end, *options.get("stop_tokens", ())})
        job.constraint = asyncio.run(self.grammars.constraint(job.request))
        return job, result

    def made(
        self,
        grammar: Grammar,
        sampling: SamplingParams = GREEDY,
        count: int = 80,
        *,
        kind: str | None = None,
        answer: Sequence[int] = (),
        seed: int = 3,
        **options: Any,
    ) -> Made:
        job, result = self.job(grammar, sampling, count, seed, **options)
        if kind is not None:
            job.drafter = self.drafter(job, kind, answer, seed)
        loop = self.harness.loop()
        loop.add(job)
        self.kit.drain(loop)
        if result.errors:
            raise result.errors[0]
        text = "".join(delta.text for delta in result.deltas)
        last = result.deltas[-1]
        assert not loop.pool.running
        return Made(result.tokens, text, last.finish, last.report, result)

    def agreed(
        self,
        grammar: Grammar,
        sampling: SamplingParams,
        count: int = 80,
        seed: int = 3,
        kinds: Sequence[str | None] = (None, "right", "wrong", "random", "illegal"),
        **options: Any,
    ) -> Made:
        """The completion without speculation, after each kind of drafter was seen to give the same."""
        plain = self.made(grammar, sampling, count, seed=seed, speculation=OFF, **options)
        assert plain.report.drafted_total == 0
        for kind in kinds:
            other = self.made(grammar, sampling, count, seed=seed, kind=kind, answer=plain.tokens, **options)
            assert (other.tokens, other.text, other.finish) == (plain.tokens, plain.text, plain.finish), kind
        return plain
