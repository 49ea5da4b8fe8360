"""Speculation never changes the output: every drafter, batch size and arrival order against plain decoding."""

import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentspec.engine.attention import Segment
from agentspec.engine.kv import PageTable
from agentspec.errors import InternalError
from agentspec.types import FinishReason, SamplingParams

KINDS = ["silent", "right", "wrong", "noisy", "tree", "raising", "malformed"]
SAMPLED = SamplingParams(temperature=0.7, top_p=0.95, seed=11)


def prompt_of(seed: int, length: int = 20) -> list[int]:
    return [random.Random(seed).randrange(256) for _ in range(length)]


def plain_tokens(harness: Any, kit: Any, prompt: list[int], count: int, sampling: SamplingParams) -> tuple[int, ...]:
    loop = harness.loop()
    job, result = harness.job(prompt, count, sampling=sampling)
    loop.add(job)
    kit.drain(loop)
    return result.tokens  # type: ignore[no-any-return]


@pytest.mark.parametrize("seed", range(4))
def test_speculation_off_equals_transformers_greedy(harness: Any, kit: Any, seed: int) -> None:
    prompt = prompt_of(seed)
    assert list(plain_tokens(harness, kit, prompt, 40, SamplingParams())) == harness.greedy(prompt, 40)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_speculation_never_changes_the_output(
    harness: Any, kit: Any, kind: str, sampling: SamplingParams, count: int
) -> None:
    prompt = prompt_of(3)
    answer = plain_tokens(harness, kit, prompt, count, sampling)
    loop = harness.loop()
    drafter = None if kind == "silent" else kit.Scripted(prompt, answer, kind)
    job, result = harness.job(prompt, count, drafter, sampling)
    loop.add(job)
    kit.drain(loop)
    assert result.tokens == answer
    report = result.deltas[-1].report
    assert sum(delta.tokens for delta in result.deltas) == len(answer) == report.completion_tokens
    if kind == "right" and count == 40:
        assert report.steps <= 8
        assert report.accepted["trajectory"] == report.accepted_total > 30
    if kind in ("raising", "malformed") and count == 40:
        assert job.drafter is None
        assert "drafter" in (job.reason or "")


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_a_batch_with_late_arrivals_equals_one_after_the_other(
    harness: Any, kit: Any, sampling: SamplingParams
) -> None:
    prompts = [prompt_of(seed, 10 + 7 * seed) for seed in range(6)]
    alone = [plain_tokens(harness, kit, prompt, 25, sampling) for prompt in prompts]
    loop = harness.loop(max_running=4, prefill_chunk=8)
    results = []
    for i, prompt in enumerate(prompts):
        kind = KINDS[1:][i % 6]
        job, result = harness.job(prompt, 25, kit.Scripted(prompt, alone[i], kind), sampling, trajectory=str(i))
        loop.add(job)
        results.append(result)
        loop.step()
        loop.step()
    kit.drain(loop)
    assert [result.tokens for result in results] == alone


def kv_equals_a_fresh_prefill(harness: Any, tokens: list[int], table: PageTable) -> None:
    if not tokens:
        return
    fresh = PageTable(harness.target.shape)
    harness.target.forward([Segment(fresh, tuple(tokens), tuple(range(len(tokens))), None)], [0])
    for layer in range(harness.target.shape.layers):
        pairs = zip(table.keys_and_values(layer, len(tokens)), fresh.keys_and_values(layer, len(tokens)), strict=True)
        for mine, right in pairs:
            assert torch.equal(mine, right)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_after_accepts_rejects_preemptions_and_aborts_the_kv_equals_a_fresh_prefill(
    harness: Any, kit: Any, data: st.DataObject
) -> None:
    loop = harness.loop(max_running=3, prefill_chunk=data.draw(st.sampled_from([4, 64])))
    jobs = []
    for i in range(data.draw(st.integers(1, 4))):
        prompt = prompt_of(data.draw(st.integers(0, 5)), data.draw(st.integers(1, 30)))
        answer = harness.greedy(prompt, 12)
        kind = data.draw(st.sampled_from(KINDS[1:]))
        job, _ = harness.job(prompt, 12, kit.Scripted(prompt, answer, kind), trajectory=str(i % 2))
        loop.add(job)
        jobs.append(job)
    while not loop.idle:
        victim = data.draw(st.sampled_from([None, None, None, *jobs]))
        if victim is not None:
            victim.cancelled = True
        if loop.scheduler.running and data.draw(st.integers(0, 4)) == 0:
            loop.scheduler.preempt(data.draw(st.sampled_from(loop.scheduler.running)))
        loop.step()
        for job in loop.scheduler.running:
            length = job.holding.table.length
            assert length <= len(job.tokens) - 1
            kv_equals_a_fresh_prefill(harness, job.tokens[:length], job.holding.table)
    assert not loop.pool.running
    for kept in kit.sequences(loop.pool):
        kv_equals_a_fresh_prefill(harness, kept.tokens, kept.table)


def test_the_second_turn_prefills_only_what_is_new(harness: Any, kit: Any) -> None:
    loop = harness.loop()
    first, result = harness.job(prompt_of(1, 60), 10)
    loop.add(first)
    kit.drain(loop)
    longer = [*prompt_of(1, 60), *result.tokens, *prompt_of(2, 15)]
    before = loop.totals["prefill_tokens_total"]
    second, again = harness.job(longer, 10)
    loop.add(second)
    kit.drain(loop)
    report = again.deltas[-1].report
    assert report.cached_tokens == 60 + len(result.tokens) - 1
    assert loop.totals["prefill_tokens_total"] - before == len(longer) - 1 - report.cached_tokens
    assert list(again.tokens) == harness.greedy(longer, 10)


