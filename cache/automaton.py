"""Kernels of the suffix automaton: every distinct substring of the indexed documents is one path from state 0.

Three flat arrays hold it. `states` has a row per state: the length of its longest string, its suffix link, how
often its strings occur, its first edge, its number of edges, and the token that followed last. `edges` has a row per
transition and chains the transitions of a state, most recently followed first where there are many. `table` is
an open-addressing hash of (state, token) over the states with many edges; the others are searched along the chain.
`sizes` counts the rows in use.
"""

import numpy as np
from numpy.typing import NDArray

from agentspec.compiled import compiled

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]
Arrays = tuple[Int32s, Int32s, Int32s]

LENGTH, LINK, COUNT, HEAD, DEGREE, RECENT = 0, 1, 2, 3, 4, 5
SOURCE, TOKEN, TARGET, NEXT, PREVIOUS = 0, 1, 2, 3, 4
STATES, EDGES, HASHED = 0, 1, 2

CHAIN = 64
"""Suffix links walked per token to count; beyond, counts of the shortest contexts are lower bounds."""

FEW = 4
"""Up to so many edges are searched one by one, more through the table."""


@compiled
def slot(table: Int32s, state: int, token: int) -> int:
    """Where the search for an edge starts in the table."""
    key = np.uint64(state) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(token) * np.uint64(0xC2B2AE3D27D4EB4F)
    key ^= key >> np.uint64(29)
    key *= np.uint64(0xBF58476D1CE4E5B9)
    key ^= key >> np.uint64(32)
    return int(np.int64(key & np.uint64(table.shape[0] - 1)))


@compiled
def find(states: Int32s, edges: Int32s, table: Int32s, state: int, token: int) -> int:
    """The edge of a state by its token, or -1."""
    if states[state, DEGREE] <= FEW:
        edge = int(states[state, HEAD])
        while edge >= 0 and edges[edge, TOKEN] != token:
            edge = int(edges[edge, NEXT])
        return edge
    at = slot(table, state, token)
    while table[at] >= 0:
        edge = int(table[at])
        if edges[edge, SOURCE] == state and edges[edge, TOKEN] == token:
            return edge
        at = (at + 1) & (table.shape[0] - 1)
    return -1


@compiled
def hash_edge(edges: Int32s, table: Int32s, edge: int) -> None:
    """Put an edge into the table, which has room."""
    at = slot(table, edges[edge, SOURCE], edges[edge, TOKEN])
    while table[at] >= 0:
        at = (at + 1) & (table.shape[0] - 1)
    table[at] = edge


@compiled
def add_edge(arrays: Arrays, sizes: Int64s, state: int, token: int, target: int) -> None:
    """A new first edge of a state."""
    states, edges, table = arrays
    edge = sizes[EDGES]
    sizes[EDGES] += 1
    head = states[state, HEAD]
    edges[edge, SOURCE] = state
    edges[edge, TOKEN] = token
    edges[edge, TARGET] = target
    edges[edge, NEXT] = head
    edges[edge, PREVIOUS] = -1
    if head >= 0:
        edges[head, PREVIOUS] = edge
    states[state, HEAD] = edge
    states[state, DEGREE] += 1
    if states[state, DEGREE] == FEW + 1:
        while edge >= 0:
            hash_edge(edges, table, edge)
            edge = edges[edge, NEXT]
        sizes[HASHED] += FEW + 1
    elif states[state, DEGREE] > FEW:
        hash_edge(edges, table, edge)
        sizes[HASHED] += 1


@compiled
def move_to_front(states: Int32s, edges: Int32s, state: int, edge: int) -> None:
    """Make an edge the first of its state."""
    before, after, head = edges[edge, PREVIOUS], edges[edge, NEXT], states[state, HEAD]
    if before < 0:
        return
    edges[before, NEXT] = after
    if after >= 0:
        edges[after, PREVIOUS] = before
    edges[edge, PREVIOUS] = -1
    edges[edge, NEXT] = head
    edges[head, PREVIOUS] = edge
    states[state, HEAD] = edge


@compiled
def add_state(states: Int32s, sizes: Int64s, length: int) -> int:
    """A new state that never occurred."""
    state = int(sizes[STATES])
    sizes[STATES] += 1
    states[state, LENGTH] = length
    states[state, LINK] = 0
    states[state, COUNT] = 0
    states[state, HEAD] = -1
    states[state, DEGREE] = 0
    states[state, RECENT] = -1
    return state


