"""Recorded runs as `bench.tlar` walks over them."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from zlib import crc32

import numpy as np

from agentspec.cache.automaton import Int32s, Int64s
from agentspec.cache.masked import MaskedIndex
from agentspec.commands.simulate import encoder, tokenizer_of
from agentspec.config import Config, ModelConfig
from agentspec.traces.controls import Replaced, Shuffled, Text, Unigram
from agentspec.traces.files import read_traces
from agentspec.traces.rescue import OWN, Arm, Chains, Prepared, Steps, lookup_chains, no_chains, prepared, walk
from agentspec.traces.simulate import Recording, recording_of
from bench.small_model import SmallModel

BASES: Mapping[str, Callable[[str], Chains]] = {
    "lookup": lambda _: lookup_chains,
    "model": lambda name: SmallModel(name).chains,
    "none": lambda _: no_chains,
}
"""What drafts the chain of each step."""


@dataclass(frozen=True, slots=True)
class Runs:
    """What the rules walk over."""

    names: Sequence[str]
    sources: Sequence[str]
    turns: Sequence[Sequence[Prepared]]
    gate: int

    def walks(self, arm: Arm, widths: Int64s | None = None) -> list[Steps]:
        """An arm's steps of every run."""
        return [walk(turns, arm, self.gate, widths) for turns in self.turns]


def said(recording: Recording) -> Int32s:
    """All answers of a run."""
    return np.concatenate([np.empty(0, np.int32), *[turn.answer for turn in recording.turns]])


def shortened(recording: Recording, most: int, context: int | None) -> Recording:
    """The first turns of a run, up to the one whose answer exceeds `most` tokens of answers, and before the one that
    exceeds `context` tokens together with its prompt."""
    answers, turns = 0, 0
    for turn, (prompt, _) in zip(recording.turns, recording.prompts(), strict=True):
        if answers > most or (context and prompt.size + turn.answer.size > context):
            break
        answers, turns = answers + turn.answer.size, turns + 1
    return replace(recording, turns=recording.turns[:turns])


def chosen(arguments: argparse.Namespace) -> Iterator[tuple[Recording, Int32s]]:
    """The first runs of each file whose answers reach behind the gate, each with the answers of the one before."""
    encode = encoder(tokenizer_of(Config(model=ModelConfig(name=arguments.model))))
    for file in arguments.files:
        found = list[Recording]()
        for trace in read_traces([file]):
            recording = shortened(recording_of(trace, encode), arguments.tokens, arguments.context)
            if said(recording).size > arguments.gate + 1:
                found.append(recording)
            if len(found) == arguments.limit:
                break
        for at, recording in enumerate(found):
            yield recording, said(found[at - 1]) if at or len(found) > 1 else np.empty(0, np.int32)


def runs_of(arguments: argparse.Namespace) -> Runs:
    """Runs, prepared."""
    drafter = BASES[arguments.base](arguments.model)
    names, sources, turns = list[str](), list[str](), list[list[Prepared]]()
    for recording, other in chosen(arguments):
        texts: dict[str, Text] = {
            OWN: MaskedIndex(),
            "prompts": MaskedIndex(),
            "cross": Replaced(other),
            "shuffled": Shuffled(crc32(recording.id.encode())),
            "unigram": Unigram(),
        }
        turns.append(list(prepared(recording, texts, frozenset({"prompts"}), arguments.gate, drafter)))
        names.append(recording.id)
        sources.append(recording.source)
    return Runs(names, sources, turns, arguments.gate)
