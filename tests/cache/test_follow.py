"""Two processes on one Redis: what one learns, or deletes, the other knows within a second."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from agentspec.cache import follow
from agentspec.cache.draft import compile_kernels
from agentspec.cache.redis_store import RedisStore
from agentspec.cache.retrieval import Histories
from agentspec.config import CacheConfig
from agentspec.types import DraftTree, Outcome, Scope, Trajectory
from tests.redis_process import Server

SCOPE = Scope("tenant", "model")
RUN = Trajectory("run", SCOPE)
TEXT = tuple(range(1000, 1100))
OWN = frozenset({"trajectory"})
SHARED = frozenset({"scope"})

Body = Callable[[Histories, Histories], Awaitable[None]]


def run(url: str, body: Body) -> None:
    """A body on two processes' histories, which have both seen the scope."""
    compile_kernels()

    async def inner() -> None:
        config = CacheConfig(redis_url=url, deadline_ms=2000)
        both = [Histories(config, RedisStore(config)) for _ in range(2)]
        try:
            for number, histories in enumerate(both):
                await turn(histories, Trajectory(f"wake-{number}", SCOPE), [1, 2], [3])
            await body(*both)
            assert [histories.failures for histories in both] == [0, 0]
        finally:
            for histories in both:
                await histories.close()

    asyncio.run(asyncio.wait_for(inner(), 30))


async def turn(histories: Histories, trajectory: Trajectory, prompt: list[int], output: list[int]) -> None:
    session = await histories.open(trajectory, prompt)
    session.observe(Outcome(tuple(output), DraftTree.root(0)))
    session.close()
    await histories.flush()


async def draft(
    histories: Histories, trajectory: Trajectory, prompt: list[int], sources: frozenset[str]
) -> tuple[int, ...]:
    """The draft after a prompt; leaves nothing."""
    session = await histories.branch(trajectory, prompt, sources)
    tree = session.propose(8)
    session.close()
    return tree.token[1:]


async def within_a_second(holds: Callable[[], Awaitable[bool]]) -> bool:
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        if await holds():
            return True
        await asyncio.sleep(0.02)
    return False


def test_a_turn_of_one_process_drafts_on_the_other_within_a_second(redis_server: Server) -> None:
    async def body(first: Histories, second: Histories) -> None:
        other = Trajectory("other", SCOPE)
        await turn(second, RUN, [7, 8], [9])
        await turn(first, RUN, [7, 8, 9, 4], list(TEXT))

        async def of_the_scope() -> bool:
            return await draft(second, other, list(TEXT[:10]), SHARED) == TEXT[10:18]

        async def of_the_trajectory() -> bool:
            return await draft(second, RUN, list(TEXT[:10]), OWN) == TEXT[10:18]

        assert await within_a_second(of_the_scope)
        assert await within_a_second(of_the_trajectory)
        assert await draft(second, other, list(TEXT[:10]), OWN) == ()

    run(redis_server.url, body)


def test_what_both_add_to_one_trajectory_is_known_to_both(redis_server: Server) -> None:
    texts = [list(range(2000 + 100 * number, 2050 + 100 * number)) for number in range(6)]

    async def body(first: Histories, second: Histories) -> None:
        for number, text in enumerate(texts):
            await turn((first, second)[number % 2], RUN, [number], text)
            await asyncio.sleep(0.05)
        for histories in (first, second):

            async def knows_all(histories: Histories = histories) -> bool:
                drafts = [await draft(histories, RUN, text[:10], OWN) for text in texts]
                return drafts == [tuple(text[10:18]) for text in texts]

            assert await within_a_second(knows_all)
        history = second.shelf.trajectories[SCOPE, "run"]
        known = history.index.tokens
        await asyncio.sleep(0.6)
        assert history.index.tokens == known

    run(redis_server.url, body)


def test_a_deletion_by_one_process_reaches_the_other_within_a_second(redis_server: Server) -> None:
    async def body(first: Histories, second: Histories) -> None:
        told: list[frozenset[str]] = []
        second.on_forgotten = lambda scope, digests: told.append(digests)
        await turn(first, RUN, [7, 8], list(TEXT))

        async def learned() -> bool:
            return await draft(second, Trajectory("other", SCOPE), list(TEXT[:10]), SHARED) == TEXT[10:18]

        assert await within_a_second(learned)
        assert await first.delete(RUN) is True

        async def forgotten() -> bool:
            return await draft(second, Trajectory("other", SCOPE), list(TEXT[:10]), SHARED) == ()

        assert await within_a_second(forgotten)
        assert len(told) == 1
        assert await draft(first, Trajectory("other", SCOPE), list(TEXT[:10]), SHARED) == ()
        await turn(first, RUN, [5], [6])
        await asyncio.sleep(0.6)
        assert (SCOPE, "run") in first.shelf.trajectories

    run(redis_server.url, body)


def test_nothing_crosses_from_one_tenant_to_another_on_a_shared_redis(redis_server: Server) -> None:
    async def body(first: Histories, second: Histories) -> None:
        thief = Scope("thief", "model")
        await turn(second, Trajectory("wake", thief), [1, 2], [3])
        await turn(first, RUN, [7, 8], list(TEXT))
        await asyncio.sleep(0.6)
        for histories in (first, second):
            for name in ("run", "other"):
                prompt = list(TEXT[:10])
                assert await draft(histories, Trajectory(name, thief), prompt, OWN | SHARED) == ()
        assert second.store is not None
        assert (await second.store.load(Trajectory("run", thief))).size == 0
        assert "run" not in await second.store.recent(thief, 99)

    run(redis_server.url, body)


def test_an_idle_scope_is_not_asked_about(redis_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "POLL_S", 0.01)
    monkeypatch.setattr(follow, "IDLE_S", 0.05)

    async def body(first: Histories, second: Histories) -> None:
        assert first.follower is not None and first.follower.task is not None
        await asyncio.wait_for(first.follower.task, 5)
        await turn(second, RUN, [7, 8], list(TEXT))
        await turn(first, Trajectory("awake", SCOPE), [1], [2])

        async def learned() -> bool:
            return await draft(first, Trajectory("other", SCOPE), list(TEXT[:10]), SHARED) == TEXT[10:18]

        assert await within_a_second(learned)

    run(redis_server.url, body)
