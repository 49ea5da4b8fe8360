"""Kernels of the suffix automaton: every distinct substring of the indexed documents is one path from state 0.

Three flat arrays hold it. `states` has a row per state: the length of its longest string, its suffix link, how often
its strings occur, how many different tokens followed them, where those are, and the token that followed last. Most
states know one follower: `HEAD` is then the state it leads to. Others have a row in `edges` for each, most recently
followed first, and `HEAD` is the first of them. `table` is an open-addressing hash of (state, token) over the states
with many edges; the others are searched along the chain. `sizes` counts the rows in use.
"""

import numpy as np
from numpy.typing import NDArray

from agentspec.compiled import compiled

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]
Arrays = tuple[Int32s, Int32s, Int32s]

LENGTH, LINK, COUNT, DEGREE, HEAD, RECENT = 0, 1, 2, 3, 4, 5
SOURCE, TOKEN, TARGET, FOLLOWED, NEXT, PREVIOUS = 0, 1, 2, 3, 4, 5
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
    """The edge row of a state with several followers by its token, or -1."""
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
def after(states: Int32s, edges: Int32s, table: Int32s, state: int, token: int) -> int:
    """The state that a token leads to, or -1."""
    if states[state, DEGREE] == 1:
        return int(states[state, HEAD]) if states[state, RECENT] == token else -1
    edge = find(states, edges, table, state, token)
    return int(edges[edge, TARGET]) if edge >= 0 else -1


@compiled
def hash_edge(edges: Int32s, table: Int32s, edge: int) -> None:
    """Put an edge into the table, which has room."""
    at = slot(table, edges[edge, SOURCE], edges[edge, TOKEN])
    while table[at] >= 0:
        at = (at + 1) & (table.shape[0] - 1)
    table[at] = edge


@compiled
def add_row(edges: Int32s, sizes: Int64s, state: int, token: int, target: int, followed: int, head: int) -> int:
    """A new edge row before `head`."""
    edge = int(sizes[EDGES])
    sizes[EDGES] += 1
    edges[edge, SOURCE] = state
    edges[edge, TOKEN] = token
    edges[edge, TARGET] = target
    edges[edge, FOLLOWED] = followed
    edges[edge, NEXT] = head
    edges[edge, PREVIOUS] = -1
    if head >= 0:
        edges[head, PREVIOUS] = edge
    return edge


@compiled
def add_edge(arrays: Arrays, sizes: Int64s, state: int, token: int, target: int, followed: int) -> None:
    """A token that had not followed a state, and how often it has now."""
    states, edges, table = arrays
    degree = states[state, DEGREE] + 1
    states[state, DEGREE] = degree
    if degree == 1:
        states[state, HEAD], states[state, RECENT] = target, token
        return
    head = states[state, HEAD]
    if degree == 2:
        head = add_row(edges, sizes, state, states[state, RECENT], head, states[head, COUNT], -1)
    edge = add_row(edges, sizes, state, token, target, followed, head)
    states[state, HEAD], states[state, RECENT] = edge, token
    if degree == FEW + 1:
        while edge >= 0:
            hash_edge(edges, table, edge)
            edge = edges[edge, NEXT]
        sizes[HASHED] += FEW + 1
    elif degree > FEW:
        hash_edge(edges, table, edge)
        sizes[HASHED] += 1


@compiled
def move_to_front(states: Int32s, edges: Int32s, state: int, edge: int) -> None:
    """Make an edge the first of its state."""
    before, behind, head = edges[edge, PREVIOUS], edges[edge, NEXT], states[state, HEAD]
    if before < 0:
        return
    edges[before, NEXT] = behind
    if behind >= 0:
        edges[behind, PREVIOUS] = before
    edges[edge, PREVIOUS] = -1
    edges[edge, NEXT] = head
    edges[head, PREVIOUS] = edge
    states[state, HEAD] = edge
    states[state, RECENT] = edges[edge, TOKEN]


@compiled
def add_state(states: Int32s, sizes: Int64s, length: int, link: int, count: int) -> int:
    """A new state that nothing followed."""
    state = int(sizes[STATES])
    sizes[STATES] += 1
    states[state, LENGTH] = length
    states[state, LINK] = link
    states[state, COUNT] = count
    states[state, DEGREE] = 0
    states[state, HEAD] = -1
    states[state, RECENT] = -1
    return state


