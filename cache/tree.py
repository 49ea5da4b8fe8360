"""Kernel that drafts: a best-first tree over the back-off mixture of several suffix automata."""

import math

import numpy as np
from numba import carray

from agentspec.cache.automaton import (
    COUNT,
    DEGREE,
    FOLLOWED,
    HEAD,
    LENGTH,
    LINK,
    NEXT,
    RECENT,
    TOKEN,
    Arrays,
    Floats,
    Int32s,
    Int64s,
    match,
    step,
)
from agentspec.cache.estimate import ENDING, LOGS, LONG, ORIGINS, SCAFFOLD, SOLE
from agentspec.cache.gaps import GAP, chance_of_gap, inside_gap, step_over
from agentspec.compiled import compiled, pointer

Sources = tuple[Int32s, ...]
Automata = tuple[Sources, Sources, Sources]
"""States, edges and tables of `SOURCES` automata."""

Candidates = tuple[Int32s, Floats, Int32s, Int32s]
"""Of the tokens after a node: ids, probabilities, origins, and a hash of places in these."""

CORPORA = 4
"""Most static corpora."""

SOURCES = 8 + CORPORA
"""Automata of one draft: own, parent's and scope's, two generations each, the scaffold, the prediction and corpora."""

FOLLOWERS = 32
"""Followers of one context that are looked at, most recent first."""

CANDIDATES = 64
"""Different tokens after one node that are looked at."""

HASHED = 4 * CANDIDATES
"""Places of the hash of candidates."""

LEVELS = 16
"""Contexts that are looked at after one node."""

UNEXPLAINED = 0.02
"""The shorter contexts are left out when so little of a node's probability is left for them, or too little for any of
their followers to be promising."""

PROMISING = 0.002
"""A node is left out when the path to it is accepted less often."""


@compiled
def log_of(count: int) -> float:
    """Logarithm of a count from 1, from a table; the last entry stands for all larger ones."""
    return float(LOGS[min(count, LOGS.shape[0] - 1)])


@compiled
def share(weights: Floats, length: int, span: int, total: int, degree: int) -> float:
    """Part of the remaining probability that a context's own followers explain."""
    score = weights[0] + weights[1] * log_of(min(length, LONG)) + weights[2] * log_of(total)
    span_log = log_of(min(span, LONG))
    score += weights[5] * span_log
    if degree == 1:
        score += weights[4] + weights[6] * span_log
    else:
        score += weights[3] * log_of(degree)
    return 1.0 / (1.0 + math.exp(-score))


@compiled
def place(candidates: Candidates, first: int, found: int, token: int) -> int:
    """Where a token is among the `found` candidates, a new one at the end; -1 when there is no room.

    In the hash, places count from `first`; what is below belongs to an earlier node.
    """
    tokens, chances, origins, places = candidates
    at = (np.int64(token) * 2654435761 >> 16) % HASHED
    while places[at] >= first:
        if tokens[places[at] - first] == token:
            return int(places[at] - first)
        at = (at + 1) % HASHED
    if found == CANDIDATES:
        return -1
    places[at] = first + found
    tokens[found], chances[found], origins[found] = token, 0.0, 0
    return found


@compiled
def add(candidates: Candidates, first: int, found: int, token: int, chance: float, kind: int) -> int:
    """Give a candidate, known or new, more probability; the number of candidates. A gap is none."""
    if token == GAP:
        return found
    at = place(candidates, first, found, token)
    if at < 0:
        return found
    candidates[1][at] += chance
    candidates[2][at] |= ORIGINS[kind]
    return max(found, at + 1)


@compiled
def followed(states: Int32s, edges: Int32s, state: int) -> int:
    """How often tokens followed a context; beyond `FOLLOWERS` different ones, how often it occurred."""
    if states[state, DEGREE] == 1:
        return int(states[states[state, HEAD], COUNT])
    if states[state, DEGREE] > FOLLOWERS:
        return int(states[state, COUNT])
    total, edge = 0, states[state, HEAD]
    while edge >= 0:
        total += edges[edge, FOLLOWED]
        edge = edges[edge, NEXT]
    return total


@compiled
def spread(
    states: Int32s,
    edges: Int32s,
    state: int,
    unit: float,
    bonus: float,
    kind: int,
    candidates: Candidates,
    first: int,
    found: int,
) -> int:
    """Give the followers of a context `unit` of probability for each time they followed, and the most recent one as
    much as for `bonus` times more; the number of candidates."""
    edge = states[state, HEAD]
    if states[state, DEGREE] == 1:
        chance = unit * (states[edge, COUNT] + bonus)
        return add(candidates, first, found, states[state, RECENT], chance, kind)
    for _ in range(FOLLOWERS):
        if edge < 0:
            break
        chance = unit * (edges[edge, FOLLOWED] + bonus)
        found = add(candidates, first, found, edges[edge, TOKEN], chance, kind)
        edge, bonus = edges[edge, NEXT], 0.0
    return found


