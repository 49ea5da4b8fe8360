"""Retrieval from a run's own answers: which tokens it knows, when it drafts, and that others do not notice."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.cache import local
from agentspec.cache.automaton import Int32s
from agentspec.cache.local import EXTRA, Answers, LocalRetrieval
from agentspec.cache.retrieval import Histories
from agentspec.cache.session import HistorySession
from agentspec.config import CacheConfig
from agentspec.engine.plan import fault_of
from agentspec.types import DraftTree, Origin, Outcome, Scope, Trajectory

RUN = Trajectory("run", Scope("tenant", "model"))
TLAR = frozenset({"tlar"})
BOTH = frozenset({"tlar", "trajectory"})
LOOP = tuple(range(100, 140))
GATE = 512


def ids(values: Sequence[int]) -> Int32s:
    return np.array(values, np.int32)


def looping(count: int) -> list[int]:
    """Tokens of an answer that says the same again and again."""
    return [LOOP[at % len(LOOP)] for at in range(count)]


def say(session: HistorySession, tokens: Sequence[int], budget: int = 8) -> list[DraftTree]:
    """Drafts of steps of one token each."""
    drafts = []
    for token in tokens:
        drafts.append(session.propose(budget))
        session.observe(Outcome((token,), drafts[-1]))
    return drafts


async def turn(
    histories: Histories, prompt: Sequence[int], answer: Sequence[int], sources: frozenset[str] | None
) -> list[DraftTree]:
    """A finished request of the run; its drafts."""
    session = await histories.open(RUN, prompt, sources)
    drafts = say(session, answer)
    session.close()
    await histories.flush()
    return drafts


def test_nothing_is_drafted_before_the_gate_and_the_loop_behind_it() -> None:
    drafts = asyncio.run(turn(Histories(CacheConfig()), [1, 2, 3], looping(600), TLAR))
    assert [len(tree) for tree in drafts[: GATE + 1]] == [1] * (GATE + 1)
    told = looping(700)
    for at in (GATE + 1, GATE + 2, 580):
        assert drafts[at].token == tuple(told[at - 1 : at + 4])
        assert set(drafts[at].origin[1:]) == {Origin.TLAR}


def test_prompts_are_no_answers() -> None:
    drafts = asyncio.run(turn(Histories(CacheConfig()), looping(2000), looping(100), TLAR))
    assert {len(tree) for tree in drafts} == {1}


def test_answers_are_kept_from_request_to_request() -> None:
    async def run() -> list[DraftTree]:
        histories = Histories(CacheConfig())
        await turn(histories, [1, 2, 3], looping(520), TLAR)
        return await turn(histories, [1, 2, 3, *looping(520), 7], looping(560)[520:], TLAR)

    drafts = asyncio.run(run())
    assert [len(tree) for tree in drafts[1:]] == [5] * (len(drafts) - 1)


def test_requests_that_do_not_ask_for_it_do_not_notice() -> None:
    async def run(before: frozenset[str] | None) -> list[DraftTree]:
        histories = Histories(CacheConfig())
        await turn(histories, [1, 2, 3], looping(520), before)
        return await turn(histories, [1, 2, 3, *looping(520), 7], looping(560)[520:], None)

    drafts = asyncio.run(run(BOTH))
    assert drafts == asyncio.run(run(None))
    assert all(origin & Origin.TLAR == 0 for tree in drafts for origin in tree.origin)


def test_continuations_replace_nodes_of_the_histories_and_add_none() -> None:
    drafts = asyncio.run(turn(Histories(CacheConfig()), [1, 2, 3], looping(600), BOTH))
    known = [tree for tree in drafts if len(tree) > 1]
    assert max(len(tree) for tree in known) == 9
    assert drafts[560].origin[1:5] == (Origin.TRAJECTORY | Origin.TLAR,) * 4
    assert drafts[560].origin[5:] == (Origin.TRAJECTORY,) * 4


def test_two_requests_at_once_have_answers_of_their_own_and_memory_counts_them() -> None:
    async def run() -> None:
        histories = Histories(CacheConfig())
        first = await histories.open(RUN, [1, 2, 3], TLAR)
        second = await histories.open(RUN, [4, 5, 6], TLAR)
        history = first.history
        assert first.local is not None and second.local is not None
        say(first, looping(50))
        say(second, looping(20))
        assert (first.local.answers.position, second.local.answers.position) == (50, 20)
        before = history.bytes
        second.close()
        assert history.bytes == before + second.local.answers.index.bytes
        first.close()
        say(first, looping(5))
        assert history.answers is first.local.answers and history.answers.position == 50
        await histories.flush()

    asyncio.run(run())


def test_the_older_half_leaves_and_the_clock_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MOST", 100)
    answers = Answers()
    for _ in range(30):
        answers.extend(ids(range(10)))
        assert len(answers.index) <= 100
    assert answers.position == 300
    assert answers.index.continuations(1) == [(0, 1, 2, 3)]


@settings(deadline=None, max_examples=40)
@given(st.data(), st.lists(st.integers(1, 12), min_size=1, max_size=40), st.integers(1, 20))
def test_every_tree_can_be_verified(data: st.DataObject, steps: list[int], budget: int) -> None:
    answers = Answers()
    answers.extend(np.random.default_rng(5).integers(0, 3, 600).astype(np.int32))
    retrieval, base = (
        LocalRetrieval(answers),
        DraftTree((0, 1, 2), (-1, 0, 1), (0, 1, 2), (0, -1, -1), (0, -1, -2), (0, 1, 1)),
    )
    for tokens in steps:
        own = data.draw(st.sampled_from([base, DraftTree.root(0)]))
        tree = retrieval.united(own, budget)
        assert fault_of(tree, 0, 3) is None
        assert len(tree) - 1 <= budget
        assert sum(origin == Origin.TLAR for origin in tree.origin) <= (budget if len(own) == 1 else EXTRA)
        retrieval.observe(ids(data.draw(st.lists(st.integers(0, 2), min_size=tokens, max_size=tokens))))
    assert 0 <= retrieval.activation.rate <= 1
