"""Log-probabilities of prompt tokens: those of a plain forward, whatever is cached and however the prompt is cut."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from agentspec.engine import loop as loop_module
from agentspec.engine.job import Job
from agentspec.engine.logprobs import rows_at_once, token_logprobs
from agentspec.types import FinishReason, TokenLogprob

PROMPT = [(7 * i * i + 3) % 256 for i in range(90)]


def scoring(harness: Any, prompt: Sequence[int], max_tokens: int = 0, top: int = 3) -> tuple[Job, Any]:
    job, result = harness.job(prompt, max_tokens)
    job.request = replace(job.request, prompt_logprobs=top)
    return job, result


def told(result: Any) -> list[TokenLogprob]:
    assert not result.errors
    return [one for delta in result.deltas for one in delta.prompt_logprobs]


def expected(harness: Any, prompt: Sequence[int]) -> Any:
    """Log-probabilities (tokens but the first, vocabulary) by transformers' own forward."""
    with torch.inference_mode():
        return torch.log_softmax(harness.plain(torch.tensor([prompt])).logits[0, :-1].double(), -1)


def check(harness: Any, prompt: Sequence[int], found: Sequence[TokenLogprob], top: int = 3) -> None:
    logs = expected(harness, prompt)
    assert [one.token for one in found] == list(prompt[1:])
    for row, one in zip(logs, found, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token]), abs=1e-4)
        assert [value for _, value in one.top] == pytest.approx(row.topk(top).values.tolist(), abs=1e-4)
        assert abs(one.rank - 1 - int((row > row[one.token]).sum())) <= int((abs(row - row[one.token]) < 1e-4).sum())


@pytest.mark.parametrize("chunk", [1, 7, 256])
def test_they_are_those_of_a_plain_forward(harness: Any, kit: Any, chunk: int) -> None:
    loop = harness.loop(prefill_chunk=chunk)
    job, result = scoring(harness, PROMPT)
    loop.add(job)
    kit.drain(loop)
    check(harness, PROMPT, told(result))
    assert (result.tokens, result.deltas[-1].finish) == ((), FinishReason.LENGTH)
    assert result.deltas[-1].report.steps == 0


def test_few_logits_are_in_memory_at_once(harness: Any, kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "rows_at_once", lambda vocabulary: 4)
    loop = harness.loop()
    job, result = scoring(harness, PROMPT)
    loop.add(job)
    kit.drain(loop)
    assert max(len(delta.prompt_logprobs) for delta in result.deltas) == 4
    check(harness, PROMPT, told(result))


def test_the_bound_is_on_logits_and_leaves_one_row() -> None:
    assert rows_at_once(2**13) == 2**10
    assert rows_at_once(2**30) == 1


def test_known_positions_are_computed_again_for_them(harness: Any, kit: Any) -> None:
    loop = harness.loop()
    plain, before = harness.job(PROMPT, 5)
    loop.add(plain)
    kit.drain(loop)
    job, result = scoring(harness, PROMPT, max_tokens=5)
    loop.add(job)
    kit.drain(loop)
    check(harness, PROMPT, told(result))
    assert result.tokens == before.tokens
    assert (job.cached_tokens, loop.totals["prefill_tokens_total"]) == (0, 2 * (len(PROMPT) - 1))
    again, _ = harness.job(PROMPT, 5)
    loop.add(again)
    kit.drain(loop)
    assert again.cached_tokens == len(PROMPT) - 1


def test_others_go_on_beside_them(harness: Any, kit: Any) -> None:
    alone = harness.greedy(PROMPT[:20], 30)
    loop = harness.loop(prefill_chunk=8)
    other, decoded = harness.job(PROMPT[:20], 30)
    loop.add(other)
    for _ in range(5):
        loop.step()
    job, result = scoring(harness, PROMPT, max_tokens=4)
    loop.add(job)
    kit.drain(loop)
    assert list(decoded.tokens) == alone
    check(harness, PROMPT, told(result))
    assert list(result.tokens) == harness.greedy(PROMPT, 4)


def test_a_prompt_of_one_token_has_none(harness: Any, kit: Any) -> None:
    for max_tokens in (0, 2):
        loop = harness.loop()
        job, result = scoring(harness, [5], max_tokens)
        loop.add(job)
        kit.drain(loop)
        assert (told(result), len(result.tokens)) == ([], max_tokens)


def test_a_prompt_may_only_be_read(harness: Any, kit: Any) -> None:
    loop = harness.loop()
    job, result = harness.job(PROMPT, 0)
    loop.add(job)
    kit.drain(loop)
    assert (result.tokens, result.deltas[-1].finish, told(result)) == ((), FinishReason.LENGTH, [])
    follower, after = harness.job(PROMPT, 0)
    loop.add(follower)
    kit.drain(loop)
    assert (follower.cached_tokens, after.tokens) == (len(PROMPT) - 1, ())


def test_ranks_count_from_one() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 5.0, 1.0]])
    found = token_logprobs(logits, (2, 1), 1)
    assert [one.rank for one in found] == [2, 1]
    assert found[0].logprob == pytest.approx(1 - math.log(1 + math.exp(2) + math.e))