@compiled
def longest_of(lengths: Int32s) -> int:
    """The source with the longest context."""
    best = 0
    for source in range(1, lengths.shape[0]):
        if lengths[source] > lengths[best]:
            best = source
    return best


@compiled
def followers(
    automata: Automata,
    kinds: Int32s,
    weights: Floats,
    at: Int32s,
    lengths: Int32s,
    least: float,
    candidates: Candidates,
    first: int,
) -> int:
    """Candidates for the token after a context, from the longest match in any source to the shortest; their number.

    Stops when no more than `least` is left for shorter contexts. Moves `at` and `lengths` to them. Where a scaffold has
    a gap, the gap's part stays for other contexts, and inside it the end of the value gets a small part of its own.
    """
    all_states, all_edges, all_tables = automata
    found, left, levels, forms, longest = 0, 1.0, 0, 0, 0
    while left > least and levels + forms < LEVELS:
        source = longest_of(lengths)
        length, state, kind = lengths[source], at[source], kinds[source]
        if length == 0:
            break
        states, edges = all_states[source], all_edges[source]
        automaton = states, edges, all_tables[source]
        link, degree = states[state, LINK], states[state, DEGREE]
        shorter = max(0, states[link, LENGTH])
        before = forms if kind == SCAFFOLD else levels
        row, span = weights[2 * kind + (before == 0)], length - shorter
        total = followed(states, edges, state) if degree > 0 else 0
        if kind == SCAFFOLD and inside_gap(automaton, state):
            unit = ENDING * left / (total + row[7])
            found = spread(states, edges, state, unit, row[7], kind, candidates, first, found)
            lengths[source] = 0
            continue
        if degree > 0:
            part = share(row, length, span, total, degree)
            if before == 0 and span >= LONG and degree == 1 and kind != SCAFFOLD:
                part = max(part, span / (span + SOLE))
            unit = part * left / (total + row[7])
            found = spread(states, edges, state, unit, row[7], kind, candidates, first, found)
            gap = chance_of_gap(automaton, state, total, row[7]) if kind == SCAFFOLD else 0.0
            left -= part * left * (1.0 - gap)
            longest = max(longest, length) if gap == 0.0 else longest
            forms, levels = forms + (kind == SCAFFOLD), levels + (kind != SCAFFOLD)
        at[source], lengths[source] = link, shorter
    if found == 1:
        candidates[1][0] = max(candidates[1][0], longest / (longest + SOLE))
    return found


