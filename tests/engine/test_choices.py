"""Requests that are given to the engine together: one prompt computed once, taken or cancelled as a whole."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentspec.engine.service import Engine
from agentspec.errors import ContextTooLong, Overloaded
from agentspec.types import Delta, GenerationRequest, Report, SamplingParams, Scope, SpeculationParams, Trajectory
from tests.serving import with_engine


def request(engine: Engine, text: str, **fields: Any) -> GenerationRequest:
    fields.setdefault("max_tokens", 30)
    prompt = engine.tokenize(text, special=False)
    return GenerationRequest(prompt, Trajectory("t", Scope("default", "tiny")), **fields)


def choices(first: GenerationRequest, count: int) -> list[GenerationRequest]:
    """The request and its branches with other seeds."""
    seeds = [replace(first.sampling, seed=first.sampling.seed + 1000 * number) for number in range(count)]
    return [replace(first, sampling=sampling, branch=number > 0) for number, sampling in enumerate(seeds)]


async def finished(engine: Engine, requests: Sequence[GenerationRequest]) -> tuple[list[str], list[Report]]:
    texts: dict[int, str] = defaultdict(str)
    reports: dict[int, Report] = {}
    async for delta in engine.generate(*requests):
        texts[delta.index] += delta.text
        if delta.report is not None:
            assert delta.finish is not None
            reports[delta.index] = delta.report
    return [texts[index] for index in range(len(requests))], [reports[index] for index in range(len(requests))]


SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=5)
TEXT = "abcabcabc one two three one two three " * 4


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED])
@pytest.mark.parametrize("running", [1, 2, 8])
def test_each_choice_is_what_it_is_alone(tiny_model: Path, sampling: SamplingParams, running: int) -> None:
    async def scenario(engine: Engine) -> None:
        wanted = choices(request(engine, TEXT, sampling=sampling), 4)
        off = [replace(one, speculation=SpeculationParams(enabled=False)) for one in wanted]
        alone = [(await finished(engine, [one]))[1][0].token_ids for one in off]
        for together in (off, wanted, wanted):
            _, reports = await finished(engine, together)
            assert [report.token_ids for report in reports] == alone
        assert len(set(alone)) == (1 if sampling.temperature == 0 else 4)

    with_engine(tiny_model, scenario, max_running=running)


@pytest.mark.parametrize("running", [1, 3, 8])
def test_the_prompt_is_computed_once(tiny_model: Path, running: int) -> None:
    async def scenario(engine: Engine) -> None:
        wanted = choices(request(engine, TEXT, sampling=SAMPLED), 5)
        _, reports = await finished(engine, wanted)
        known = len(wanted[0].prompt) - 1
        assert [report.cached_tokens for report in reports] == [0, *[known] * 4]
        assert engine.stats()["prefill_tokens_total"] == known

    with_engine(tiny_model, scenario, max_running=running, prefill_chunk=16)


def test_it_is_computed_once_where_its_log_probabilities_are_told_too(tiny_model: Path) -> None:
    async def scenario(engine: Engine) -> None:
        first, *others = choices(request(engine, TEXT, max_tokens=3), 3)
        _, reports = await finished(engine, [replace(first, prompt_logprobs=0), *others])
        assert [report.cached_tokens for report in reports] == [0, *[len(first.prompt) - 1] * 2]

    with_engine(tiny_model, scenario, prefill_chunk=16)


def test_only_those_with_the_same_prompt_wait_for_it(harness: Any, kit: Any) -> None:
    loop = harness.loop(prefill_chunk=8)
    (leader, first), (follower, second), (other, third) = [harness.job([1] * size, 9) for size in (40, 40, 12)]
    follower.leader = leader
    for job in (leader, follower, other):
        loop.add(job)
    loop.step()
    assert (loop.scheduler.running, loop.scheduler.waiting) == ([leader, other], [follower])
    while leader.prefilling:
        loop.step()
    loop.step()
    assert {leader, follower} <= set(loop.scheduler.running)
    kit.drain(loop)
    assert first.tokens == second.tokens != third.tokens


def test_a_job_whose_leader_is_gone_starts_all_the_same(harness: Any, kit: Any) -> None:
    loop = harness.loop(prefill_chunk=8)
    (leader, _), (follower, result) = [harness.job([1] * 40, 4) for _ in range(2)]
    follower.leader = leader
    loop.add(leader)
    loop.add(follower)
    loop.step()
    leader.cancelled = True
    kit.drain(loop)
    assert len(result.tokens) == 4


async def settled(engine: Engine) -> None:
    """Waits until the engine is empty."""
    for _ in range(400):
        if engine.loop.idle and engine.stats()["history_sessions"] == 0:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("something still runs")


@pytest.mark.parametrize("after", [0, 1, 10])
def test_leaving_ends_all_choices(tiny_model: Path, after: int) -> None:
    async def scenario(engine: Engine) -> None:
        wanted = choices(request(engine, "y" * 200, max_tokens=250, ignore_eos=True), 12)
        source = engine.generate(*wanted)
        seen: list[Delta] = []
        reading = asyncio.ensure_future(anext(source))
        await asyncio.sleep(0.01)
        for _ in range(after):
            seen.append(await reading)
            reading = asyncio.ensure_future(anext(source))
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        assert isinstance(source, AsyncGenerator)
        await source.aclose()
        await settled(engine)
        assert not any(delta.finish for delta in seen)
        assert engine.loop.pool.running == []

    with_engine(tiny_model, scenario, prefill_chunk=16)


def test_a_batch_takes_one_place_of_the_queue(tiny_model: Path) -> None:
    async def scenario(engine: Engine) -> None:
        texts, _ = await finished(engine, choices(request(engine, "many", max_tokens=3), 20))
        assert len(texts) == 20
        slow = engine.generate(*choices(request(engine, "busy", max_tokens=200, ignore_eos=True), 4))
        await anext(slow)
        waiting = asyncio.ensure_future(anext(slow))
        with pytest.raises(Overloaded):
            await finished(engine, choices(request(engine, "late", max_tokens=3), 4))
        await waiting
        assert isinstance(slow, AsyncGenerator)
        await slow.aclose()
        await settled(engine)

    with_engine(tiny_model, scenario, max_running=1, max_queue=2)


def test_one_that_is_too_long_refuses_all(tiny_model: Path) -> None:
    async def scenario(engine: Engine) -> None:
        with pytest.raises(ContextTooLong):
            await finished(engine, [request(engine, "fits"), request(engine, "x" * 600)])
        assert engine.stats()["steps_total"] == 0
        assert engine.stats()["history_trajectories"] == 0

    with_engine(tiny_model, scenario)


def test_branches_leave_the_history_as_it_is(tiny_model: Path) -> None:
    async def scenario(engine: Engine) -> None:
        async def history(count: int, trajectory: str) -> tuple[list[int], int]:
            first = request(engine, TEXT, sampling=SAMPLED)
            first = replace(first, trajectory=Trajectory(trajectory, Scope(trajectory, "tiny")))
            await finished(engine, choices(first, count))
            await engine.histories.flush()
            known = engine.histories.shelf.trajectories[first.trajectory.scope, trajectory]
            scope = engine.histories.shelf.scopes[first.trajectory.scope]
            return [conversation.view().tolist() for conversation in known.conversations], scope.index.tokens

        assert await history(4, "a") == await history(1, "b")
        assert engine.stats()["history_sessions"] == 0

    with_engine(tiny_model, scenario)


def test_branches_draft_from_the_trajectory_and_from_themselves(tiny_model: Path) -> None:
    async def scenario(engine: Engine) -> None:
        plain = request(engine, TEXT, max_tokens=60, ignore_eos=True)
        _, first = await finished(engine, [plain])
        _, reports = await finished(engine, choices(plain, 3))
        for report in reports:
            assert report.token_ids == first[0].token_ids
            assert sum(report.accepted.values()) > 0
            assert report.steps < len(report.token_ids) / 2

    with_engine(tiny_model, scenario)


def test_a_request_that_generates_nothing_teaches_nothing(tiny_model: Path) -> None:
    async def scenario(engine: Engine) -> None:
        wanted = request(engine, "x" * engine.window, max_tokens=0, prompt_logprobs=0)
        told = [one async for delta in engine.generate(wanted) for one in delta.prompt_logprobs]
        assert len(told) == engine.window - 1
        assert engine.stats()["history_trajectories"] == 0

    with_engine(tiny_model, scenario)
