"""What a request says of its answer changes the steps, never the tokens, and leaves nothing in any history."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentspec.cache.index import SuffixIndex
from agentspec.cache.retrieval import Histories
from agentspec.config import CacheConfig, Config, ModelConfig
from agentspec.engine.chat import Chat
from agentspec.engine.scaffolds import Scaffolds
from agentspec.engine.service import Engine
from agentspec.errors import ContextTooLong
from agentspec.policies.cost import FixedCost
from agentspec.types import GenerationRequest, Outline, Report, SamplingParams, Scope, SpeculationParams, Trajectory

GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8, top_p=0.95, seed=3)
SCOPE = Scope("default", "tiny")


def tools(name: str) -> Outline:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}, "day": {"enum": ["today", "later"]}}}
    tool = {"type": "function", "function": {"name": name, "parameters": parameters}}
    return Outline((tool,), digest=name.encode())


def run(folder: Path, scenario: Callable[[Engine], Awaitable[None]]) -> None:
    async def body() -> None:
        engine = Engine.from_folder(Config(model=ModelConfig(name=str(folder))), folder, Histories(CacheConfig()))
        engine.loop.cost = FixedCost()
        try:
            await asyncio.wait_for(scenario(engine), 60)
        finally:
            await engine.close()

    asyncio.run(body())


def request(engine: Engine, trajectory: str, **fields: Any) -> GenerationRequest:
    prompt = engine.render([{"role": "user", "content": "xyz"}], None)
    return GenerationRequest(prompt, Trajectory(trajectory, SCOPE), 40, **fields)


async def reports(engine: Engine, *wanted: GenerationRequest) -> list[Report]:
    found: dict[int, Report] = {}
    async for delta in engine.generate(*wanted):
        if delta.report is not None:
            found[delta.index] = delta.report
    return [found[index] for index in sorted(found)]


def of(counts: dict[str, int] | Any, name: str) -> int:
    """Nodes that a source proposed, alone or with others."""
    return sum(count for names, count in counts.items() if name in names.split("+"))


async def built(find: Callable[[], SuffixIndex | None] | None) -> SuffixIndex:
    """The scaffold, once it is there."""
    assert find is not None
    while (index := find()) is None:
        await asyncio.sleep(0.001)
    return index


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_predictions_change_the_steps_and_not_the_tokens(tiny_model: Path, sampling: SamplingParams) -> None:
    async def scenario(engine: Engine) -> None:
        off = SpeculationParams(enabled=False)
        (plain,) = await reports(engine, request(engine, "plain", sampling=sampling, speculation=off))
        said = plain.token_ids
        edited = (*said[:10], 7, 7, *said[12:20], *said[25:])
        for name, prediction in (("right", said), ("edited", edited), ("wrong", (5, 6, 7) * 30)):
            only = SpeculationParams(drafters=("prediction",))
            asked = request(engine, name, sampling=sampling, prediction=prediction, speculation=only)
            (report,) = await reports(engine, asked)
            assert report.token_ids == said
            assert set(report.drafted) <= {"prediction"}
            if name == "right":
                assert report.accepted["prediction"] >= len(said) - report.steps
                assert report.steps <= len(said) / 4
            if name == "edited":
                assert report.steps <= len(said) / 2

    run(tiny_model, scenario)


def test_a_prediction_never_enters_the_history(tiny_model: Path) -> None:
    async def scenario(engine: Engine) -> None:
        secret = tuple(range(60, 90))
        await reports(engine, request(engine, "with", prediction=secret))
        await reports(engine, request(engine, "without"))
        kept, other = [await engine.inspect(Trajectory(name, SCOPE)) for name in ("with", "without")]
        assert kept is not None and other is not None and kept.tokens == other.tokens
        await engine.histories.flush()
        for history in engine.histories.shelf.trajectories.values():
            assert history.index.known(secret) < 4  # type: ignore[arg-type]
        assert engine.histories.shelf.scopes[SCOPE].index.known(secret) < 4  # type: ignore[arg-type]

    run(tiny_model, scenario)


def test_choices_have_a_prediction_each(tiny_model: Path) -> None:
    async def scenario(engine: Engine) -> None:
        first = request(engine, "plain", sampling=SAMPLED)
        wanted = [first, replace(first, sampling=replace(SAMPLED, seed=4), branch=True)]
        plain = await reports(engine, *wanted)
        ways = [replace(one, prediction=plain[1].token_ids, trajectory=Trajectory("other", SCOPE)) for one in wanted]
        guided = await reports(engine, *ways)
        assert [report.token_ids for report in guided] == [report.token_ids for report in plain]
        assert of(guided[1].accepted, "prediction") > 20 > of(guided[0].accepted, "prediction")

    run(tiny_model, scenario)


def test_a_prediction_beyond_the_window_is_named(tiny_model: Path) -> None:
    async def scenario(engine: Engine) -> None:
        with pytest.raises(ContextTooLong, match="prediction: has") as caught:
            await reports(engine, request(engine, "t", prediction=(1,) * (engine.window + 1)))
        assert caught.value.param == "prediction"

    run(tiny_model, scenario)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_scaffolds_are_drafted_from_and_change_no_token(tiny_model: Path, sampling: SamplingParams) -> None:
    async def scenario(engine: Engine) -> None:
        outline = tools("forecast")
        await built(engine.scaffolds.find(SCOPE, outline))
        (plain,) = await reports(engine, request(engine, "plain", sampling=sampling))
        (report,) = await reports(engine, request(engine, "other", sampling=sampling, outline=outline))
        assert report.token_ids == plain.token_ids
        assert of(report.drafted, "scaffold") > 0 == of(plain.drafted, "scaffold")
        without = SpeculationParams(drafters=("trajectory", "scope"))
        asked = request(engine, "third", sampling=sampling, outline=outline, speculation=without)
        (report,) = await reports(engine, asked)
        assert of(report.drafted, "scaffold") == 0

    run(tiny_model, scenario)


def test_scaffolds_are_kept_by_scope_within_their_bytes_and_forgotten(tiny_model: Path) -> None:
    async def scenario() -> None:
        scaffolds = Scaffolds(Chat.load(tiny_model), CacheConfig())
        first = await built(scaffolds.find(SCOPE, tools("one")))
        assert await built(scaffolds.find(SCOPE, tools("one"))) is first
        other = await built(scaffolds.find(Scope("another", "tiny"), tools("one")))
        assert other is not first and scaffolds.bytes == first.bytes + other.bytes
        scaffolds.forget(SCOPE)
        assert scaffolds.bytes == other.bytes
        assert await built(scaffolds.find(SCOPE, tools("one"))) is not first
        scaffolds.limit = 3 * first.bytes
        for name in ("two", "three", "four", "five"):
            await built(scaffolds.find(SCOPE, tools(name)))
        scaffolds.find(SCOPE, tools("five"))
        assert 0 < scaffolds.bytes <= scaffolds.limit
        scaffolds.close()

    asyncio.run(scenario())


def test_a_request_of_a_trajectory_deleted_meanwhile_leaves_no_scaffold(tiny_model: Path) -> None:
    async def scenario(engine: Engine) -> None:
        asked = request(engine, "gone", outline=tools("secret"))
        await reports(engine, asked)
        await built(engine.scaffolds.find(SCOPE, tools("secret")))
        assert engine.stats()["scaffold_bytes"] > 0
        await engine.forget(Trajectory("gone", SCOPE))
        assert engine.stats()["scaffold_bytes"] == 0
        await reports(engine, asked)
        assert not engine.scaffolds._kept

    run(tiny_model, scenario)


def test_nothing_to_build_from_and_no_room_give_no_scaffold(tiny_model: Path) -> None:
    chat = Chat.load(tiny_model)
    scaffolds, off = Scaffolds(chat, CacheConfig()), Scaffolds(chat, CacheConfig(scaffold_tokens=0))
    assert scaffolds.find(SCOPE, Outline()) is None
    assert off.find(SCOPE, tools("one")) is None
    scaffolds.close()
    off.close()


def test_tools_that_no_template_can_show_cost_a_warning_alone(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        scaffolds = Scaffolds(Chat.load(tiny_model), CacheConfig())
        odd: Any = Outline(("no tool",), digest=b"odd")  # type: ignore[arg-type]
        assert (await built(scaffolds.find(SCOPE, odd))).tokens == 0
        scaffolds.close()

    asyncio.run(scenario())
    assert "no drafts from the tools of a request" in caplog.text