def test_a_shared_prefix_is_copied_while_its_owner_keeps_its_own(harness: Any, kit: Any) -> None:
    loop = harness.loop()
    system = prompt_of(1, 50)
    for name in ("a", "b"):
        prompt = [*system, *prompt_of(ord(name), 10)]
        job, result = harness.job(prompt, 8, trajectory=name)
        loop.add(job)
        kit.drain(loop)
        assert list(result.tokens) == harness.greedy(prompt, 8)
    assert job.cached_tokens == 50
    assert len(kit.sequences(loop.pool)) == 2


def test_no_prefix_is_shared_across_tenants(harness: Any, kit: Any) -> None:
    loop = harness.loop()
    for tenant in ("a", "b"):
        job, _ = harness.job(prompt_of(1, 50), 4, tenant=tenant)
        loop.add(job)
        kit.drain(loop)
    assert job.cached_tokens == 0


def test_finished_turns_leave_when_memory_is_short(harness: Any, kit: Any) -> None:
    token_bytes = harness.target.shape.token_bytes
    loop = harness.loop(kv_bytes=token_bytes * 320)
    for seed in range(12):
        job, result = harness.job(prompt_of(seed, 40), 4, trajectory=str(seed))
        loop.add(job)
        kit.drain(loop)
        assert list(result.tokens) == harness.greedy(prompt_of(seed, 40), 4)
    assert loop.pool.pages == loop.pool.limit == len(kit.sequences(loop.pool)) == 5
    assert loop.pool.evicted == 7


def test_a_request_waits_while_memory_is_taken(harness: Any, kit: Any) -> None:
    loop = harness.loop(kv_bytes=harness.target.shape.token_bytes * 100)
    jobs = [harness.job(prompt_of(seed, 40), 20, trajectory=str(seed)) for seed in range(3)]
    for job, _ in jobs:
        loop.add(job)
    loop.step()
    assert len(loop.scheduler.running) == 1
    kit.drain(loop)
    assert [list(r.tokens) for _, r in jobs] == [harness.greedy(prompt_of(seed, 40), 20) for seed in range(3)]


def test_a_cancelled_job_leaves_within_one_step(harness: Any, kit: Any) -> None:
    loop = harness.loop()
    job, result = harness.job(prompt_of(1), 200)
    loop.add(job)
    loop.step()
    loop.step()
    count = len(result.deltas)
    job.cancelled = True
    loop.step()
    assert loop.idle
    assert len(result.deltas) == count


def test_eng_16_drafts_stop_at_the_end_of_the_window(harness: Any, kit: Any) -> None:
    prompt = prompt_of(4, 500)
    answer = harness.greedy(prompt, 12)
    loop = harness.loop()
    job, result = harness.job(prompt, 12, kit.Scripted(prompt, answer, "right"))
    loop.add(job)
    kit.drain(loop)
    assert list(result.tokens) == answer
    assert job.completion.finish in (FinishReason.LENGTH, FinishReason.STOP)


def test_a_failing_pass_fails_its_batch_and_the_loop_goes_on(harness: Any, kit: Any) -> None:
    loop = harness.loop()
    bad, failed = harness.job([10**6], 5)
    loop.add(bad)
    kit.drain(loop)
    assert len(failed.errors) == 1
    good, result = harness.job(prompt_of(1), 5)
    loop.add(good)
    kit.drain(loop)
    assert list(result.tokens) == harness.greedy(prompt_of(1), 5)


def test_a_request_that_fails_alone_leaves_its_neighbours_alone(harness: Any, kit: Any) -> None:
    class Broken:
        """A text stream that fails at its third token."""

        def __init__(self) -> None:
            self.left, self.stopped = 3, False

        def push(self, token: int) -> str:
            self.left -= 1
            if self.left == 0:
                raise RuntimeError("broken on purpose")
            return ""

        def finish(self) -> str:
            return ""

    loop = harness.loop()
    bad, failed = harness.job(prompt_of(1), 20, trajectory="bad")
    bad.completion.text = Broken()
    good, result = harness.job(prompt_of(2), 20, trajectory="good")
    loop.add(bad)
    loop.add(good)
    kit.drain(loop)
    assert len(failed.errors) == 1
    assert list(result.tokens) == harness.greedy(prompt_of(2), 20)


def test_no_draft_is_sent_when_it_does_not_pay(harness: Any, kit: Any) -> None:
    prompt = prompt_of(3)
    answer = harness.greedy(prompt, 20)
    loop = harness.loop(per_row=100.0)
    job, result = harness.job(prompt, 20, kit.Scripted(prompt, answer, "right"))
    loop.add(job)
    kit.drain(loop)
    report = result.deltas[-1].report
    assert report.drafted_total == 0
    assert report.reason == "no draft was worth its cost"


def test_a_request_that_cannot_be_started_fails_alone(harness: Any, kit: Any) -> None:
    prompt = prompt_of(5)
    answer = plain_tokens(harness, kit, prompt, 10, SamplingParams())
    loop = harness.loop()
    impossible, failed = harness.job([2**40], 10)
    job, result = harness.job(prompt, 10)
    loop.add(impossible)
    loop.add(job)
    kit.drain(loop)
    assert [type(error) for error in failed.errors] == [InternalError]
    assert result.tokens == answer
