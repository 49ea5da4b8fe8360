"""The parity check finds no difference where there is none, and each kind of difference where there is one."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentspec.cache.retrieval import Histories
from agentspec.cli import main
from agentspec.commands.parity import verdict
from agentspec.config import CacheConfig, Config, ModelConfig
from agentspec.engine.parity import (
    Comparison,
    Made,
    Parity,
    Position,
    RecordedTurn,
    Transformers,
    Way,
    Witness,
    first_difference,
)
from agentspec.engine.service import Engine
from agentspec.policies.cost import FixedCost
from agentspec.types import SamplingParams, Scope, Trajectory

TURN = RecordedTurn("run", 3, (1, 2))


def made(tokens: tuple[int, ...], *digests: bytes) -> Made:
    report: Any = SimpleNamespace(token_ids=tokens)
    return Made(report, tuple(Position(digest, 0.5) for digest in digests))


def test_the_first_difference_is_that_of_a_token_or_of_logits() -> None:
    off = made((5, 6, 7), b"a", b"b", b"c")
    assert first_difference("x", TURN, off, (5, 6, 7), off.positions) is None
    assert first_difference("x", TURN, off, (5, 6, 7), None) is None
    other = first_difference("x", TURN, off, (5, 9, 7), off.positions)
    assert other is not None and (other.position, other.tokens, other.gap) == (1, (9, 6), 0.5)
    bits = first_difference("x", TURN, off, (5, 6, 7), made((), b"a", b"b", b"z").positions)
    assert bits is not None and (bits.position, bits.tokens) == (2, (7, 7))
    short = first_difference("x", TURN, off, (5, 6), off.positions[:2])
    assert short is not None and (short.position, short.tokens) == (2, (None, 7))
    long = first_difference("x", TURN, off, (5, 6, 7, 8), None)
    assert long is not None and (long.position, long.tokens) == (3, (8, None))


def test_the_verdict_says_which_of_three_it_is() -> None:
    same = Comparison("greedy", 1, turns=4, identical_turns=4, identical_logits_turns=4)
    assert same.holds and verdict([same]).startswith("identical: the same tokens, from the same bits")
    bits = replace(same, identical_logits_turns=3, differences=[difference((7, 7))])
    assert bits.holds and "differ in their last bits in 1" in verdict([bits])
    wrong = replace(same, identical_turns=3, identical_logits_turns=3, differences=[difference((7, 8))])
    assert not wrong.holds and verdict([same, wrong]).startswith("NOT identical: tokens differ in 1 of 8")


def difference(tokens: tuple[int, int]) -> Any:
    return SimpleNamespace(tokens=tokens)


def test_the_witness_keeps_one_entry_per_token() -> None:
    witness = Witness()
    trajectory = Trajectory("t", Scope("tenant", "m"))
    job: Any = SimpleNamespace(request=SimpleNamespace(trajectory=trajectory))
    witness(job, torch.tensor([[1.0, 4.0, 2.0], [0.0, 0.0, -1.0]]))
    witness(job, torch.tensor([[1.0, 4.0, 2.0]]))
    gaps = [position.gap for position in witness.positions[trajectory]]
    assert gaps == [2.0, 0.0, 2.0]
    first, second, third = (position.digest for position in witness.positions[trajectory])
    assert first == third != second


def test_a_random_model_passes_in_every_batch(tiny_model: Path) -> None:
    config = Config(model=ModelConfig(name=str(tiny_model)))
    engine = Engine.from_folder(config, tiny_model, Histories(CacheConfig()))
    engine.loop.cost = FixedCost()
    turns = [RecordedTurn(f"run {i % 3}", i, tuple(range(65 + i, 95)) * 2) for i in range(8)]
    ways = [
        Way("greedy", SamplingParams(), 8),
        Way("sampled", SamplingParams(temperature=0.7, top_p=0.95, seed=4), 5),
    ]

    async def scenario() -> list[Comparison]:
        try:
            parity = Parity(engine, 24, [1, 3, 8], Transformers(tiny_model, engine.end_tokens))
            return await parity.compare(turns, ways)
        finally:
            await engine.close()

    comparisons = asyncio.run(scenario())
    assert [(one.way, one.at_once, one.turns) for one in comparisons] == [
        *[("greedy", at_once, 8) for at_once in (1, 3, 8)],
        *[("sampled", at_once, 5) for at_once in (1, 3, 8)],
    ]
    for one in comparisons:
        assert one.holds and one.differences == []
        assert one.identical_turns == one.identical_logits_turns == one.turns
        assert one.drafted > 0
    assert [one.identical_to_transformers for one in comparisons] == [8, None, None, None, None, None]


def test_the_command_reports_and_exits_by_the_verdict(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "1 2 3"}]
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"id": "a", "source": "test", "domain": "test", "messages": messages}) + "\n")
    options = ["--model", str(tiny_model), "--max-tokens", "8", "--seeds", "1", "--at-once", "1", "2"]
    assert main(["parity", str(trace), *options]) == 0
    assert "identical: the same tokens" in capsys.readouterr().out
    assert main(["parity", str(trace), *options, "--json", "--transformers"]) == 0
    assert len(json.loads(capsys.readouterr().out)["comparisons"]) == 4