@compiled
def copy_edges(arrays: Arrays, sizes: Int64s, source: int, state: int) -> None:
    """Give a state without followers those of another one, in the same order."""
    states, edges, _ = arrays
    if states[source, DEGREE] < 2:
        states[state, DEGREE], states[state, HEAD] = states[source, DEGREE], states[source, HEAD]
        states[state, RECENT] = states[source, RECENT]
        return
    edge = states[source, HEAD]
    while edges[edge, NEXT] >= 0:
        edge = edges[edge, NEXT]
    while edge >= 0:
        add_edge(arrays, sizes, state, edges[edge, TOKEN], edges[edge, TARGET], edges[edge, FOLLOWED])
        edge = edges[edge, PREVIOUS]


@compiled
def split(arrays: Arrays, sizes: Int64s, parent: int, token: int) -> int:
    """The state of exactly the strings `parent` + `token`: the one that `token` leads to, or the part cut off it."""
    states, edges, table = arrays
    whole = after(states, edges, table, parent, token)
    if states[whole, LENGTH] == states[parent, LENGTH] + 1:
        return whole
    part = add_state(states, sizes, states[parent, LENGTH] + 1, states[whole, LINK], states[whole, COUNT])
    copy_edges(arrays, sizes, whole, part)
    states[whole, LINK] = part
    while parent >= 0:
        if states[parent, DEGREE] == 1:
            if states[parent, RECENT] != token or states[parent, HEAD] != whole:
                break
            states[parent, HEAD] = part
        else:
            edge = find(states, edges, table, parent, token)
            if edge < 0 or edges[edge, TARGET] != whole:
                break
            edges[edge, TARGET] = part
        parent = states[parent, LINK]
    return part


@compiled
def grown(rows: Int32s, used: int) -> Int32s:
    """The rows with room for a quarter more."""
    larger = np.empty((used + used // 4 + 16, rows.shape[1]), np.int32)
    larger[: rows.shape[0]] = rows
    return larger


@compiled
def reserve(arrays: Arrays, sizes: Int64s, missing: int, copies: int) -> Arrays:
    """The arrays, enlarged where they have no room for two more states, one of them with `copies` edges, and for one
    edge more at `missing` states."""
    states, edges, table = arrays
    if sizes[STATES] + 2 > states.shape[0]:
        states = grown(states, sizes[STATES] + 2)
    if sizes[EDGES] + 2 * missing + copies > edges.shape[0]:
        edges = grown(edges, sizes[EDGES] + 2 * missing + copies)
    room = 2 * (sizes[HASHED] + (FEW + 1) * missing + copies)
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
def count_followed(arrays: Arrays, state: int, token: int) -> None:
    """Note at a context and its shorter ones that `token` followed, which had followed all of them before."""
    states, edges, table = arrays
    counted = -1
    for _ in range(CHAIN):
        if state < 0:
            break
        target = int(states[state, HEAD])
        if states[state, DEGREE] > 1:
            edge = target if states[state, RECENT] == token else find(states, edges, table, state, token)
            edges[edge, FOLLOWED] += 1
            move_to_front(states, edges, state, edge)
            target = int(edges[edge, TARGET])
        if target != counted:
            states[target, COUNT] += 1
            counted = target
        state = states[state, LINK]
    states[0, COUNT] += 1


@compiled
def extend(
    states: Int32s, edges: Int32s, table: Int32s, sizes: Int64s, last: int, tokens: Int32s
) -> tuple[Int32s, Int32s, Int32s, int]:
    """Append tokens to the document whose end is state `last`; the arrays (perhaps new ones) and the new end."""
    for token in tokens:
        missing, parent, target = 0, last, -1
        while parent >= 0:
            target = after(states, edges, table, parent, token)
            if target >= 0:
                break
            missing += 1
            parent = states[parent, LINK]
        copies = 0 if target < 0 else states[target, DEGREE]
        arrays = reserve((states, edges, table), sizes, missing + 1, copies)
        states, edges, table = arrays
        known = 0 if target < 0 else split(arrays, sizes, parent, token)
        if missing > 0:
            end = add_state(states, sizes, states[last, LENGTH] + 1, known, 1)
            while last != parent:
                add_edge(arrays, sizes, last, token, end, 1)
                last = states[last, LINK]
            last = end
        else:
            last = known
        count_followed(arrays, parent, token)
    return states, edges, table, last


@compiled
def step(states: Int32s, edges: Int32s, table: Int32s, state: int, length: int, token: int) -> tuple[int, int]:
    """The longest match after one more token, from a match of `length` tokens that ends in `state`."""
    while state > 0 and length <= states[states[state, LINK], LENGTH]:
        state = states[state, LINK]
    while True:
        target = after(states, edges, table, state, token)
        if target >= 0:
            return target, length + 1
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
        state = after(states, edges, table, state, token)
        if state < 0:
            return at
    return len(tokens)
