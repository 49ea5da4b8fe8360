"""Faults that other engines had, as cases: offsets in a batch, widths, prefix hits, what may be reused."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from agentspec.engine.attention import Segment
from agentspec.engine.kv import PageTable
from agentspec.engine.service import Engine
from agentspec.types import FinishReason, GenerationRequest, Report, Scope, SpeculationParams, Trajectory
from tests.serving import with_engine


def prompt_of(seed: int, length: int = 20) -> list[int]:
    return [random.Random(seed).randrange(256) for _ in range(length)]


def finish(loop: Any, kit: Any, *jobs: Any) -> None:
    for job in jobs:
        loop.add(job)
    kit.drain(loop)


def stop_in(answer: list[int]) -> str:
    """Two characters of an answer in ASCII, found first well inside it."""
    text = bytes(token if token < 128 else 0 for token in answer).decode()
    places = [at for at in range(4, len(text) - 2) if text[at : at + 2].isprintable() and "\0" not in text[at : at + 2]]
    return text[places[0] : places[0] + 2]


def test_eng_05_a_stop_string_is_found_beside_a_prefilling_neighbour(harness: Any, kit: Any) -> None:
    prompt = next(p for p in map(prompt_of, range(50)) if ascii_pair(harness.greedy(p, 20)))
    answer = harness.greedy(prompt, 20)
    stop = stop_in(answer)
    alone, expected = harness.job(prompt, 20, stop=(stop,))
    finish(harness.loop(), kit, alone)
    loop = harness.loop(prefill_chunk=8)
    job, result = harness.job(prompt, 20, kit.Scripted(prompt, answer, "right"), stop=(stop,))
    neighbour, other = harness.job(prompt_of(99, 200), 5, trajectory="neighbour")
    finish(loop, kit, job, neighbour)
    assert result.tokens == expected.tokens == tuple(answer[: len(expected.tokens)])
    assert len(result.tokens) < len(answer)
    assert job.completion.finish is FinishReason.STOP
    assert list(other.tokens) == harness.greedy(prompt_of(99, 200), 5)


def ascii_pair(answer: list[int]) -> bool:
    """Whether `stop_in` finds a pair in the answer."""
    try:
        return bool(stop_in(answer))
    except IndexError:
        return False


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
def test_eng_10_a_row_says_the_same_whatever_is_verified_beside_it(harness: Any, width: int) -> None:
    target = harness.target
    for seed in range(5):
        prompt = prompt_of(seed, 30)
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            right = harness.plain(ids).logits[0, -1]
        table = PageTable(target.shape)
        target.forward([Segment(table, tuple(prompt[:-1]), tuple(range(29)), None)], [0])
        table.commit(range(29))
        tokens = (prompt[-1], *prompt_of(seed + 100, width - 1))
        row = target.forward([Segment(table, tokens, tuple(range(width)), None)], [0])[0]
        torch.testing.assert_close(row, right, atol=1e-4, rtol=1e-4)
        assert row.argmax() == right.argmax()


@pytest.mark.parametrize("chunk", [1, 3, 29, 30, 256])
def test_eng_11_how_the_prompt_is_split_changes_nothing(harness: Any, kit: Any, chunk: int) -> None:
    prompt = prompt_of(6, 31)
    job, result = harness.job(prompt, 12)
    finish(harness.loop(prefill_chunk=chunk), kit, job)
    assert list(result.tokens) == harness.greedy(prompt, 12)


def test_eng_13_drafts_are_verified_behind_a_prefix_hit(harness: Any, kit: Any) -> None:
    loop = harness.loop()
    shared = prompt_of(1, 40)
    owner, _ = harness.job([*shared, 1, 2, 3], 10, trajectory="owner")
    finish(loop, kit, owner)
    longer = [*shared, 9, 8, 7]
    answer = harness.greedy(longer, 15)
    job, result = harness.job(longer, 15, kit.Scripted(longer, answer, "tree"), trajectory="other")
    again, unchanged = harness.job([*shared, 1, 2, 3], 10, trajectory="owner")
    finish(loop, kit, job, again)
    assert job.cached_tokens == 40
    assert list(result.tokens) == answer
    assert list(unchanged.tokens) == harness.greedy([*shared, 1, 2, 3], 10)


@pytest.mark.parametrize("kind", ["wrong", "noisy", "tree"])
def test_eng_14_only_committed_tokens_are_reused(harness: Any, kit: Any, kind: str) -> None:
    loop = harness.loop()
    prompt = prompt_of(2)
    answer = harness.greedy(prompt, 20)
    job, result = harness.job(prompt, 20, kit.Scripted(prompt, answer, kind))
    finish(loop, kit, job)
    (kept,) = kit.sequences(loop.pool)
    assert kept.tokens == [*prompt, *result.tokens][: len(kept.tokens)]


def test_sfx_10_the_last_token_of_a_cut_turn_was_never_computed(harness: Any, kit: Any) -> None:
    loop = harness.loop()
    prompt = prompt_of(7)
    job, result = harness.job(prompt, 9)
    finish(loop, kit, job)
    assert job.completion.finish is FinishReason.LENGTH
    (kept,) = kit.sequences(loop.pool)
    assert len(kept.tokens) == len(prompt) + 9 - 1
    longer = [*prompt, *result.tokens, 5]
    job, result = harness.job(longer, 9)
    finish(loop, kit, job)
    assert job.cached_tokens == len(prompt) + 9 - 1
    assert list(result.tokens) == harness.greedy(longer, 9)


async def report_of(engine: Engine, request: GenerationRequest) -> Report:
    found = [delta.report async for delta in engine.generate(request)][-1]
    assert found is not None
    return found


def request(prompt: list[int], run: str, most: int = 10, on: bool = True) -> GenerationRequest:
    trajectory = Trajectory(run, Scope(run, "tiny"))
    return GenerationRequest(tuple(prompt), trajectory, most, speculation=SpeculationParams(enabled=on))


@pytest.mark.parametrize("on", [True, False])
def test_eng_17_the_cap_comes_from_the_window_that_users_see(tiny_model: Path, on: bool) -> None:
    async def scenario(engine: Engine) -> None:
        assert engine.window == 100
        for _ in range(2):
            report = await report_of(engine, request(prompt_of(5, 90), "run", most=10**9, on=on))
            assert report.prompt_tokens + report.completion_tokens <= 100

    with_engine(tiny_model, scenario, window=100)


def test_eng_16_a_long_draft_meets_the_end_of_the_window(tiny_model: Path) -> None:
    async def scenario(engine: Engine) -> None:
        taught = await report_of(engine, request(prompt_of(5, 60), "run", most=40))
        near = [*prompt_of(5, 60), *taught.token_ids[:36]]
        report = await report_of(engine, request(near, "run", most=10**6))
        assert report.token_ids == taught.token_ids[36:40]
        assert report.drafted_total > 0

    with_engine(tiny_model, scenario, window=100)


def test_eng_31_drafts_cost_no_prefix_hit(tiny_model: Path) -> None:
    async def scenario(engine: Engine) -> None:
        hits = {}
        for on in (True, False):
            reports = [await report_of(engine, request(prompt_of(8, 200), f"run {on}", on=on)) for _ in range(2)]
            hits[on] = [report.cached_tokens for report in reports]
        assert hits[True] == hits[False] == [0, 199]

    with_engine(tiny_model, scenario)
