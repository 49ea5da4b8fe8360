"""Kernels for indexes whose documents have gaps: places where any tokens may stand, as the values of a call do.

A gap is indexed as one token, `GAP`. A context goes through one when its tokens stop following the document where a gap
begins, and leaves it with the first token that follows the gap there.
"""

from agentspec.cache.automaton import DEGREE, FOLLOWED, HEAD, LENGTH, LINK, RECENT, Arrays, Int32s, after, find
from agentspec.compiled import compiled

GAP = 2**31 - 1
"""Stands for a gap; no model has so many tokens."""

LEAST = 3
"""A context of fewer tokens is no reason to think that a gap begins."""


@compiled
def inside_gap(arrays: Arrays, state: int) -> bool:
    """Whether a state's strings end in a gap."""
    states, edges, table = arrays
    gap = after(states, edges, table, 0, GAP)
    while state > 0 and gap >= 0:
        if state == gap:
            return True
        state = states[state, LINK]
    return False


@compiled
def chance_of_gap(arrays: Arrays, state: int, total: int, bonus: float) -> float:
    """Part of what followed a context that was a gap, the latest follower counted `bonus` times more."""
    states, edges, table = arrays
    if states[state, DEGREE] == 1:
        return 1.0 if states[state, RECENT] == GAP else 0.0
    edge = find(states, edges, table, state, GAP)
    if edge < 0:
        return 0.0
    latest = bonus if edge == states[state, HEAD] else 0.0
    return (edges[edge, FOLLOWED] + latest) / (total + bonus)  # type: ignore[no-any-return]


@compiled
def left_gap(arrays: Arrays, state: int, token: int) -> tuple[int, int]:
    """Where a token leads that ends a gap, from the longest context of the gap that knows it; or -1."""
    states, edges, table = arrays
    while state > 0 and states[state, LENGTH] > LEAST:
        target = after(states, edges, table, state, token)
        if target >= 0:
            return target, states[state, LENGTH] + 1
        state = states[state, LINK]
    return -1, 0


@compiled
def step_over(states: Int32s, edges: Int32s, table: Int32s, state: int, length: int, token: int) -> tuple[int, int]:
    """`step` through gaps, each of which counts as one token."""
    arrays = states, edges, table
    while state > 0 and length <= states[states[state, LINK], LENGTH]:
        state = states[state, LINK]
    if inside_gap(arrays, state):
        target, longer = left_gap(arrays, state, token)
        return (target, min(longer, length + 1)) if target >= 0 else (state, length)
    while True:
        target = after(states, edges, table, state, token)
        if target >= 0:
            return target, length + 1
        gap = after(states, edges, table, state, GAP)
        if gap >= 0 and length >= LEAST:
            return gap, length + 1
        if state == 0:
            return 0, 0
        state = states[state, LINK]
        length = states[state, LENGTH]


@compiled
def match_over(
    states: Int32s, edges: Int32s, table: Int32s, state: int, length: int, tokens: Int32s
) -> tuple[int, int]:
    """`match` through gaps: the longest match after more tokens, its state and its length."""
    for token in tokens:
        state, length = step_over(states, edges, table, state, length, token)
    return state, length