@compiled
def push(heap: Int32s, size: int, keys: Floats, item: int) -> None:
    """Put an item into a heap of `size` items, largest key first."""
    at = size
    while at > 0 and keys[heap[(at - 1) // 2]] < keys[item]:
        heap[at] = heap[(at - 1) // 2]
        at = (at - 1) // 2
    heap[at] = item


@compiled
def pop(heap: Int32s, size: int, keys: Floats) -> int:
    """Take the item with the largest key out of a heap of `size` items."""
    first, item = int(heap[0]), heap[size - 1]
    at, child = 0, 1
    while child < size - 1:
        if child + 1 < size - 1 and keys[heap[child + 1]] > keys[heap[child]]:
            child += 1
        if keys[heap[child]] <= keys[item]:
            break
        heap[at] = heap[child]
        at, child = child, 2 * child + 1
    heap[at] = item
    return first


@compiled
def rows_at(address: int, count: int, width: int) -> Int32s:
    """`count` rows of `width` int32 at an address."""
    return carray(pointer(address, np.int32(0)), (count, width))  # type: ignore[no-any-return]


@compiled
def table_at(address: int, count: int) -> Int32s:
    """`count` int32 at an address."""
    return carray(pointer(address, np.int32(0)), count)  # type: ignore[no-any-return]


@compiled
def all_rows(layouts: Int64s, column: int) -> Sources:
    """The states, in column 0 of a layout, or the edges, in column 2, of `SOURCES` automata."""
    return (
        rows_at(layouts[0, column], layouts[0, column + 1], 6),
        rows_at(layouts[1, column], layouts[1, column + 1], 6),
        rows_at(layouts[2, column], layouts[2, column + 1], 6),
        rows_at(layouts[3, column], layouts[3, column + 1], 6),
        rows_at(layouts[4, column], layouts[4, column + 1], 6),
        rows_at(layouts[5, column], layouts[5, column + 1], 6),
        rows_at(layouts[6, column], layouts[6, column + 1], 6),
        rows_at(layouts[7, column], layouts[7, column + 1], 6),
        rows_at(layouts[8, column], layouts[8, column + 1], 6),
        rows_at(layouts[9, column], layouts[9, column + 1], 6),
        rows_at(layouts[10, column], layouts[10, column + 1], 6),
        rows_at(layouts[11, column], layouts[11, column + 1], 6),
    )


@compiled
def all_tables(layouts: Int64s) -> Sources:
    """The tables of `SOURCES` automata."""
    return (
        table_at(layouts[0, 4], layouts[0, 5]),
        table_at(layouts[1, 4], layouts[1, 5]),
        table_at(layouts[2, 4], layouts[2, 5]),
        table_at(layouts[3, 4], layouts[3, 5]),
        table_at(layouts[4, 4], layouts[4, 5]),
        table_at(layouts[5, 4], layouts[5, 5]),
        table_at(layouts[6, 4], layouts[6, 5]),
        table_at(layouts[7, 4], layouts[7, 5]),
        table_at(layouts[8, 4], layouts[8, 5]),
        table_at(layouts[9, 4], layouts[9, 5]),
        table_at(layouts[10, 4], layouts[10, 5]),
        table_at(layouts[11, 4], layouts[11, 5]),
    )


@compiled
def opened(layouts: Int64s) -> Automata:
    """The automata of `SOURCES` layouts."""
    return all_rows(layouts, 0), all_rows(layouts, 2), all_tables(layouts)


@compiled
def locate(automata: Automata, ends: Int32s, tail: Int32s) -> Int32s:
    """Where a context stands in each source: in the first row the states, in the second how many tokens match.

    `ends` names both; where a state is -1 the context's last tokens, `tail`, are matched.
    """
    found = ends.copy()
    for source in range(ends.shape[1]):
        if ends[0, source] < 0:
            states, edges, table = automata[0][source], automata[1][source], automata[2][source]
            found[0, source], found[1, source] = match(states, edges, table, 0, 0, tail)
    return found


@compiled
def stepped(kind: int, arrays: Arrays, state: int, length: int, token: int) -> tuple[int, int]:
    """The longest match in a source of some kind after one more token."""
    states, edges, table = arrays
    if kind == SCAFFOLD:
        return step_over(states, edges, table, state, length, token)
    return step(states, edges, table, state, length, token)


@compiled
def grow_tree(
    layouts: Int64s, kinds: Int32s, ends: Int32s, tail: Int32s, weights: Floats, budget: int
) -> tuple[Int32s, Floats]:
    """A tree of at most `budget` nodes beside the root, the last token of `tail`; likeliest path first.

    `layouts` (int64[SOURCES, 6], see `index.Layout`) stands for arrays that the caller keeps alive and unchanged;
    `kinds` and `ends` (see `locate`) have a column for each source in use, the first ones. Rows of the first result:
    token, parent, depth, origins. Rows of the second: log P(node | parent), and its sum along the path; rounding never
    makes it rise.
    """
    automata = opened(layouts)
    all_states, all_edges, all_tables = automata
    sources = kinds.shape[0]
    nodes, logs = np.zeros((4, budget + 1), np.int32), np.zeros((2, budget + 1))
    nodes[0, 0], nodes[1, 0] = tail[-1], -1
    node_at, node_lengths = np.empty((budget + 1, sources), np.int32), np.empty((budget + 1, sources), np.int32)
    start = locate(automata, ends, tail)
    node_at[0], node_lengths[0] = start[0], start[1]
    at, lengths = start[0].copy(), start[1].copy()
    candidates = (
        np.empty(CANDIDATES, np.int32),
        np.empty(CANDIDATES),
        np.empty(CANDIDATES, np.int32),
        np.full(HASHED, -1, np.int32),
    )
    room = (budget + 1) * CANDIDATES
    queue, chances, reaches = np.empty((room, 3), np.int32), np.empty(room), np.empty(room)
    heap, waiting, queued = np.empty(room, np.int32), 0, 0
    size, reach = 1, 1.0
    while size <= budget:
        node = size - 1
        at[:], lengths[:] = node_at[node], node_lengths[node]
        least = max(UNEXPLAINED, PROMISING / reach)
        first = node * CANDIDATES
        found = followers(automata, kinds, weights, at, lengths, least, candidates, first)
        for candidate in range(found):
            chance = candidates[1][candidate]
            if reach * chance > PROMISING:
                queue[queued, 0], queue[queued, 1] = candidates[0][candidate], node
                queue[queued, 2] = candidates[2][candidate]
                chances[queued], reaches[queued] = chance, reach * chance
                push(heap, waiting, reaches, queued)
                waiting += 1
                queued += 1
        if waiting == 0:
            break
        best = pop(heap, waiting, reaches)
        waiting -= 1
        parent, reach = queue[best, 1], reaches[best]
        nodes[0, size], nodes[1, size], nodes[2, size] = queue[best, 0], parent, nodes[2, parent] + 1
        nodes[3, size] = queue[best, 2]
        logs[0, size] = math.log(chances[best])
        logs[1, size] = min(logs[1, parent] + logs[0, size], logs[1, size - 1])
        for source in range(sources):
            node_at[size, source], node_lengths[size, source] = stepped(
                kinds[source],
                (all_states[source], all_edges[source], all_tables[source]),
                node_at[parent, source],
                node_lengths[parent, source],
                nodes[0, size],
            )
        size += 1
    return nodes[:, :size], logs[:, :size]
