"""Simulation without a model: what counts as a step, and that nothing drafts from what is still to come."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.cache.automaton import Int32s
from agentspec.cache.gaps import GAP
from agentspec.config import CacheConfig
from agentspec.traces.schema import Trace, Turn, parse_trace
from agentspec.traces.simulate import (
    ARMS,
    BUDGETS,
    Drafting,
    Nodes,
    Nothing,
    Recording,
    Retrieval,
    Simulated,
    Written,
    accepted,
    looked_up,
    recording_of,
    simulate,
    with_reasoning,
)
from agentspec.traces.stepwise import Stepwise

tokens = st.lists(st.integers(0, 4), min_size=1, max_size=40)


def ids(values: Sequence[int]) -> Int32s:
    return np.array(values, np.int32)


def run(name: str, *turns: tuple[Sequence[int], Sequence[int]]) -> Recording:
    """A recording whose prompts share nothing that it knows of."""
    written = tuple(Written(0, ids(prompt), ids(answer)) for prompt, answer in turns)
    return Recording(name, "source", "domain", name, written)


def steps(runs: Sequence[Simulated], arm: str, budget: int) -> list[int]:
    return [simulated.tallies[arm][budget].steps for simulated in runs]


class Spy:
    """Drafts like another one and writes down what it was told and what it proposed."""

    def __init__(self, inner: Drafting) -> None:
        self.inner = inner
        self.nested = inner.nested
        self.known: list[int] = []
        self.told: list[tuple[int, ...]] = []
        self.proposals: list[tuple[tuple[int, ...], int, Nodes]] = []

    def open(self, recording: Recording, prompt: Int32s) -> None:
        self.known = prompt.tolist()
        self.inner.open(recording, prompt)

    def propose(self, budget: int) -> Nodes:
        nodes = self.inner.propose(budget)
        self.proposals.append((tuple(self.known), budget, nodes))
        return nodes

    def observe(self, tokens: Int32s) -> None:
        self.known += tokens.tolist()
        self.told.append(tuple(tokens.tolist()))
        self.inner.observe(tokens)

    def close(self) -> None:
        self.inner.close()


class Repeating:
    """Proposes so many times the last token, budget by budget."""

    nested = False

    def __init__(self) -> None:
        self.last = 0

    def open(self, recording: Recording, prompt: Int32s) -> None:
        self.last = int(prompt[-1])

    def propose(self, budget: int) -> Nodes:
        return (self.last, *[self.last] * budget), tuple(range(-1, budget))

    def observe(self, tokens: Int32s) -> None:
        self.last = int(tokens[-1])

    def close(self) -> None: ...


def test_a_step_commits_the_accepted_path_and_one_token_more() -> None:
    drafting: dict[str, Drafting] = {"none": Nothing(), "repeating": Repeating()}
    runs = simulate([run("a", ([7], [7] * 10), ([7], [1, 2, 3]))], drafting, (1, 4, 8))
    assert runs[0].tokens == 13
    assert [steps(runs, "none", budget) for budget in (1, 4, 8)] == [[13], [13], [13]]
    assert [steps(runs, "repeating", budget) for budget in (1, 4, 8)] == [[5 + 3], [2 + 3], [2 + 3]]
    assert runs[0].tallies["repeating"][4].drafted == 5 * 4


def test_accepted_follows_the_answer_through_the_tree() -> None:
    nodes = ((0, 5, 6, 7, 8), (-1, 0, 0, 2, 3))
    assert accepted(nodes, [6, 7, 9]) == [2, 3]
    assert accepted(nodes, [6, 7]) == [2, 3]
    assert accepted(nodes, [5, 7]) == [1]
    assert accepted(nodes, [9]) == accepted(nodes, []) == []


@settings(deadline=None, max_examples=30)
@given(tokens, tokens, tokens, st.sampled_from(sorted(ARMS)))
def test_no_draft_knows_what_is_still_to_come(prompt: list[int], answer: list[int], other: list[int], arm: str) -> None:
    """Each is asked with exactly what was committed, and a different rest of the answer changes nothing before it."""
    half = len(answer) // 2
    spies = []
    for rest in (answer[half:], other):
        spy = Spy(ARMS[arm](CacheConfig()))
        simulate([run("a", (prompt, answer)), run("b", (prompt, answer[:half] + rest))], {arm: spy}, (2, 8))
        spies.append([entry for entry in spy.proposals if len(entry[0]) <= len(prompt) + half])
        whole = [*prompt, *answer[:half], *rest]
        assert all(
            list(known) in (whole[: len(known)], [*prompt, *answer][: len(known)]) for known, _, _ in spy.proposals
        )
    first, second = spies
    size = min(len(first), len(second))
    assert first[:size] == second[:size]


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.tuples(tokens, tokens), min_size=1, max_size=3),
    st.sampled_from(["lookup", "local", "hybrid", "scaffold"]),
)
def test_budgets_together_are_budgets_one_by_one(turns: list[tuple[list[int], list[int]]], arm: str) -> None:
    recordings = [run(str(at), turn, turn) for at, turn in enumerate(turns)]
    together = simulate(recordings, {arm: ARMS[arm](CacheConfig())}, BUDGETS)
    for budget in BUDGETS:
        alone = simulate(recordings, {arm: ARMS[arm](CacheConfig())}, (budget,))
        assert steps(alone, arm, budget) == steps(together, arm, budget)


def test_budgets_together_are_budgets_one_by_one_for_drafters_that_learn_from_steps() -> None:
    loop = [at % 37 for at in range(700)]
    recordings = [run("a", ([1, 2], loop), ([3], loop[5:90])), run("b", ([1], loop[:600] + loop[3:80]))]
    together = simulate(recordings, {"tlar": ARMS["tlar"](CacheConfig())}, BUDGETS)
    for budget in BUDGETS:
        alone = simulate(recordings, {"tlar": ARMS["tlar"](CacheConfig())}, (budget,))
        assert steps(alone, "tlar", budget) == steps(together, "tlar", budget)
    # 513 tokens one by one and 187 by five. The next turn starts elsewhere in the loop: five by one, to the next probe,
    # the others by five, but for one where the first turn's end is what was said last.
    assert steps(together, "tlar", 8)[0] == 513 + 38 + 5 + 16 + 1
    assert steps(together, "tlar", 8)[1] > 513


def test_drafters_that_learn_from_steps_are_told_of_their_own() -> None:
    spies = list[Spy]()

    def make() -> Drafting:
        spies.append(Spy(Repeating()))
        return spies[-1]

    simulate([run("a", ([7], [7] * 10), ([8], [1, 2]))], {"repeating": Stepwise(make)}, (1, 4))
    assert [[len(told) for told in spy.told] for spy in spies] == [[5, 5, 1, 1], [2, 2, 2, 2, 2, 1, 1]]
    assert all([token for told in spy.told for token in told] == [7] * 10 + [1, 2] for spy in spies)


def test_every_token_is_told_once_in_order() -> None:
    spy = Spy(Retrieval(CacheConfig(), None))
    simulate([run("a", ([1, 2, 3, 1, 2], [3, 1, 2, 3, 9, 9]))], {"hybrid": spy}, (2, 8))
    assert [token for told in spy.told for token in told] == [3, 1, 2, 3, 9, 9]


def test_hybrid_knows_earlier_runs_and_local_does_not() -> None:
    text = list(range(100, 140))
    runs = simulate(
        [run("a", ([1], text)), run("b", ([1], text))], {arm: ARMS[arm](CacheConfig()) for arm in ("local", "hybrid")}
    )
    assert steps(runs, "local", 64) == [40, 40]
    assert steps(runs, "hybrid", 64)[0] == 40
    assert steps(runs, "hybrid", 64)[1] < 6


def test_the_scaffold_helps_the_very_first_answer() -> None:
    prompt, answer = [7, 1, 2, 3], [4, 5, 6, 7, 90, 91, 8, 9, 10]
    scaffold = (ids([1, 2, 3, 4, 5, 6, 7, GAP, 8, 9, 10]),)
    alone = run("a", (prompt, answer))
    known = replace(alone, scaffold=scaffold)
    arms = {arm: ARMS[arm](CacheConfig()) for arm in ("hybrid", "scaffold")}
    runs = simulate([known], arms)
    assert steps(runs, "hybrid", 16) == [9]
    assert steps(runs, "scaffold", 16)[0] <= 5
    runs = simulate([alone], {arm: ARMS[arm](CacheConfig()) for arm in ("hybrid", "scaffold")})
    assert steps(runs, "scaffold", 16) == steps(runs, "hybrid", 16)


@settings(deadline=None, max_examples=100)
@given(tokens)
def test_prompt_lookup_equals_its_slow_twin(known: list[int]) -> None:
    expected = -1
    for size in (3, 2, 1):
        places = [end for end in range(size, len(known)) if known[end - size : end] == known[len(known) - size :]]
        if places:
            expected = max(places)
            break
    assert looked_up(ids(known), 3) == expected


def trace(**fields: Any) -> Trace:
    messages = [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c", "reasoning_content": "r"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "e"},
    ]
    return parse_trace({"id": "t", "source": "s", "domain": "d", "messages": messages, **fields})


def letters(turn: Turn) -> tuple[list[int], list[int]]:
    """Characters as tokens."""
    text = "".join(message["content"] for message in turn.prompt)
    return [ord(letter) for letter in text], [ord(turn.trace.messages[turn.index]["content"])]


def test_a_recording_keeps_prompts_by_what_is_new_and_gives_them_whole() -> None:
    recording = recording_of(trace(group="g"), letters)
    assert [(turn.kept, turn.prompt.tolist()) for turn in recording.turns] == [(0, [97, 98]), (2, [99, 100])]
    assert [(prompt.tolist(), answer.tolist()) for prompt, answer in recording.prompts()] == [
        ([97, 98], [99]),
        ([97, 98, 99, 100], [101]),
    ]
    assert recording.group == "g" and recording.scaffold == ()
    known = recording_of(trace(tools=[]), letters, scaffold=lambda of: [ids([len(of.tools or "none")])])
    assert [document.tolist() for document in known.scaffold] == [[4]]
    assert len(recording_of(trace(), letters, 1).turns) == 1
    assert recording_of(trace(), letters).group == "t"


@pytest.mark.parametrize(
    ("message", "content"),
    [({"content": "c"}, "c"), ({"content": None, "reasoning_content": "r"}, "<think>\nr\n</think>\n\n")],
)
def test_reasoning_is_part_of_what_the_model_wrote(message: dict[str, Any], content: str) -> None:
    assert with_reasoning({"role": "assistant", **message}) == {"role": "assistant", "content": content}
