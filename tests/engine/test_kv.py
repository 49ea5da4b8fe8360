"""The pool of keys and values keeps its limit, whatever the sequences in it do."""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentspec.engine.kv import BLOCK, KVPool, KVShape
from agentspec.types import Scope, Trajectory

SHAPE = KVShape(layers=1, heads=1, dim=1)


def trajectory(name: str) -> Trajectory:
    return Trajectory(name, Scope("tenant", "model"))


def turn(pool: KVPool, name: str, prompt: list[int], most: int) -> None:
    """A whole turn that grows as far as it may."""
    assert pool.admits(most)
    holding = pool.acquire(trajectory(name), np.asarray(prompt, np.int32), most)
    holding.slab.reserve(most)
    holding.slab.commit(range(most - holding.slab.length))
    pool.release(holding, [*prompt, *[7] * (most - len(prompt))])


def held(pool: KVPool) -> int:
    """Tokens that there is memory for."""
    return sum(holding.slab.capacity for holding in pool.finished + pool.running)


@given(st.integers(0, 2**32))
def test_finished_turns_never_take_more_than_the_limit(seed: int) -> None:
    dice = random.Random(seed)
    pool = KVPool(SHAPE, 640 * SHAPE.token_bytes)
    for _ in range(20):
        prompt = [dice.randrange(2) for _ in range(dice.choice([1, 5, 100, 400]))]
        turn(pool, dice.choice("ab"), prompt, dice.randint(len(prompt) + 1, 640))
        assert held(pool) == pool.used <= pool.limit
        assert pool.finished


def test_a_turn_as_long_as_the_limit_is_kept_for_the_next_one() -> None:
    pool = KVPool(SHAPE, 320 * SHAPE.token_bytes)
    turn(pool, "a", [1] * 250, 320)
    assert pool.acquire(trajectory("b"), np.asarray([1] * 200, np.int32), 300).slab.length == 199


def test_a_limit_is_whole_blocks() -> None:
    pool = KVPool(SHAPE, (3 * BLOCK - 1) * SHAPE.token_bytes)
    assert pool.limit == 2 * BLOCK
    turn(pool, "a", [1] * 5, 2 * BLOCK)
    assert held(pool) == pool.used == 2 * BLOCK


def test_a_short_turn_does_not_sit_in_the_memory_of_a_long_one() -> None:
    pool = KVPool(SHAPE, 10_000 * SHAPE.token_bytes)
    turn(pool, "a", [1] * 10, 6000)
    short = pool.acquire(trajectory("a"), np.asarray([1] * 5, np.int32), 20)
    assert short.slab.length == 4
    assert short.slab.capacity < 1000
