"""Sessions over shared histories."""

import asyncio
import random
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from agentspec.cache.retrieval import Histories
from agentspec.cache.session import HistorySession
from agentspec.cache.store import MemoryStore
from agentspec.config import CacheConfig
from agentspec.errors import InvalidRequest
from agentspec.types import DraftTree, Origin, Outcome, Scope, Trajectory

SCOPE = Scope("tenant", "model")
RUN = Trajectory("run", SCOPE)
TEXT = tuple(range(1000, 1100))


def outcome(*tokens: int) -> Outcome:
    """A step that committed tokens."""
    return Outcome(tokens, DraftTree.root(0))


async def turn(
    histories: Histories, trajectory: Trajectory, prompt: Sequence[int], output: Sequence[int]
) -> list[DraftTree]:
    """One finished request; the drafts of its steps of one token."""
    session = await histories.open(trajectory, prompt)
    drafts = []
    for token in output:
        drafts.append(session.propose(8))
        session.observe(outcome(token))
    session.close()
    await histories.flush()
    return drafts


async def first_draft(
    histories: Histories, trajectory: Trajectory, prompt: Sequence[int], sources: frozenset[str] | None = None
) -> DraftTree:
    """The draft after a prompt."""
    session = await histories.open(trajectory, prompt, sources)
    tree = session.propose(8)
    session.close()
    await histories.flush()
    return tree


def test_a_repeat_in_the_prompt_is_drafted() -> None:
    tree = asyncio.run(first_draft(Histories(CacheConfig()), RUN, [*TEXT, 1, 2, *TEXT[:20]]))
    assert tree.token == TEXT[19:28]
    assert set(tree.origin[1:]) == {Origin.TRAJECTORY}


def test_an_output_is_drafted_in_a_later_turn() -> None:
    async def run() -> DraftTree:
        histories = Histories(CacheConfig())
        await turn(histories, RUN, [1, 2, 3], TEXT)
        return await first_draft(histories, RUN, [1, 2, 3, *TEXT, 5, 6, *TEXT[:10]], frozenset({"trajectory"}))

    assert asyncio.run(run()).token == TEXT[9:18]


def test_a_finished_trajectory_helps_the_next_of_its_scope() -> None:
    async def run() -> tuple[DraftTree, DraftTree]:
        histories = Histories(CacheConfig())
        await turn(histories, RUN, [1, 2, 3], TEXT)
        other = Trajectory("other", SCOPE)
        return (
            await first_draft(histories, other, TEXT[:10]),
            await first_draft(histories, replace(other, id="third"), TEXT[:10], frozenset({"trajectory"})),
        )

    with_scope, without = asyncio.run(run())
    assert with_scope.token == TEXT[9:18]
    assert set(with_scope.origin[1:]) == {Origin.SCOPE}
    assert len(without) == 1


def test_sfx_05_nothing_crosses_a_scope() -> None:
    async def run(owner: Scope) -> DraftTree:
        histories = Histories(CacheConfig(), MemoryStore(1 << 20, 10_000))
        await turn(histories, RUN, [1, 2, 3], TEXT)
        return await first_draft(histories, Trajectory("run", owner), TEXT[:10])

    assert len(asyncio.run(run(Scope("thief", "model")))) == 1
    assert len(asyncio.run(run(Scope("tenant", "another")))) == 1
    assert asyncio.run(run(SCOPE)).token == TEXT[9:18]


def test_sfx_01_finished_requests_stay_within_the_byte_budget() -> None:
    config = CacheConfig(memory_bytes=2 * 1024**2)

    async def run() -> tuple[Histories, list[float]]:
        histories, sizes = Histories(config), []
        source = random.Random(1)
        for number in range(300):
            prompt = [source.randrange(5000) for _ in range(200)]
            await turn(histories, Trajectory(f"run-{number}", SCOPE), prompt, [1, 2])
            sizes.append(histories.stats()["history_bytes"])
        return histories, sizes

    histories, sizes = asyncio.run(run())
    assert max(sizes) <= config.memory_bytes
    assert sizes[-1] > config.memory_bytes // 4
    assert histories.stats()["history_evictions_total"] > 0
    assert histories.stats()["history_trajectories"] < 300
    assert histories.stats()["history_sessions"] == 0


