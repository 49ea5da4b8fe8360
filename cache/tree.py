"""Kernel that drafts: a best-first tree over the back-off mixture of several suffix automata."""

import math

import numpy as np

from agentspec.cache.automaton import (
    COUNT,
    DEGREE,
    HEAD,
    LENGTH,
    LINK,
    NEXT,
    RECENT,
    TARGET,
    TOKEN,
    Floats,
    Int32s,
    step,
)
from agentspec.cache.estimate import LONG, SOLE
from agentspec.compiled import compiled

Sources = tuple[Int32s, ...]

SOURCES = 6
"""Automata of one draft: own, parent's and scope's, two generations each."""

FOLLOWERS = 32
"""Followers of one context that are looked at, most recent first."""

CANDIDATES = 64
"""Different tokens after one node that are looked at."""

LEVELS = 16
"""Contexts that are looked at after one node."""

UNEXPLAINED = 0.02
"""The shorter contexts are left out when so little of the probability is left for them."""

PROMISING = 0.01
"""A node is left out when the path to it is accepted less often."""


@compiled
def share(weights: Floats, length: int, span: int, total: float, degree: int) -> float:
    """Part of the remaining probability that a context's own followers explain."""
    score = weights[0] + weights[2] * math.log(total)
    score += weights[1] * math.log(min(length, LONG))
    span_log = math.log(min(span, LONG))
    score += weights[5] * span_log
    if degree == 1:
        score += weights[4] + weights[6] * span_log
    else:
        score += weights[3] * math.log(degree)
    return 1.0 / (1.0 + math.exp(-score))


@compiled
def spread(
    states: Int32s,
    edges: Int32s,
    state: int,
    length: int,
    weights: Floats,
    kind: int,
    longest: bool,
    left: float,
    found: int,
    tokens: Int32s,
    chances: Floats,
    origins: Int32s,
) -> tuple[int, float]:
    """Add what one context says to the candidates; their number and the probability left for shorter contexts."""
    total, edge = 0.0, states[state, HEAD]
    for _ in range(FOLLOWERS):
        if edge < 0:
            break
        total += states[edges[edge, TARGET], COUNT]
        edge = edges[edge, NEXT]
    if states[state, DEGREE] > FOLLOWERS:
        total = max(total, states[state, COUNT])
    span = length - max(states[states[state, LINK], LENGTH], 0)
    row = weights[2 * kind + longest]
    part = share(row, length, span, total, states[state, DEGREE])
    if longest and span >= LONG and states[state, DEGREE] == 1:
        part = max(part, span / (span + SOLE))
    part *= left
    recent, bonus = states[state, RECENT], row[7]
    edge = states[state, HEAD]
    for _ in range(FOLLOWERS):
        if edge < 0:
            break
        token = edges[edge, TOKEN]
        count = states[edges[edge, TARGET], COUNT] + (bonus if token == recent else 0.0)
        at = 0
        while at < found and tokens[at] != token:
            at += 1
        if at == found and found < CANDIDATES:
            tokens[at], chances[at], origins[at] = token, 0.0, 0
            found += 1
        if at < CANDIDATES:
            chances[at] += part * count / (total + bonus)
            origins[at] |= 1 << kind
        edge = edges[edge, NEXT]
    return found, left - part


@compiled
def followers(
    all_states: Sources,
    all_edges: Sources,
    kinds: Int32s,
    weights: Floats,
    at: Int32s,
    lengths: Int32s,
    tokens: Int32s,
    chances: Floats,
    origins: Int32s,
) -> int:
    """Candidates for the token after a context, from the longest match in any source to the shortest."""
    at, lengths = at.copy(), lengths.copy()
    found, left, levels, longest = 0, 1.0, 0, 0
    while left > UNEXPLAINED and levels < LEVELS:
        best = 0
        for source in range(1, SOURCES):
            if lengths[source] > lengths[best]:
                best = source
        if lengths[best] == 0:
            break
        states = all_states[best]
        if states[at[best], HEAD] >= 0:
            found, left = spread(
                states,
                all_edges[best],
                at[best],
                lengths[best],
                weights,
                kinds[best],
                levels == 0,
                left,
                found,
                tokens,
                chances,
                origins,
            )
            longest = max(longest, lengths[best])
            levels += 1
        at[best] = states[at[best], LINK]
        lengths[best] = max(0, states[at[best], LENGTH])
    if found == 1:
        chances[0] = max(chances[0], longest / (longest + SOLE))
    return found


@compiled
def grow_tree(
    all_states: Sources,
    all_edges: Sources,
    all_tables: Sources,
    kinds: Int32s,
    weights: Floats,
    at: Int32s,
    lengths: Int32s,
    root: int,
    budget: int,
) -> tuple[Int32s, Floats]:
    """A tree of at most `budget` nodes beside the root, likeliest path first.

    Rows of the first array: token, parent, depth, origins. Rows of the second: log P(node | parent), and its sum
    along the path.
    """
    nodes, logs = np.zeros((4, budget + 1), np.int32), np.zeros((2, budget + 1))
    nodes[0, 0], nodes[1, 0] = root, -1
    node_at, node_lengths = np.zeros((budget + 1, SOURCES), np.int32), np.zeros((budget + 1, SOURCES), np.int32)
    node_at[0], node_lengths[0] = at, lengths
    tokens, chances, origins = np.empty(CANDIDATES, np.int32), np.empty(CANDIDATES), np.empty(CANDIDATES, np.int32)
    room = (budget + 1) * 16
    queue, queue_logs, waiting = np.empty((room, 3), np.int32), np.empty((room, 2)), 0
    size, floor = 1, math.log(PROMISING)
    while True:
        node = size - 1
        found = followers(
            all_states, all_edges, kinds, weights, node_at[node], node_lengths[node], tokens, chances, origins
        )
        for candidate in range(found):
            log = math.log(chances[candidate])
            if logs[1, node] + log > floor and waiting < room:
                queue[waiting, 0], queue[waiting, 1], queue[waiting, 2] = tokens[candidate], node, origins[candidate]
                queue_logs[waiting, 0], queue_logs[waiting, 1] = log, logs[1, node] + log
                waiting += 1
        if waiting == 0 or size > budget:
            break
        best = queue_logs[:waiting, 1].argmax()
        parent = queue[best, 1]
        nodes[0, size], nodes[1, size], nodes[2, size] = queue[best, 0], parent, nodes[2, parent] + 1
        nodes[3, size] = queue[best, 2]
        logs[:, size] = queue_logs[best]
        waiting -= 1
        queue[best], queue_logs[best] = queue[waiting], queue_logs[waiting]
        for source in range(SOURCES):
            node_at[size, source], node_lengths[size, source] = step(
                all_states[source],
                all_edges[source],
                all_tables[source],
                node_at[parent, source],
                node_lengths[parent, source],
                nodes[0, size],
            )
        size += 1
    return nodes[:, :size], logs[:, :size]