@compiled
def split(arrays: Arrays, sizes: Int64s, parent: int, edge: int) -> int:
    """The state of exactly the strings `parent` + token of `edge`: the edge's target, or the part cut off it."""
    states, edges, table = arrays
    token, whole = int(edges[edge, TOKEN]), int(edges[edge, TARGET])
    if states[whole, LENGTH] == states[parent, LENGTH] + 1:
        return whole
    part = add_state(states, sizes, states[parent, LENGTH] + 1)
    states[part, LINK] = states[whole, LINK]
    states[part, COUNT] = states[whole, COUNT]
    states[part, RECENT] = states[whole, RECENT]
    copy = states[whole, HEAD]
    while copy >= 0 and edges[copy, NEXT] >= 0:
        copy = edges[copy, NEXT]
    while copy >= 0:
        add_edge(arrays, sizes, part, edges[copy, TOKEN], edges[copy, TARGET])
        copy = edges[copy, PREVIOUS]
    states[whole, LINK] = part
    while parent >= 0:
        edge = find(states, edges, table, parent, token)
        if edge < 0 or edges[edge, TARGET] != whole:
            break
        edges[edge, TARGET] = part
        parent = states[parent, LINK]
    return part


@compiled
def grown(rows: Int32s, used: int) -> Int32s:
    """The rows with room for half as many more."""
    larger = np.empty((used + used // 2 + 16, rows.shape[1]), np.int32)
    larger[: rows.shape[0]] = rows
    return larger


@compiled
def reserve(arrays: Arrays, sizes: Int64s, more_edges: int) -> Arrays:
    """The arrays, enlarged where they have no room for two more states and so many more edges."""
    states, edges, table = arrays
    if sizes[STATES] + 2 > states.shape[0]:
        states = grown(states, sizes[STATES] + 2)
    if sizes[EDGES] + more_edges > edges.shape[0]:
        edges = grown(edges, sizes[EDGES] + more_edges)
    room = 2 * (sizes[HASHED] + (FEW + 1) * more_edges)
    if room > table.shape[0]:
        size = table.shape[0]
        while size < room:
            size *= 2
        table = np.full(size, -1, np.int32)
        for edge in range(sizes[EDGES]):
            if states[edges[edge, SOURCE], DEGREE] > FEW:
                hash_edge(edges, table, edge)
    return states, edges, table


@compiled
def note_follower(arrays: Arrays, last: int, token: int) -> None:
    """Remember at every context that ends in `last` that `token` followed most recently."""
    states, edges, table = arrays
    for _ in range(CHAIN):
        states[last, RECENT] = token
        if states[last, DEGREE] > FEW:
            edge = find(states, edges, table, last, token)
            if edge >= 0:
                move_to_front(states, edges, last, edge)
        last = states[last, LINK]
        if last < 0:
            break


@compiled
def extend(
    states: Int32s, edges: Int32s, table: Int32s, sizes: Int64s, last: int, tokens: Int32s
) -> tuple[Int32s, Int32s, Int32s, int]:
    """Append tokens to the document whose end is state `last`; the arrays (perhaps new ones) and the new end."""
    for token in tokens:
        note_follower((states, edges, table), last, token)
        missing, parent, edge = 0, last, -1
        while parent >= 0:
            edge = find(states, edges, table, parent, token)
            if edge >= 0:
                break
            missing += 1
            parent = states[parent, LINK]
        copies = 0 if edge < 0 else states[edges[edge, TARGET], DEGREE] + 1
        states, edges, table = reserve((states, edges, table), sizes, missing + copies)
        arrays, before = (states, edges, table), last
        if missing > 0:
            last = add_state(states, sizes, states[before, LENGTH] + 1)
            for _ in range(missing):
                add_edge(arrays, sizes, before, token, last)
                before = states[before, LINK]
        known = 0 if edge < 0 else split(arrays, sizes, parent, edge)
        if missing > 0:
            states[last, LINK] = known
        else:
            last = known
        state = last
        for _ in range(CHAIN):
            states[state, COUNT] += 1
            state = states[state, LINK]
            if state < 0:
                break
    return states, edges, table, last


@compiled
def step(states: Int32s, edges: Int32s, table: Int32s, state: int, length: int, token: int) -> tuple[int, int]:
    """The longest match after one more token, from a match of `length` tokens that ends in `state`."""
    while state > 0 and length <= states[states[state, LINK], LENGTH]:
        state = states[state, LINK]
    while True:
        edge = find(states, edges, table, state, token)
        if edge >= 0:
            return edges[edge, TARGET], length + 1
        if state == 0:
            return 0, 0
        state = states[state, LINK]
        length = states[state, LENGTH]


@compiled
def match(states: Int32s, edges: Int32s, table: Int32s, state: int, length: int, tokens: Int32s) -> tuple[int, int]:
    """The longest match after more tokens: its state and its length."""
    for token in tokens:
        state, length = step(states, edges, table, state, length, token)
    while state > 0 and length <= states[states[state, LINK], LENGTH]:
        state = states[state, LINK]
    return state, length


@compiled
def known_prefix(states: Int32s, edges: Int32s, table: Int32s, tokens: Int32s) -> int:
    """How many of the first tokens occur together."""
    state = 0
    for at, token in enumerate(tokens):
        edge = find(states, edges, table, state, token)
        if edge < 0:
            return at
        state = edges[edge, TARGET]
    return len(tokens)