def test_sfx_02_sessions_in_random_order_on_shared_trajectories() -> None:
    async def run() -> Histories:
        histories = Histories(CacheConfig(memory_bytes=1024**2))
        source = random.Random(2)
        sessions: list[HistorySession] = []
        for _ in range(600):
            action = source.randrange(4)
            if action == 0 and len(sessions) < 36:
                trajectory = Trajectory(f"run-{source.randrange(4)}", SCOPE, "run-0")
                sessions.append(await histories.open(trajectory, TEXT[: source.randrange(1, 99)]))
            elif sessions:
                session = source.choice(sessions)
                if action == 1:
                    session.close()
                elif action == 2:
                    session.observe(outcome(*TEXT[: source.randrange(1, 5)]))
                else:
                    assert 1 <= len(session.propose(8)) <= 9
        for session in sessions:
            session.close()
        await histories.flush()
        return histories

    assert asyncio.run(run()).stats()["history_sessions"] == 0


def test_sessions_draft_on_a_thread_while_others_open_and_close() -> None:
    faults: list[BaseException] = []

    def decode(session: HistorySession) -> None:
        try:
            for token in TEXT[20:60]:
                session.propose(8)
                session.observe(outcome(token))
        except BaseException as error:
            faults.append(error)

    async def run() -> None:
        histories = Histories(CacheConfig(scope_tokens=2000, trajectory_tokens=2000))
        for number in range(12):
            sessions = [await histories.open(Trajectory(f"run-{number % 3}", SCOPE), TEXT[:20]) for _ in range(3)]
            threads = [threading.Thread(target=decode, args=(session,)) for session in sessions]
            for thread in threads:
                thread.start()
            await turn(histories, Trajectory("other", SCOPE), TEXT, TEXT[:5])
            for thread in threads:
                thread.join()
            for session in sessions:
                session.close()
        await histories.close()

    asyncio.run(run())
    assert faults == []


def test_a_session_survives_the_eviction_of_its_trajectory() -> None:
    async def run() -> DraftTree:
        histories = Histories(CacheConfig())
        session = await histories.open(RUN, [*TEXT, *TEXT[:10]])
        await histories.delete(RUN)
        session.observe(outcome(TEXT[10]))
        tree = session.propose(8)
        session.close()
        await histories.close()
        return tree

    assert asyncio.run(run()).token == TEXT[10:19]


def test_only_new_tokens_of_a_growing_prompt_are_indexed() -> None:
    async def run() -> tuple[int, int]:
        histories = Histories(CacheConfig())
        await turn(histories, RUN, list(range(500)), [7, 8])
        history = histories.shelf.trajectories[SCOPE, "run"]
        before = history.index.tokens
        await turn(histories, RUN, [*range(500), 7, 8, 9], [10])
        return before, history.index.tokens

    assert asyncio.run(run()) == (502, 504)


def test_sfx_07_a_changed_old_turn_indexes_only_what_follows_it() -> None:
    async def run() -> tuple[int, DraftTree]:
        histories = Histories(CacheConfig())
        await turn(histories, RUN, [*range(5000, 5500), 1, 2, 3, *TEXT], [4])
        stripped = [*range(5000, 5500), 1, 3, *TEXT, 4, 6, *TEXT[:10]]
        tree = await first_draft(histories, RUN, stripped)
        return histories.shelf.trajectories[SCOPE, "run"].index.tokens, tree

    tokens, tree = asyncio.run(run())
    assert tokens < 604 + 100
    assert tree.token == TEXT[9:18]


def test_a_slid_window_is_not_indexed_again() -> None:
    async def run() -> int:
        histories = Histories(CacheConfig())
        await turn(histories, RUN, [*range(500), *range(2000, 2600)], [4])
        await turn(histories, RUN, [*range(300), *range(2100, 2600), 4, 5], [6])
        return histories.shelf.trajectories[SCOPE, "run"].index.tokens

    assert asyncio.run(run()) < 1101 + 64


