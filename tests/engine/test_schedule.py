"""Who runs when: prompts share passes fairly, priorities hold, and giving a place up loses nothing."""

import random
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentspec.engine.attention import Segment
from agentspec.engine.loop import StepLoop
from agentspec.engine.schedule import GUARANTEED, rank, shares
from agentspec.kernels.cpu.attend import PAGE
from agentspec.types import SamplingParams

SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=4, frequency_penalty=0.3)


def prompt_of(seed: int, length: int) -> list[int]:
    return [random.Random(seed).randrange(256) for _ in range(length)]


def asking(uncomputed: int, submitted: float, priority: int = 0) -> Any:
    return SimpleNamespace(
        uncomputed=uncomputed,
        request=SimpleNamespace(priority=priority),
        clock=SimpleNamespace(submitted=submitted),
    )


class Passes:
    """Rows of every pass of a loop, by sequence."""

    def __init__(self, loop: StepLoop, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[list[int]] = []
        forward = loop.target.forward

        def recorded(segments: list[Segment], keep: list[int]) -> Any:
            self.rows.append([len(segment.tokens) for segment in segments])
            return forward(segments, keep)

        monkeypatch.setattr(loop.target, "forward", recorded)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 2)), max_size=8), st.integers(1, 300))
def test_a_budget_is_used_up_and_not_exceeded(asked: list[tuple[int, int]], budget: int) -> None:
    jobs = [asking(size, age, priority) for age, (size, priority) in enumerate(asked)]
    given_ = shares(jobs, [job.uncomputed for job in jobs], budget)
    assert sum(given_) == min(budget, sum(size for size, _ in asked))
    assert all(0 <= part <= job.uncomputed for part, job in zip(given_, jobs, strict=True))
    if jobs:
        first = min(jobs, key=rank)
        assert given_[jobs.index(first)] >= min(first.uncomputed, budget // GUARANTEED)


def test_short_prompts_come_first_and_the_oldest_goes_on() -> None:
    assert shares([asking(8000, 0), asking(30, 1), asking(500, 2)], [8000, 30, 500], 256) == [64, 30, 162]
    assert shares([asking(8000, 0, priority=1), asking(8000, 1, priority=0)], [8000, 8000], 256) == [0, 256]
    assert shares([asking(8000, 0), asking(9, 1)], [0, 9], 256) == [0, 9]


def test_a_short_request_gets_its_first_token_in_the_next_pass_while_a_long_prompt_is_computed(
    harness: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = harness.loop(prefill_chunk=32)
    passes = Passes(loop, monkeypatch)
    long, waited = harness.job(prompt_of(1, 450), 3, trajectory="long")
    loop.add(long)
    for _ in range(3):
        loop.step()
    short, answered = harness.job(prompt_of(2, 20), 5, trajectory="short")
    loop.add(short)
    loop.step()
    assert len(answered.deltas) == 1
    assert short.tally.steps == 1
    for _ in range(4):
        before = long.computed
        loop.step()
        assert long.computed == before + 32, "one chunk in each pass, beside the other's tokens"
    assert len(answered.tokens) == 5
    assert max(sum(rows) for rows in passes.rows) <= 32 + 1
    kit.drain(loop)
    assert list(waited.tokens) == harness.greedy(prompt_of(1, 450), 3)
    assert list(answered.tokens) == harness.greedy(prompt_of(2, 20), 5)


def test_a_prompt_within_the_chunk_takes_one_pass_to_its_first_token(
    harness: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = harness.loop(prefill_chunk=64)
    passes = Passes(loop, monkeypatch)
    job, result = harness.job(prompt_of(3, 64), 4)
    loop.add(job)
    kit.drain(loop)
    assert passes.rows == [[64], [1], [1], [1]]
    report = result.deltas[-1].report
    assert (report.steps, report.completion_tokens, report.decode_tokens) == (4, 4, 3)
    again, result = harness.job(prompt_of(3, 64), 4)
    loop.add(again)
    kit.drain(loop)
    report = result.deltas[-1].report
    assert (report.cached_tokens, report.steps, report.decode_tokens, report.prefill_s) == (63, 4, 4, 0)


def test_the_lower_number_is_served_first_and_takes_a_running_place(harness: Any, kit: Any) -> None:
    loop = harness.loop(max_running=1)
    order = []
    jobs = {}
    for name, priority in (("patient", 5), ("late", 9), ("normal", 0), ("urgent", -3)):
        job, result = harness.job(prompt_of(priority, 30), 12, trajectory=name, priority=priority)
        jobs[name] = (job, result)
    loop.add(jobs["patient"][0])
    loop.step()
    loop.step()
    for name in ("late", "normal", "urgent"):
        loop.add(jobs[name][0])
    while not loop.idle:
        loop.step()
        order += [name for name, (job, _) in jobs.items() if job.completion.finish and name not in order]
    assert order == ["urgent", "normal", "patient", "late"]
    assert loop.scheduler.preemptions == 1
    for job, result in jobs.values():
        assert list(result.tokens) == harness.greedy(prompt_of(job.request.priority, 30), 12)
        assert result.deltas[-1].report.cached_tokens == 0


def test_nobody_gives_a_place_up_for_a_request_that_does_not_fit_all_the_same(harness: Any, kit: Any) -> None:
    loop = harness.loop(kv_bytes=8 * harness.target.shape.page_bytes, prefill_chunk=512)
    big, _ = harness.job(prompt_of(1, 250), 30, trajectory="big")
    lower = [harness.job(prompt_of(2 + number, 20), 40, trajectory=str(number), priority=5)[0] for number in range(2)]
    for job in [big, *lower]:
        loop.add(job)
    loop.step()
    urgent, result = harness.job(prompt_of(7, 300), 10, trajectory="urgent")
    loop.add(urgent)
    while urgent in loop.scheduler.waiting:
        assert loop.scheduler.preemptions == 0
        loop.step()
    kit.drain(loop)
    assert list(result.tokens) == harness.greedy(prompt_of(7, 300), 10)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4])
def test_the_oldest_prompt_goes_on_in_every_pass_however_small_the_chunk(harness: Any, chunk: int) -> None:
    loop = harness.loop(prefill_chunk=chunk, max_running=4)
    long, _ = harness.job(prompt_of(1, 60), 3, trajectory="long")
    loop.add(long)
    for number in range(20):
        before = long.computed
        loop.add(harness.job(prompt_of(number, 4), 1, trajectory=str(number))[0])
        loop.step()
        assert long.computed > before


def test_a_job_that_only_reads_its_prompt_ends_where_it_is_computed_while_the_job_waits(harness: Any, kit: Any) -> None:
    loop = harness.loop(max_running=1, prefill_chunk=16)
    reader, read = harness.job(prompt_of(4, 100), 0, priority=1)
    urgent, result = harness.job(prompt_of(4, 100), 3)
    loop.add(reader)
    loop.step()
    loop.add(urgent)
    kit.drain(loop)
    assert loop.scheduler.preemptions == 1
    assert read.tokens == ()
    assert list(result.tokens) == harness.greedy(prompt_of(4, 100), 3)


def test_what_is_computed_while_a_job_waits_is_no_decoding_of_its_own(harness: Any, kit: Any) -> None:
    loop = harness.loop(max_running=1, prefill_chunk=16)
    prompt = prompt_of(4, 100)
    first, result = harness.job(prompt, 5, priority=1)
    loop.add(first)
    loop.step()
    loop.add(harness.job(prompt, 40)[0])
    moments = []
    while not first.tally.steps:
        moments.append(perf_counter())
        loop.step()
    assert first.clock.prefilled > moments[-1], "it was given its place in the last of these steps"
    kit.drain(loop)
    assert result.deltas[-1].report.decode_tokens == 5


def test_equals_do_not_take_each_others_places(harness: Any, kit: Any) -> None:
    loop = harness.loop(max_running=2)
    for seed in range(6):
        loop.add(harness.job(prompt_of(seed, 20), 6, trajectory=str(seed))[0])
    kit.drain(loop)
    assert loop.scheduler.preemptions == 0


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_when_memory_runs_out_the_youngest_waits_and_loses_nothing(
    harness: Any, kit: Any, sampling: SamplingParams
) -> None:
    prompts = [prompt_of(seed, 40) for seed in range(4)]
    alone = []
    for prompt in prompts:
        loop = harness.loop()
        job, result = harness.job(prompt, 150, sampling=sampling)
        loop.add(job)
        kit.drain(loop)
        alone.append(result.tokens)
    loop = harness.loop(kv_bytes=harness.target.shape.page_bytes * 7)
    results = []
    for number, prompt in enumerate(prompts):
        drafter = kit.Scripted(prompt, alone[number], "noisy")
        job, result = harness.job(prompt, 150, drafter, sampling, trajectory=str(number))
        loop.add(job)
        results.append(result)
    while not loop.idle:
        loop.step()
        assert loop.pool.pages <= loop.pool.limit
    assert loop.scheduler.preemptions > 0
    assert [result.tokens for result in results] == alone
    assert loop.pool.held == 0


def test_drafts_take_only_memory_that_is_there(harness: Any, kit: Any) -> None:
    prompt = prompt_of(6, 20)
    answer = harness.greedy(prompt, PAGE - 20)
    loop = harness.loop(kv_bytes=harness.target.shape.page_bytes)
    job, result = harness.job(prompt, PAGE - 20, kit.Scripted(prompt, answer, "tree"))
    loop.add(job)
    kit.drain(loop)
    assert list(result.tokens) == answer
    assert loop.scheduler.preemptions == 0
    assert result.deltas[-1].report.accepted_total > 0


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_two_hundred_requests_with_aborts_and_preemptions_leave_no_page_in_use(
    harness: Any, kit: Any, seed: int
) -> None:
    dice = random.Random(seed)
    loop = harness.loop(max_running=4, prefill_chunk=32, kv_bytes=harness.target.shape.page_bytes * 12)
    prompts = [prompt_of(number, dice.randint(1, 150)) for number in range(6)]
    jobs, results = [], []
    for number in range(200):
        prompt = dice.choice(prompts)
        job, result = harness.job(prompt, dice.randint(1, 6), trajectory=str(number), priority=dice.randrange(3))
        jobs.append((job, prompt))
        results.append(result)
        loop.add(job)
    while not loop.idle:
        for chance, act in ((0.2, "abort"), (0.2, "preempt")):
            if dice.random() < chance and loop.scheduler.running:
                victim = dice.choice(loop.scheduler.running)
                if act == "abort":
                    victim.cancelled = True
                else:
                    loop.scheduler.preempt(victim)
        loop.step()
    assert loop.pool.held == 0 and not loop.pool.running and not loop.scheduler.waiting
    assert all(node.page.refs == 1 for node in loop.pool._recent)
    assert loop.pool.pages == len(loop.pool._recent) <= loop.pool.limit
    finished = [(job, prompt) for job, prompt in jobs if not job.cancelled]
    assert all(not result.errors for result in results)
    assert len(finished) > 20
    job, prompt = dice.choice(finished)
    assert job.completion.tokens == harness.greedy(prompt, job.completion.max_tokens)


def test_requests_of_one_prompt_compute_it_once(harness: Any, kit: Any) -> None:
    loop = harness.loop()
    prompt = prompt_of(9, 3 * PAGE + 10)
    first, _ = harness.job(prompt, 30, trajectory="0")
    loop.add(first)
    loop.step()
    before = loop.totals["prefill_tokens_total"]
    others = [harness.job(prompt, 30, trajectory=str(number))[0] for number in range(1, 4)]
    for job in others:
        loop.add(job)
    loop.step()
    assert loop.totals["prefill_tokens_total"] == before
    assert [job.cached_tokens for job in others] == [len(prompt) - 1] * 3
    assert loop.pool.held == 3 + 4
    kit.drain(loop)
    assert {tuple(job.completion.tokens) for job in [first, *others]} == {tuple(harness.greedy(prompt, 30))}
