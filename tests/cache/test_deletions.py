"""A deletion reaches what was read, or received, before it, whatever waits at that moment."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.cache import history, sharing
from agentspec.cache.automaton import Int32s
from agentspec.cache.codec import digest_of
from agentspec.cache.deletions import Deletions
from agentspec.cache.retrieval import Histories
from agentspec.cache.store import Changes, MemoryStore
from agentspec.config import CacheConfig
from agentspec.types import DraftTree, Outcome, Scope, Trajectory

SCOPE = Scope("tenant", "model")
RUN = Trajectory("run", SCOPE)
OTHER = Trajectory("other", SCOPE)
TEXT = tuple(range(1000, 1100))
SECOND = tuple(range(3000, 3100))


class Slow(MemoryStore):
    """A store whose reads wait at a gate after they have read."""

    def __init__(self) -> None:
        super().__init__(1 << 24, 100_000)
        self.gate = asyncio.Event()
        self.gate.set()
        self.reading = asyncio.Event()
        self.added: dict[str, Int32s] = {}

    async def held_up(self) -> None:
        if not self.gate.is_set():
            self.reading.set()
            await self.gate.wait()

    async def load(self, trajectory: Trajectory) -> Int32s:
        found = await super().load(trajectory)
        await self.held_up()
        return found

    async def news(self, trajectory: Trajectory) -> Int32s:
        found = self.added.get(trajectory.id, np.empty(0, np.int32))
        await self.held_up()
        return found


async def turn(histories: Histories, trajectory: Trajectory, output: tuple[int, ...]) -> None:
    session = await histories.open(trajectory, [1, 2, 3])
    session.observe(Outcome(output, DraftTree.root(0)))
    session.close()
    await histories.flush()


async def drafts(histories: Histories, trajectory: Trajectory, text: tuple[int, ...] = TEXT) -> tuple[int, ...]:
    """What is drafted after the beginning of a text; leaves nothing."""
    session = await histories.branch(trajectory, text[:10])
    tree = session.propose(8)
    session.close()
    return tree.token[1:]


def restarted(body: Callable[[Histories, Slow], Awaitable[None]]) -> None:
    """A body on a process that is new to a store with two trajectories, its reads held up."""

    async def run() -> None:
        store = Slow()
        first = Histories(CacheConfig(), store)
        await turn(first, RUN, TEXT)
        await turn(first, OTHER, SECOND)
        store.gate.clear()
        await body(Histories(CacheConfig(), store), store)

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_deletion_while_a_scope_is_read_back() -> None:
    async def body(histories: Histories, store: Slow) -> None:
        histories.follow(SCOPE)
        await store.reading.wait()
        assert await histories.delete(RUN) is True
        store.gate.set()
        await histories.flush()
        assert await drafts(histories, Trajectory("third", SCOPE)) == ()
        assert await drafts(histories, Trajectory("third", SCOPE), SECOND) == SECOND[10:18]

    restarted(body)


def test_two_deletions_close_together() -> None:
    async def body(histories: Histories, store: Slow) -> None:
        store.gate.set()
        histories.follow(SCOPE)
        await histories.flush()
        store.gate.clear()
        store.reading.clear()
        assert await histories.delete(OTHER) is True
        await store.reading.wait()
        assert await histories.delete(RUN) is True
        store.gate.set()
        await histories.flush()
        for text in (TEXT, SECOND):
            assert await drafts(histories, Trajectory("third", SCOPE), text) == ()

    restarted(body)


def test_a_deletion_while_a_request_waits_for_its_history() -> None:
    async def body(histories: Histories, store: Slow) -> None:
        opening = asyncio.ensure_future(histories.open(RUN, [9, *TEXT[:10]]))
        await store.reading.wait()
        assert await histories.delete(RUN) is True
        store.gate.set()
        session = await opening
        assert session.propose(8).token[1:] == ()
        session.observe(Outcome(TEXT[10:], DraftTree.root(0)))
        session.close()
        await histories.flush()
        assert await histories.inspect(RUN) is None
        for trajectory in (Trajectory("third", SCOPE), RUN):
            assert await drafts(histories, trajectory) == ()

    restarted(body)


def test_a_deletion_while_a_child_waits_for_its_parent() -> None:
    async def body(histories: Histories, store: Slow) -> None:
        child = Trajectory("child", SCOPE, "run")
        opening = asyncio.ensure_future(histories.open(child, TEXT[:10], frozenset({"trajectory"})))
        await store.reading.wait()
        assert await histories.delete(RUN) is True
        store.gate.set()
        session = await opening
        assert session.propose(8).token[1:] == ()
        session.close()
        assert await histories.inspect(RUN) is None

    restarted(body)


@pytest.mark.parametrize("here", [True, False])
def test_a_deletion_while_news_of_other_processes_are_read(here: bool) -> None:
    async def body(histories: Histories, store: Slow) -> None:
        store.gate.set()
        await turn(histories, OTHER, (5,))
        store.gate.clear()
        store.reading.clear()
        store.added = {"run": np.arange(7000, 7100, dtype=np.int32)}
        learning = asyncio.ensure_future(histories.catch_up(SCOPE, Changes("1", ("run",))))
        await store.reading.wait()
        if here:
            assert await histories.delete(RUN) is True
        else:
            store.take(RUN)
            await histories.catch_up(SCOPE, Changes("2", (), frozenset({digest_of(RUN)})))
        store.gate.set()
        await learning
        await histories.flush()
        for text in (TEXT, tuple(range(7000, 7100))):
            assert await drafts(histories, Trajectory("third", SCOPE), text) == ()

    restarted(body)


def test_a_deletion_by_another_process_while_a_scope_is_read_back() -> None:
    async def body(histories: Histories, store: Slow) -> None:
        histories.follow(SCOPE)
        await store.reading.wait()
        store.take(RUN)
        await histories.catch_up(SCOPE, Changes("1", (), frozenset({digest_of(RUN)})))
        store.gate.set()
        await histories.flush()
        assert await drafts(histories, Trajectory("third", SCOPE)) == ()

    restarted(body)


def test_a_request_that_was_received_before_leaves_nothing_and_a_later_one_is_new() -> None:
    async def run() -> None:
        store = Slow()
        histories = Histories(CacheConfig(), store)
        received = time.monotonic()
        assert await histories.delete(RUN) is False
        for start in (histories.open, histories.branch):
            session = await start(RUN, [9, *TEXT[:20], *TEXT[:10]], None, received)
            if start == histories.open:
                assert session.propose(8).token[1:] == TEXT[10:18]
            session.observe(Outcome(TEXT[10:], DraftTree.root(0)))
            session.close()
            await histories.flush()
            assert await histories.inspect(RUN) is None and not histories.shelf.trajectories
            assert await drafts(histories, OTHER) == ()
            await histories.delete(OTHER)
        await turn(histories, RUN, TEXT)
        assert (await store.load(RUN)).tolist() == [1, 2, 3, *TEXT]
        assert await drafts(histories, OTHER) == TEXT[10:18]

    asyncio.run(run())


def test_a_deletion_while_a_long_prompt_is_indexed() -> None:
    async def run() -> None:
        histories = Histories(CacheConfig())
        opening = asyncio.ensure_future(histories.open(RUN, range(20_000)))
        await asyncio.sleep(0)
        assert await histories.delete(RUN) is True
        session = await opening
        assert await histories.inspect(RUN) is None
        session.close()
        await histories.flush()
        assert await histories.inspect(RUN) is None
        assert histories.shelf.bytes == sum(histories.shelf.sizes.values())

    asyncio.run(run())


def test_a_deletion_of_what_made_room_while_its_turn_was_shared() -> None:
    async def run() -> None:
        store = Slow()
        histories = Histories(CacheConfig(), store)
        session = await histories.open(RUN, [1, *TEXT])
        session.close()
        histories.shelf.drop((SCOPE, "run"))
        await histories.delete(RUN)
        await histories.flush()
        assert (await store.load(RUN)).size == 0
        assert await drafts(histories, OTHER) == ()

    asyncio.run(run())


def test_a_deletion_of_a_parent_that_made_room() -> None:
    async def run() -> None:
        histories = Histories(CacheConfig())
        await turn(histories, RUN, TEXT)
        session = await histories.open(Trajectory("child", SCOPE, "run"), [9, *TEXT[:10]], frozenset({"trajectory"}))
        assert session.propose(8).token[1:] == TEXT[10:18]
        histories.shelf.drop((SCOPE, "run"))
        await histories.delete(RUN)
        assert session.propose(8).token[1:] == ()

    asyncio.run(run())


def test_a_deletion_of_what_a_scope_no_longer_knows_that_it_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_SOURCES", 2)

    async def run() -> None:
        histories = Histories(CacheConfig())
        await turn(histories, RUN, TEXT)
        for name in ("a", "b", "c"):
            await turn(histories, Trajectory(name, SCOPE), (5, 6))
        histories.shelf.drop((SCOPE, "run"))
        await histories.delete(RUN)
        await histories.flush()
        assert await drafts(histories, OTHER) == ()

    asyncio.run(run())


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=30))
def test_what_is_remembered_of_deletions_is_right_and_otherwise_careful(actions: list[tuple[int, bool]]) -> None:
    """Beside a twin that remembers everything: exact for the latest, and never too little."""
    deletions, twin, moments = Deletions(most=3), dict[int, float](), [time.monotonic()]
    for which, deleting in actions:
        if deleting:
            deletions.note(digest_of(Trajectory(str(which), SCOPE)))
            twin.pop(which, None)
            twin[which] = time.monotonic()
        moments.append(time.monotonic())
    assert len(deletions.moments) <= 3
    for moment in moments:
        known = sum(at >= moment for at in twin.values()) <= 3
        for which in range(6):
            found = deletions.since(Trajectory(str(which), SCOPE), moment)
            assert found == (twin.get(which, -1.0) >= moment) or (found and not known)


class Uneven(MemoryStore):
    """A store whose every read takes another number of turns of the event loop."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__(1 << 24, 100_000)
        self.dice = dice

    async def load(self, trajectory: Trajectory) -> Int32s:
        await pause(self.dice.randrange(6))
        found = await super().load(trajectory)
        await pause(self.dice.randrange(6))
        return found

    async def recent(self, scope: Scope, limit: int) -> list[str]:
        found = await super().recent(scope, limit)
        await pause(self.dice.randrange(6))
        return found