def test_sfx_11_long_drafts_on_a_repeat_and_little_hope_on_prose() -> None:
    source = random.Random(3)
    file = [source.randrange(5000) for _ in range(2000)]
    prose = [source.randrange(5000) for _ in range(200)]

    async def run() -> tuple[DraftTree, DraftTree]:
        histories = Histories(CacheConfig())
        session = await histories.open(RUN, [*file, 1, *file[:1000]])
        repeat = session.propose(32)
        session.observe(outcome(*prose))
        free = session.propose(32)
        session.close()
        return repeat, free

    repeat, free = asyncio.run(run())
    assert repeat.token[1:] == tuple(file[1000:1032])
    assert max(repeat.depth) == 32
    assert max(free.depth) < 4
    assert all(logp < -0.5 for logp in free.logp[1:])


def test_sfx_04_another_process_takes_over_from_the_shared_store() -> None:
    async def run() -> tuple[list[DraftTree], list[DraftTree]]:
        store = MemoryStore(1 << 20, 10_000)
        first, second = Histories(CacheConfig(), store), Histories(CacheConfig(), store)
        await turn(first, RUN, [1, 2, 3], TEXT)
        await turn(first, RUN, [1, 2, 3, *TEXT, 4], TEXT[:50])
        prompt = [1, 2, 3, *TEXT, 4, *TEXT[:50], 5]
        left = await first.open(RUN, prompt, frozenset({"trajectory"}))
        right = await second.open(RUN, prompt, frozenset({"trajectory"}))
        drafts: tuple[list[DraftTree], list[DraftTree]] = ([], [])
        for token in TEXT[:30]:
            for session, into in zip((left, right), drafts, strict=True):
                into.append(session.propose(16))
                session.observe(outcome(token))
        await second.flush()
        return drafts

    before, after = asyncio.run(run())
    assert after == before
    assert len(after[-1]) == 17


def test_sfx_04_a_new_process_warms_the_scope_from_the_store() -> None:
    async def run() -> DraftTree:
        store = MemoryStore(1 << 20, 10_000)
        await turn(Histories(CacheConfig(), store), RUN, [1, 2, 3], TEXT)
        second = Histories(CacheConfig(), store)
        await first_draft(second, Trajectory("wake", SCOPE), [1])
        return await first_draft(second, Trajectory("other", SCOPE), TEXT[:10])

    assert asyncio.run(run()).token == TEXT[9:18]


@pytest.mark.parametrize("stored", [False, True])
def test_a_child_inherits_its_parent_read_only(stored: bool) -> None:
    async def run() -> tuple[DraftTree, int]:
        store = MemoryStore(1 << 20, 10_000) if stored else None
        histories = Histories(CacheConfig(), store)
        await turn(histories, RUN, [1, 2, 3], TEXT)
        if stored:
            histories = Histories(CacheConfig(), store)
        tree = await first_draft(
            histories, Trajectory("child", SCOPE, "run"), [9, 9, *TEXT[:10]], frozenset({"trajectory"})
        )
        return tree, histories.shelf.trajectories[SCOPE, "run"].index.tokens

    tree, parent_tokens = asyncio.run(run())
    assert tree.token == TEXT[9:18]
    assert parent_tokens == 3 + len(TEXT)


def test_parallel_sessions_of_one_trajectory_do_not_mix_their_outputs() -> None:
    async def run() -> tuple[int, int]:
        histories = Histories(CacheConfig())
        first = await histories.open(RUN, [1, 2, 3])
        second = await histories.open(RUN, [1, 2, 3])
        for session, token in ((first, 10), (second, 20), (first, 11), (second, 21)):
            session.observe(outcome(token))
        first.close()
        second.close()
        await histories.flush()
        index = histories.shelf.trajectories[SCOPE, "run"].index.generations[-1]
        return index.count([10, 11]) + index.count([20, 21]), index.count([10, 20])

    assert asyncio.run(run()) == (2, 0)


def test_the_oldest_tokens_of_a_long_trajectory_leave() -> None:
    async def run() -> tuple[DraftTree, DraftTree, int]:
        histories = Histories(CacheConfig(trajectory_tokens=1000, scope_tokens=100))
        old, new = list(range(10_000, 10_100)), list(range(20_000, 20_100))
        await turn(histories, RUN, [*old, *range(2000), *new], [1])
        only = frozenset({"trajectory"})
        gone = await first_draft(histories, RUN, [*old[:20]], only)
        kept = await first_draft(histories, RUN, [*new[:20]], only)
        return gone, kept, histories.shelf.trajectories[SCOPE, "run"].index.tokens

    gone, kept, tokens = asyncio.run(run())
    assert len(gone) == 1
    assert kept.token[1] == 20_020
    assert tokens <= 1100


