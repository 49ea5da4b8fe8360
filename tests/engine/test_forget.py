"""Deleting a trajectory: which pages go, and what becomes of its running requests and of others."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.cache.codec import digest_of
from agentspec.config import CacheConfig
from agentspec.engine.kv import KVShape
from agentspec.engine.prefix import MAX_TIPS, KVPool, Owner, key_of
from agentspec.engine.service import Engine
from agentspec.errors import Unavailable
from agentspec.kernels.cpu.attend import PAGE
from agentspec.types import GenerationRequest, Report, Scope, SpeculationParams, Trajectory
from tests.serving import with_engine

SHAPE = KVShape(layers=1, heads=1, dim=4)
SCOPE = Scope("tenant", "model")


def turn(pool: KVPool, tokens: list[int], owner: Owner) -> int:
    """A whole turn that is alone; returns the tokens that were known."""
    holding = pool.acquire(owner[0], tokens)
    known = holding.table.length
    assert pool.grow(holding, len(tokens))
    holding.table.commit(range(len(tokens) - known))
    pool.release(holding, tokens, owner)
    return known


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32))
def test_what_is_left_belongs_to_others_and_they_lose_no_full_page(seed: int) -> None:
    dice = random.Random(seed)
    pool, turns = KVPool(SHAPE, 10_000 * SHAPE.page_bytes), dict[Owner, list[list[int]]]()
    for _ in range(dice.randint(1, 14)):
        owner = (SCOPE, f"run-{dice.randrange(4)}")
        tokens = [token for _ in range(dice.randint(1, 4)) for token in [dice.randrange(2)] * dice.choice([10, 50, 64])]
        turn(pool, tokens, owner)
        turns.setdefault(owner, []).append(tokens)
    gone = dice.choice(list(turns))
    noted = bool(pool.tips.get(gone))
    assert pool.forget(gone) == noted
    assert not pool.forget(gone)
    assert pool.bytes_of(gone) == 0
    left = [tokens for owner, own in turns.items() if owner != gone for tokens in own]
    for node in pool._recent:
        path, at = list[bytes](), node
        while at.parent is not None:
            path.append(at.key)
            at = at.parent
        held = b"".join(reversed(path))
        assert any(key_of(tokens).startswith(held) for tokens in left), "a page of the deleted trajectory alone"
    assert pool.pages == len(pool._recent)
    for tokens in left:
        assert turn(pool, tokens, (SCOPE, "again")) >= (len(tokens) - 1) // PAGE * PAGE


def test_evicted_pages_leave_the_notes_of_their_owners_right() -> None:
    pool = KVPool(SHAPE, 4 * SHAPE.page_bytes)
    for number in range(20):
        turn(pool, [number] * (3 * PAGE), (SCOPE, f"run-{number}"))
        assert set(pool.tips) == {owner for node in pool._recent for owner in node.tips}
        assert len(pool.tips) <= 4
    assert not pool.forget((SCOPE, "run-3"))
    assert pool.forget((SCOPE, "run-19"))


def test_a_running_sequence_keeps_the_pages_it_shares_with_a_deleted_one() -> None:
    pool, tokens = KVPool(SHAPE, 100 * SHAPE.page_bytes), [1] * (4 * PAGE)
    turn(pool, tokens, (SCOPE, "old"))
    holding = pool.acquire(SCOPE, tokens)
    assert pool.forget((SCOPE, "old"))
    assert pool.pages == 4 and holding.table.length == 4 * PAGE - 1
    assert pool.grow(holding, len(tokens))
    holding.table.commit(range(1))
    pool.release(holding, tokens, (SCOPE, "new"))
    assert turn(pool, tokens, (SCOPE, "third")) == 4 * PAGE - 1
    assert pool.forget((SCOPE, "third")) and pool.forget((SCOPE, "new"))
    assert pool.pages == 0


def test_the_notes_at_one_page_are_bounded() -> None:
    pool = KVPool(SHAPE, 100 * SHAPE.page_bytes)
    for number in range(MAX_TIPS + 50):
        turn(pool, [1] * PAGE, (SCOPE, f"run-{number}"))
    assert sum(len(nodes) for nodes in pool.tips.values()) == MAX_TIPS


@pytest.mark.parametrize("sharing", ["scope", "all"])
def test_equal_names_in_two_scopes_are_two_trajectories(sharing: Any) -> None:
    pool = KVPool(SHAPE, 100 * SHAPE.page_bytes, sharing)
    mine, theirs = (SCOPE, "run"), (Scope("thief", "model"), "run")
    turn(pool, [1] * (2 * PAGE), mine)
    turn(pool, [1] * (2 * PAGE), theirs)
    assert pool.forget(mine)
    assert pool.bytes_of(theirs) == 2 * SHAPE.page_bytes
    assert pool.forget(theirs)
    assert pool.pages == 0


Scenario = Callable[[Engine], Awaitable[None]]


def request(engine: Engine, text: str, name: str, **fields: Any) -> GenerationRequest:
    prompt = engine.render([{"role": "user", "content": text}], None)
    fields.setdefault("max_tokens", 60)
    return GenerationRequest(prompt, Trajectory(name, Scope("default", "tiny")), **fields)


async def finished(engine: Engine, wanted: GenerationRequest) -> Report:
    report = None
    async for delta in engine.generate(wanted):
        report = delta.report
    assert report is not None
    return report


def test_a_deleted_trajectory_leaves_no_draft_and_no_page(tiny_model: Path) -> None:
    text = "a text of more than sixty-four bytes, so that it fills at least one page of keys and values"

    async def scenario(engine: Engine) -> None:
        trajectory = Trajectory("run", Scope("default", "tiny"))
        assert await engine.inspect(trajectory) is None
        assert await engine.forget(trajectory) is False
        taught = await finished(engine, request(engine, text, "run"))
        await engine.histories.flush()
        state = await engine.inspect(trajectory)
        assert state is not None
        assert state.tokens == taught.prompt_tokens + taught.completion_tokens
        assert state.turns == 1
        assert state.kv_bytes > 0 and state.memory_bytes > 0
        assert (state.drafted, state.accepted) == (taught.drafted_total, taught.accepted_total)
        helped = await finished(engine, request(engine, text, "another"))
        assert helped.accepted.get("scope", 0) > 0 and helped.cached_tokens > 0
        assert await engine.forget(Trajectory("another", trajectory.scope)) is True
        assert await engine.forget(trajectory) is True
        await engine.histories.flush()
        assert engine.loop.pool.pages == 0
        assert await engine.inspect(trajectory) is None
        assert await engine.forget(trajectory) is False
        fresh = await finished(engine, request(engine, text, "third"))
        assert fresh.token_ids == taught.token_ids
        assert fresh.cached_tokens == 0
        assert fresh.drafted_total == taught.drafted_total

    with_engine(tiny_model, scenario)


@pytest.mark.parametrize("speculation", [SpeculationParams(), SpeculationParams(enabled=False)])
def test_a_running_request_of_a_deleted_trajectory_ends_well_and_leaves_nothing(
    tiny_model: Path, speculation: SpeculationParams
) -> None:
    async def scenario(engine: Engine) -> None:
        wanted = request(engine, "go on and on", "run", speculation=speculation)
        expected = await finished(engine, request(engine, "go on and on", "other", speculation=speculation))
        count, report = 0, None
        async for delta in engine.generate(wanted):
            count += 1
            if count == 2:
                assert await engine.forget(wanted.trajectory) is True
            report = delta.report
        assert report is not None and report.token_ids == expected.token_ids
        await engine.histories.flush()
        assert await engine.inspect(wanted.trajectory) is None
        assert {name for _, name in engine.loop.pool.tips} == {"other"}

    with_engine(tiny_model, scenario)


@pytest.mark.parametrize("speculation", [SpeculationParams(), SpeculationParams(enabled=False)])
def test_a_request_that_was_received_before_a_deletion_leaves_nothing(
    tiny_model: Path, speculation: SpeculationParams
) -> None:
    """It has not reached the engine then: it is rendered, compiled for, or waits for its turn."""
    text = "a text of more than sixty-four bytes, so that it fills at least one page of keys and values"

    async def scenario(engine: Engine) -> None:
        early = request(engine, text, "run", speculation=speculation)
        assert await engine.forget(early.trajectory) is False
        first = await finished(engine, early)
        await engine.histories.flush()
        assert await engine.inspect(early.trajectory) is None
        assert engine.loop.pool.pages == 0 and not engine.histories.shelf.trajectories
        late = await finished(engine, request(engine, text, "run", speculation=speculation))
        assert late.token_ids == first.token_ids and late.cached_tokens == 0
        state = await engine.inspect(early.trajectory)
        assert state is not None and state.kv_bytes > 0
        assert (state.tokens > 0) == speculation.enabled

    with_engine(tiny_model, scenario)


def test_choices_that_were_received_before_a_deletion_leave_nothing(tiny_model: Path) -> None:
    async def scenario(engine: Engine) -> None:
        first = request(engine, "something to say twice", "run")
        both = [first, replace(first, branch=True)]
        await engine.forget(first.trajectory)
        async for _ in engine.generate(*both):
            pass
        await engine.histories.flush()
        assert await engine.inspect(first.trajectory) is None
        assert engine.loop.pool.pages == 0 and not engine.histories.shelf.trajectories

    with_engine(tiny_model, scenario)


def test_another_process_s_deletion_takes_the_pages_too(tiny_model: Path) -> None:
    async def scenario(engine: Engine) -> None:
        wanted = request(engine, "something", "run")
        await finished(engine, wanted)
        assert engine.loop.pool.pages > 0
        engine.histories.on_forgotten(wanted.trajectory.scope, frozenset({digest_of(wanted.trajectory)}))
        for _ in range(200):
            if engine.loop.pool.pages == 0:
                break
            await asyncio.sleep(0.01)
        assert engine.loop.pool.pages == 0

    with_engine(tiny_model, scenario)


def test_a_store_that_does_not_confirm_is_told(tiny_model: Path) -> None:
    from agentspec.cache.store import MemoryStore

    class Mute(MemoryStore):
        async def delete(self, trajectory: Trajectory) -> bool | None:
            return None

    async def scenario(engine: Engine) -> None:
        engine.histories.store = Mute(CacheConfig().memory_bytes, 1000)
        with pytest.raises(Unavailable, match="did not confirm"):
            await engine.forget(Trajectory("run", Scope("default", "tiny")))

    with_engine(tiny_model, scenario)