async def pause(turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(60))
def test_nothing_of_a_deleted_trajectory_is_left_in_any_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests, deletions and restarts at once; each request has a text of its own, known by when it was received."""
    monkeypatch.setattr(sharing, "CHUNK", 7)
    dice = random.Random(seed)
    received: dict[tuple[str, int], float] = {}
    deleted: dict[str, float] = {}

    async def request(histories: Histories, name: str, number: int) -> None:
        text, came = tuple(range(1000 * number, 1000 * number + 40)), time.monotonic()
        received[name, number] = came
        await pause(dice.randrange(20))
        parent = dice.choice([None, "run-0"])
        session = await histories.open(Trajectory(name, SCOPE, parent), [1, 2, *text[:15]], None, came)
        await pause(dice.randrange(20))
        session.observe(Outcome(text[15:], DraftTree.root(0)))
        session.close()

    async def delete(histories: Histories, name: str) -> None:
        await pause(dice.randrange(40))
        deleted[name] = time.monotonic()
        await histories.delete(Trajectory(name, SCOPE))

    async def run() -> None:
        store, number = Uneven(dice), 0
        for _ in range(3):
            histories, tasks = Histories(CacheConfig(), store), list[asyncio.Task[None]]()
            for _ in range(dice.randrange(1, 8)):
                name, number = f"run-{dice.randrange(3)}", number + 1
                action = delete(histories, name) if dice.random() < 0.4 else request(histories, name, number)
                tasks.append(asyncio.create_task(action))
                await pause(dice.randrange(30))
            await asyncio.gather(*tasks)
            await histories.flush()
            assert histories.failures == 0
        for (name, number), came in received.items():
            start, gone = 1000 * number, deleted.get(name, -1.0) >= came
            stored = (await store.load(Trajectory(name, SCOPE))).tolist()
            assert (start + 39 in stored) == (start + 20 in stored) == (not gone)
            text = tuple(range(start, start + 40))
            assert await drafts(histories, Trajectory("fresh", SCOPE), text) == (() if gone else text[10:18])
            if gone:
                assert await drafts(histories, Trajectory(name, SCOPE), text) == ()

    asyncio.run(run())