def test_bad_prompts_and_sources_are_refused_by_name() -> None:
    histories = Histories(CacheConfig())
    with pytest.raises(InvalidRequest, match="no tokens"):
        asyncio.run(histories.open(RUN, []))
    with pytest.raises(InvalidRequest, match="'eagle'"):
        asyncio.run(histories.open(RUN, [1], frozenset({"eagle"})))


def test_a_cancelled_open_leaves_the_trajectory_usable() -> None:
    async def run() -> DraftTree:
        histories = Histories(CacheConfig())
        opening = asyncio.create_task(histories.open(RUN, list(range(20_000))))
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        tree = await first_draft(histories, RUN, [*range(20_000), *range(10)])
        assert not histories.shelf.trajectories[SCOPE, "run"].busy
        return tree

    assert asyncio.run(run()).token == tuple(range(9, 18))


def test_a_branch_drafts_from_the_trajectory_and_from_itself_and_leaves_both_alone() -> None:
    async def run() -> tuple[list[DraftTree], list[DraftTree], float]:
        histories = Histories(CacheConfig())
        prompt = [*TEXT, 1, 2, *TEXT[:20]]
        trunk = await histories.open(RUN, prompt)
        branch = await histories.branch(RUN, prompt, frozenset({"trajectory"}))
        before = [trunk.propose(8), branch.propose(8)]
        for token in (*range(500, 520), *range(500, 505)):
            branch.observe(outcome(token))
        after = [trunk.propose(8), branch.propose(8)]
        branch.close()
        trunk.close()
        await histories.flush()
        return before, after, histories.stats()["history_sessions"]

    (trunk, branch), (still, grown), sessions = asyncio.run(run())
    assert trunk.token == branch.token == still.token == TEXT[19:28]
    assert grown.token == tuple(range(504, 513))
    assert sessions == 0


@pytest.mark.parametrize(("prompt", "sources"), [([], None), ([1], frozenset({"oracle"}))])
def test_a_branch_of_nothing_is_refused(prompt: list[int], sources: frozenset[str] | None) -> None:
    with pytest.raises(InvalidRequest):
        asyncio.run(Histories(CacheConfig()).branch(RUN, prompt, sources))


def drafts_of(tree: DraftTree) -> tuple[int, ...]:
    return tree.token[1:]


@pytest.mark.parametrize("stored", [False, True])
def test_a_deleted_trajectory_drafts_nowhere_and_others_still_do(stored: bool) -> None:
    other_text = tuple(range(3000, 3100))

    async def run() -> None:
        store = MemoryStore(1 << 20, 10_000) if stored else None
        histories = Histories(CacheConfig(), store)
        await turn(histories, RUN, [1, 2, 3], TEXT)
        await turn(histories, Trajectory("other", SCOPE), [1, 2, 3], other_text)
        third = Trajectory("third", SCOPE)
        assert drafts_of(await first_draft(histories, third, TEXT[:10])) == TEXT[10:18]
        await histories.delete(third)
        assert await histories.delete(RUN) is True
        await histories.flush()
        for name in ("fourth", "run"):
            assert drafts_of(await first_draft(histories, Trajectory(name, SCOPE), TEXT[:10])) == ()
            await histories.delete(Trajectory(name, SCOPE))
            await histories.flush()
        assert drafts_of(await first_draft(histories, Trajectory("fifth", SCOPE), other_text[:10])) == other_text[10:18]
        assert await histories.delete(RUN) is False
        assert await histories.delete(Trajectory("unknown", SCOPE)) is False
        assert histories.stats()["history_evictions_total"] == 0

    asyncio.run(run())


def test_what_a_scope_learned_from_an_evicted_trajectory_is_deleted_too() -> None:
    async def run() -> None:
        histories = Histories(CacheConfig())
        await turn(histories, RUN, [1, 2, 3], TEXT)
        histories.shelf.drop((SCOPE, "run"))
        assert await histories.delete(RUN) is True
        assert drafts_of(await first_draft(histories, Trajectory("other", SCOPE), TEXT[:10])) == ()

    asyncio.run(run())


