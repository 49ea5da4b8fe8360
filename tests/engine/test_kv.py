"""Pages: what a sequence's commits do to them, who shares them, and who gives way when they run out."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.config import PrefixSharing
from agentspec.engine.kv import BLOCK, KVShape, PageTable
from agentspec.engine.prefix import Holding, KVPool, common_tokens, key_of
from agentspec.kernels.cpu.attend import PAGE
from agentspec.types import Scope

SHAPE = KVShape(layers=2, heads=1, dim=4)
SCOPE = Scope("tenant", "model")


def pool_of(pages: int, **settings: Any) -> KVPool:
    return KVPool(SHAPE, pages * SHAPE.page_bytes, **settings)


def write(table: PageTable, tokens: list[int]) -> None:
    """Each position's keys and values say its token."""
    rows = torch.tensor(tokens, dtype=torch.float32).view(1, -1, 1).expand(1, -1, SHAPE.dim)
    for layer in range(SHAPE.layers):
        table.write(layer, rows + layer, -rows)


def read(table: PageTable) -> list[int]:
    """The tokens that the committed positions say, which all layers must agree on."""
    if not table.length:
        return []
    keys, values = table.keys_and_values(0, table.length)
    for layer in range(SHAPE.layers):
        more, others = table.keys_and_values(layer, table.length)
        assert torch.equal(more, keys + layer)
        assert torch.equal(others, -keys)
    assert torch.equal(values, -keys)
    said: list[int] = keys[0, :, 0].int().tolist()
    return said


def advance(pool: KVPool, holding: Holding, tokens: list[int], count: int) -> bool:
    """Compute the next `count` of a sequence's tokens."""
    table = holding.table
    if not pool.grow(holding, table.length + count):
        return False
    write(table, tokens[table.length : table.length + count])
    table.commit(range(count))
    pool.publish(holding, tokens)
    return True


def turn(pool: KVPool, tokens: list[int], scope: Scope = SCOPE) -> int:
    """A whole turn that is alone; returns the tokens that were known."""
    holding = pool.acquire(scope, tokens)
    known = holding.table.length
    assert read(holding.table) == tokens[:known]
    assert advance(pool, holding, tokens, len(tokens) - known)
    pool.release(holding, tokens, (scope, "run"))
    return known


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_commits_keep_the_rows_of_the_path_in_order(seed: int) -> None:
    dice = random.Random(seed)
    table, right = PageTable(SHAPE), list[int]()
    for _ in range(8):
        rows = [dice.randrange(1000) for _ in range(dice.randint(1, 80))]
        table.reserve(table.length + len(rows))
        write(table, rows)
        path = sorted(dice.sample(range(len(rows)), dice.randint(0, len(rows))))
        table.commit(path)
        right += [rows[row] for row in path]
        assert read(table) == right


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_running_and_finished_turns_never_take_more_than_the_limit_and_read_what_is_theirs(seed: int) -> None:
    dice = random.Random(seed)
    pool = pool_of(dice.randint(3, 12))
    running: list[tuple[Holding, list[int]]] = []
    for _ in range(60):
        tokens = dice.choices((0, 1), k=dice.choice([1, 5, 64, 65, 100, 150]))
        if dice.random() < 0.4 and pool.admits(SCOPE, tokens):
            running.append((pool.acquire(SCOPE, tokens), tokens))
        for holding, sequence in list(running):
            left = len(sequence) - holding.table.length
            done = left == 0 or not advance(pool, holding, sequence, min(left, dice.choice([1, 30, 70])))
            assert read(holding.table) == sequence[: holding.table.length]
            if done or dice.random() < 0.1:
                pool.release(holding, sequence, (SCOPE, "run"))
                running.remove((holding, sequence))
        assert pool.held <= pool.pages <= pool.limit
    for holding, sequence in running:
        pool.release(holding, sequence, (SCOPE, "run"))
    assert pool.held == 0
    assert pool.pages == len(pool._recent)
    assert all(node.page is not None and node.page.refs == 1 for node in pool._recent)


