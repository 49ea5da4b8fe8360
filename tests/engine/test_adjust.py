"""Penalties, biases, least lengths, stop tokens and log-probabilities: the same with every drafter and without."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentspec.engine.adjust import Adjuster
from agentspec.engine.logprobs import token_logprobs
from agentspec.types import FinishReason, SamplingParams, TokenLogprob

KINDS = ["right", "wrong", "noisy", "tree"]
ADJUSTED = {
    "repetition": SamplingParams(repetition_penalty=1.3),
    "frequency": SamplingParams(frequency_penalty=0.7),
    "presence": SamplingParams(presence_penalty=1.5),
    "all": SamplingParams(0.8, 0.9, 20, 0.01, 5, 1.2, 0.5, 0.4, ((65, 3.0), (66, -100.0)), 12),
}


VARIED = SamplingParams(temperature=1.0, seed=3)


def late(tokens: Sequence[int]) -> int:
    """A token that occurs first in the middle."""
    return next(token for at, token in enumerate(tokens) if at >= 6 and token not in tokens[:at])


def prompt_of(seed: int, length: int = 20) -> list[int]:
    return [random.Random(seed).randrange(256) for _ in range(length)]


def generated(harness: Any, kit: Any, sampling: SamplingParams, count: int = 30, **options: Any) -> Any:
    """The finished result; `answer` and `kind` make a drafter, other options are those of the request."""
    prompt = prompt_of(3)
    answer, kind = options.pop("answer", None), options.pop("kind", None)
    drafter = None if kind is None else kit.Scripted(prompt, answer, kind)
    job, result = harness.job(prompt, count, drafter, sampling)
    job.request = replace(job.request, **options)
    job.completion.end_tokens = frozenset(options.get("stop_tokens", ())) | {kit.END}
    loop = harness.loop()
    loop.add(job)
    kit.drain(loop)
    assert result.errors == []
    return result


def slow(logits: Sequence[float], sampling: SamplingParams, prompt: Sequence[int], made: Sequence[int]) -> list[float]:
    """Token by token, from the rules as they are written."""
    result = []
    for token, logit in enumerate(logits):
        value = logit
        if token in prompt or token in made:
            value = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
        value -= sampling.frequency_penalty * made.count(token) + sampling.presence_penalty * (token in made)
        value += dict(sampling.logit_bias).get(token, 0.0)
        result.append(float("-inf") if len(made) < sampling.min_tokens and token in (0, 2) else value)
    return result


@given(
    logits=st.lists(st.floats(-5, 5, width=32), min_size=8, max_size=8),
    prompt=st.lists(st.integers(0, 7), max_size=5),
    made=st.lists(st.integers(0, 7), max_size=8),
    numbers=st.tuples(st.floats(0.5, 2), st.floats(-2, 2), st.floats(-2, 2)),
    bias=st.dictionaries(st.integers(0, 7), st.floats(-100, 100, width=32), max_size=3),
    least=st.integers(0, 6),
)
def test_adjusted_logits_follow_the_rules(
    logits: list[float],
    prompt: list[int],
    made: list[int],
    numbers: tuple[float, float, float],
    bias: dict[int, float],
    least: int,
) -> None:
    sampling = SamplingParams(0, 1, 0, 0, 0, *numbers, tuple(bias.items()), least)
    adjuster = Adjuster.of(sampling, prompt, {0, 2})
    if adjuster is None:
        return
    for token in made:
        adjuster.push(token)
    before = torch.tensor(logits)
    adjusted = adjuster(before)
    torch.testing.assert_close(adjusted, torch.tensor(slow(logits, sampling, prompt, made)), atol=1e-4, rtol=1e-5)
    assert before.tolist() == logits


def test_nothing_to_adjust_costs_nothing() -> None:
    assert Adjuster.of(SamplingParams(temperature=0.7, top_p=0.9, seed=4), [1], {2}) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ADJUSTED)
def test_eng_19_eng_20_eng_32_penalties_follow_each_nodes_own_path(
    harness: Any, kit: Any, name: str, kind: str
) -> None:
    sampling = ADJUSTED[name]
    plain = generated(harness, kit, sampling)
    drafted = generated(harness, kit, sampling, answer=plain.tokens, kind=kind)
    assert drafted.tokens == plain.tokens
    if kind == "right":
        assert drafted.deltas[-1].report.steps < len(plain.tokens) / 2
    neutral = replace(SamplingParams(), temperature=sampling.temperature, top_p=sampling.top_p, seed=sampling.seed)
    assert plain.tokens != generated(harness, kit, neutral).tokens


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_eng_19_a_least_length_counts_tokens_not_steps(harness: Any, kit: Any, kind: str | None) -> None:
    eager = SamplingParams(logit_bias=((kit.END, 100.0),), min_tokens=6)
    plain = generated(harness, kit, eager)
    assert len(plain.tokens) == 7
    assert plain.tokens[-1] == kit.END
    assert kit.END not in plain.tokens[:-1]
    assert generated(harness, kit, eager, answer=plain.tokens, kind=kind).tokens == plain.tokens


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_a_stop_token_ends_the_turn_within_an_accepted_run(harness: Any, kit: Any, kind: str | None) -> None:
    plain = generated(harness, kit, VARIED)
    stop = late(plain.tokens)
    expected = plain.tokens[: plain.tokens.index(stop) + 1]
    stopped = generated(harness, kit, VARIED, stop_tokens=(stop,), answer=plain.tokens, kind=kind)
    assert stopped.tokens == expected
    assert stopped.deltas[-1].finish == FinishReason.STOP


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [SamplingParams(), ADJUSTED["all"]], ids=["greedy", "all"])
def test_api_35_logprobs_are_the_targets_own_with_every_drafter(
    harness: Any, kit: Any, sampling: SamplingParams, kind: str
) -> None:
    plain = generated(harness, kit, sampling, logprobs=4)
    drafted = generated(harness, kit, sampling, logprobs=4, answer=plain.tokens, kind=kind)
    assert listed(drafted) == listed(plain)
    ids = torch.tensor([[*prompt_of(3), *plain.tokens]])
    with torch.no_grad():
        logits = harness.plain(ids).logits[0, len(prompt_of(3)) - 1 : -1]
    expected = torch.log_softmax(logits.double(), -1)
    for row, entry in zip(expected, listed(plain), strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-3)
        assert [value for _, value in entry.top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-3)


def listed(result: Any) -> list[TokenLogprob]:
    return [entry for delta in result.deltas for entry in delta.logprobs]


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_eng_04_all_lists_end_together(harness: Any, kit: Any, kind: str | None) -> None:
    plain = generated(harness, kit, VARIED)
    stop = late(plain.tokens)
    result = generated(harness, kit, VARIED, stop_tokens=(stop,), logprobs=2, answer=plain.tokens, kind=kind)
    assert 5 <= len(result.tokens) < len(plain.tokens)
    assert [entry.token for entry in listed(result)] == list(result.tokens)
    assert result.deltas[-1].report.completion_tokens == len(result.tokens)


def test_more_top_logprobs_than_tokens_give_what_there_is() -> None:
    (entry,) = token_logprobs(torch.tensor([[0.0, 1.0, float("-inf")]]), (1,), 20)
    assert [token for token, _ in entry.top] == [1, 0, 2]
    assert entry.top[2][1] == float("-inf")