def test_a_session_of_a_deleted_trajectory_goes_on_and_leaves_nothing() -> None:
    async def run() -> None:
        store = MemoryStore(1 << 20, 10_000)
        histories = Histories(CacheConfig(), store)
        session = await histories.open(RUN, [1, *TEXT[:10]])
        session.observe(outcome(*TEXT[10:60], *TEXT[:10]))
        assert await histories.delete(RUN) is True
        assert drafts_of(session.propose(8)) == TEXT[10:18]
        session.observe(outcome(*TEXT[10:20]))
        session.close()
        await histories.flush()
        assert (await store.load(RUN)).size == 0
        assert await histories.inspect(RUN) is None
        assert drafts_of(await first_draft(histories, Trajectory("other", SCOPE), TEXT[:10])) == ()
        assert histories.stats()["history_sessions"] == 0
        assert histories.stats()["history_bytes"] == histories.shelf.bytes == sum(histories.shelf.sizes.values())

    asyncio.run(run())


def test_a_turn_that_is_being_shared_when_its_trajectory_is_deleted_stays_out() -> None:
    long = list(range(10_000, 30_000))

    async def run() -> None:
        store = MemoryStore(1 << 24, 100_000)
        histories = Histories(CacheConfig(), store)
        session = await histories.open(RUN, long)
        session.close()
        await asyncio.sleep(0)
        await histories.delete(RUN)
        await histories.flush()
        assert (await store.load(RUN)).size == 0
        assert drafts_of(await first_draft(histories, Trajectory("other", SCOPE), long[19_000:19_010])) == ()

    asyncio.run(run())


def test_a_child_outlives_its_deleted_parent_and_drafts_from_it_no_more() -> None:
    async def run() -> None:
        histories = Histories(CacheConfig())
        await turn(histories, RUN, [1, 2, 3], TEXT)
        child = Trajectory("child", SCOPE, "run")
        session = await histories.open(child, [9, 9, *TEXT[:10]], frozenset({"trajectory"}))
        assert drafts_of(session.propose(8)) == TEXT[10:18]
        await histories.delete(RUN)
        assert drafts_of(session.propose(8)) == ()
        session.close()
        await histories.flush()
        assert (await histories.inspect(child)) is not None

    asyncio.run(run())


def test_a_trajectory_is_described() -> None:
    async def run() -> None:
        histories = Histories(CacheConfig(), MemoryStore(1 << 20, 10_000))
        assert await histories.inspect(RUN) is None
        session = await histories.open(RUN, [*TEXT, 1, *TEXT[:10]])
        tree = session.propose(8)
        session.observe(Outcome((*tree.token[1:4], 5), tree, (1, 2, 3)))
        session.close()
        await histories.flush()
        state = await histories.inspect(RUN)
        assert state is not None
        assert (state.tokens, state.turns, state.drafted, state.accepted) == (115, 1, len(tree) - 1, 3)
        assert state.memory_bytes > 0 and state.stored_bytes > 4 * 115
        assert state.last_used > 1.7e9
        histories.shelf.drop((SCOPE, "run"))
        stored = await histories.inspect(RUN)
        assert stored is not None and (stored.tokens, stored.turns, stored.memory_bytes) == (115, 1, 0)

    asyncio.run(run())


def test_one_tenant_cannot_push_another_out_of_memory() -> None:
    quiet = Scope("quiet", "model")

    async def run() -> None:
        histories = Histories(CacheConfig(memory_bytes=8 * 1024**2, scope_bytes=1024**2))
        await turn(histories, Trajectory("kept", quiet), [1, 2, 3], TEXT)
        source = random.Random(1)
        for number in range(100):
            prompt = [source.randrange(5000) for _ in range(400)]
            await turn(histories, Trajectory(f"run-{number}", SCOPE), prompt, [1, 2])
            assert histories.shelf.bytes_of[SCOPE] <= 1024**2
        assert (quiet, "kept") in histories.shelf.trajectories
        assert sum(histories.shelf.bytes_of.values()) == histories.shelf.bytes

    asyncio.run(run())