@pytest.mark.parametrize("size", [1, 2, PAGE - 1, PAGE, PAGE + 1, PAGE + 2, 3 * PAGE + 5])
def test_the_next_turn_starts_from_all_that_was_computed(size: int) -> None:
    pool = pool_of(20)
    tokens = list(range(size))
    assert turn(pool, tokens) == 0
    assert turn(pool, tokens) == size - 1
    assert turn(pool, [*tokens, 900, 901]) == size
    assert turn(pool, [*tokens, 900, 902]) == size + 1


def test_sequences_that_run_share_full_pages_at_once() -> None:
    pool = pool_of(20)
    tokens = list(range(4 * PAGE))
    first = pool.acquire(SCOPE, tokens)
    assert advance(pool, first, tokens, 2 * PAGE + 7)
    second = pool.acquire(SCOPE, tokens)
    assert second.table.length == 2 * PAGE
    assert second.table.pages == first.table.pages[:2]
    assert advance(pool, second, tokens, 2 * PAGE - 1)
    assert advance(pool, first, tokens, 2 * PAGE - 8)
    assert first.table.pages[2] is second.table.pages[2], "computed twice, kept once"
    assert pool.held == 5
    assert read(first.table) == read(second.table) == tokens[:-1]


def test_a_page_of_another_conversation_is_copied_and_left_alone() -> None:
    pool = pool_of(20)
    tokens = list(range(PAGE + 40))
    turn(pool, tokens)
    other = [*tokens[: PAGE + 20], *range(500, 530)]
    assert turn(pool, other) == PAGE + 20
    assert turn(pool, tokens) == len(tokens) - 1
    assert pool.pages == 3


def test_what_is_longer_takes_the_place_of_what_is_shorter() -> None:
    pool = pool_of(20)
    for size in range(5, PAGE, 9):
        turn(pool, list(range(size)))
    assert pool.pages == 1


def test_scopes_share_nothing_unless_they_are_told_to() -> None:
    tokens = list(range(2 * PAGE))
    other = Scope("other", "model")
    assert turn(apart := pool_of(20), tokens) == 0
    assert turn(apart, tokens, other) == 0
    together = pool_of(20, sharing=PrefixSharing.ALL)
    assert turn(together, tokens) == 0
    assert turn(together, tokens, other) == 2 * PAGE - 1


def test_the_least_recently_used_leave_first_and_leaves_before_what_they_follow() -> None:
    pool = pool_of(6)
    old, new = list(range(2 * PAGE)), list(range(1000, 1000 + 2 * PAGE))
    turn(pool, old)
    turn(pool, new)
    turn(pool, old)
    turn(pool, list(range(2000, 2000 + 3 * PAGE)))
    assert pool.evicted == 1
    assert turn(pool, new) == PAGE


def test_a_sequence_as_long_as_the_limit_has_room_whatever_is_kept() -> None:
    pool = pool_of(5)
    turn(pool, list(range(3 * PAGE + 1)))
    assert turn(pool, list(range(5 * PAGE))) == 3 * PAGE + 1
    assert turn(pool, list(range(1, 5 * PAGE))) == 0


def test_nothing_grows_beyond_the_limit() -> None:
    pool = pool_of(3)
    first, second = pool.acquire(SCOPE, [1]), pool.acquire(SCOPE, [2])
    assert pool.grow(first, 2 * PAGE)
    assert not pool.grow(second, 2 * PAGE)
    assert second.table.capacity == PAGE
    assert not pool.admits(SCOPE, [3])


def test_scopes_without_pages_are_forgotten() -> None:
    pool = pool_of(2)
    for number in range(50):
        turn(pool, [1, 2, 3], Scope(f"tenant {number}", "model"))
    assert len(pool.roots) <= 3


def test_prefixes_are_counted_in_whole_tokens() -> None:
    assert common_tokens(key_of([1, 2, 3]), key_of([1, 2, 4])) == 2
    assert common_tokens(key_of([1, 256]), key_of([1, 257])) == 1
    assert common_tokens(key_of([1]), key_of([1, 2])) == 1
    assert common_tokens(key_of([]), key_of([1])) == 0
    assert PAGE % BLOCK == 0
