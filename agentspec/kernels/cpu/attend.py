"""Attention of a sequence's rows over its cached keys and values and over the ancestors of each row.

Keys and values lie in pages of `PAGE` positions: keys in blocks of `LANES` positions, (blocks, dim, LANES), values as
(positions, dim). The rows of a pass have theirs behind the cached ones, in the order of the rows. The query heads that
share keys are attended together, so that keys and values are read once; the positions are cut into chunks, which
threads take one by one, and each row's results over the chunks are joined in their order.

A row's scores are moved to the positions of its line of ancestors before they are summed up, chunks begin at fixed
positions, and within a chunk sums run in the order of positions: a row's result has the same bits in any tree.
"""

import numpy as np
from numpy.typing import NDArray

from agentspec.compiled import compiled
from agentspec.kernels.cpu.lanes import BYTES, LANES, MOST_ROWS, accumulate
from agentspec.kernels.cpu.memory import floats, integers
from agentspec.kernels.cpu.product import sweep
from agentspec.kernels.cpu.vectors import bend, exponentiate, largest, power

PAGE = 64
"""Positions of a page; a multiple of `LANES`."""

CHUNK = 512
"""Positions of a chunk; a multiple of `PAGE`."""

TOGETHER = 24
"""Rows times heads that are attended together, at most, but for one row of more heads."""

MINUS_INFINITY = np.float32(-np.inf)
ZERO = np.float32(0)


@compiled
def line(parents: NDArray[np.int64], node: int, path: NDArray[np.int64]) -> int:
    """Writes a node's ancestors and the node itself, root first; returns their number."""
    count = 0
    at = node
    while at >= 0:
        path[count] = at
        count += 1
        at = parents[at]
    for i in range(count // 2):
        path[i], path[count - 1 - i] = path[count - 1 - i], path[i]
    return count


@compiled
def up(size: int) -> int:
    """The multiple of `LANES` that holds `size`."""
    return (size + LANES - 1) // LANES * LANES


@compiled
def weigh(scores: int, first: int, begin: int, shown: int, end: int, cap: np.float32) -> tuple[np.float32, np.float32]:
    """Turns scores into weights relative to the largest, in place; returns the largest and the sum of the weights.

    Of the scores from `first`, a multiple of `LANES`, to `end` those from `begin` to `shown` count; others get 0.
    `cap` is their soft cap, 0 for none.
    """
    values = floats(scores, max(0, up(shown), end))
    if shown <= begin:
        values[first:end] = ZERO
        return MINUS_INFINITY, ZERO
    start = begin // LANES * LANES
    vectors = (up(shown) - start) // LANES
    if cap > ZERO:
        bend(scores + start * 4, vectors, cap)
    values[first:start] = ZERO
    values[start:begin] = MINUS_INFINITY
    values[shown : up(shown)] = MINUS_INFINITY
    top = largest(scores + start * 4, vectors)
    total = exponentiate(scores + start * 4, vectors, top)
    values[up(shown) : end] = ZERO
    return top, total


@compiled
def score(count: int, queries: int, dim: int, keys: int, values: int, out: int, stride: int) -> None:
    """Products of `count` queries with a block of keys; meanwhile the block's values, then the next keys, are
    fetched."""
    turns = (count + MOST_ROWS - 1) // MOST_ROWS
    ahead = values
    for turn in range(turns):
        first, last = count * turn // turns, count * (turn + 1) // turns
        place = queries + first * dim * 4
        accumulate(last - first, place, dim * 4, keys, BYTES, dim, out + first * stride, stride, 1, ahead, BYTES)
        ahead = keys + dim * BYTES


@compiled
def key_block(pages: NDArray[np.int64], keys: int, block: int, dim: int) -> int:
    """Where a block of keys is; `keys` is where a page has those of this head."""
    return int(pages[block * LANES // PAGE] + keys + block % (PAGE // LANES) * dim * BYTES)


@compiled
def weighted_sums(
    count: int,
    pages: NDArray[np.int64],
    values: int,
    dim: int,
    start: int,
    stop: int,
    weights: int,
    weight_stride: int,
    sums: int,
    sum_stride: int,
) -> None:
    """Sums of the values of positions `start` to `stop`, page by page, for `LANES` columns; `weights` are those of
    `start` and on."""
    if stop <= start:
        for at in range(count):
            floats(sums + at * sum_stride, LANES)[:] = ZERO
    at = start
    while at < stop:
        end = min(stop, at // PAGE * PAGE + PAGE)
        source = pages[at // PAGE] + values + at % PAGE * dim * 4
        here = weights + (at - start) * 4
        sweep(count, here, weight_stride, source, dim * 4, end - at, sums, sum_stride, 1 if at == start else 0)
        at = end


@compiled
def attend_chunk(
    begin: int,
    queries: int,
    groups: int,
    page_list: int,
    keys: int,
    values: int,
    dim: int,
    length: int,
    first: int,
    last: int,
    rows: int,
    parents: int,
    window: int,
    cap: np.float32,
    scores: int,
    score_stride: int,
    path: int,
    tops: int,
    totals: int,
    stat_stride: int,
    sums: int,
    sum_stride: int,
) -> None:
    """Positions `begin` to `begin + CHUNK` for rows `first` to `last` of `rows` and the heads that share these keys.

    For every row and head, in this order: the largest score, the sum of the weights relative to it, and the weighted
    sum of the values, each with its stride. `length` positions are cached. `parents` is 0 for a chain. `page_list` is
    where the addresses of the sequence's pages are, `keys` and `values` where in a page those of this head are.
    `window` is how many positions a row sees, itself included, `cap` the soft cap of scores; 0 for none.
    """
    pages = integers(page_list, (length + rows + PAGE - 1) // PAGE)
    count = (last - first) * groups
    chain = parents == 0
    ancestors, nodes = integers(parents, rows), integers(path, rows)
    end = begin + CHUNK
    stop = max(begin, min(end, length + last if chain else length))
    start = begin
    if window > 0:
        start = max(begin, (length + (first if chain else 0) + 1 - window) // LANES * LANES)
    for block in range(start // LANES, (stop + LANES - 1) // LANES):
        place, here = scores + (block * LANES - begin) * 4, key_block(pages, keys, block, dim)
        score(count, queries, dim, here, here - keys + values, place, score_stride)
    branching = not chain and end > length
    if branching:
        for block in range(length // LANES, (length + rows + LANES - 1) // LANES):
            place = scores + (CHUNK + (block - length // LANES) * LANES) * 4
            here = key_block(pages, keys, block, dim)
            sweep(count, queries, dim * 4, here, BYTES, dim, place, score_stride, 1)
    for row in range(last - first):
        visible = length + first + row + 1 if chain else length + line(ancestors, first + row, nodes)
        shown = min(visible, end)
        hidden = max(start, visible - window) if window > 0 else start
        for group in range(groups):
            at = row * groups + group
            if branching:
                moved = floats(scores + at * score_stride, CHUNK + rows + LANES)
                for position in range(max(start, length), shown):
                    moved[position - begin] = moved[CHUNK + length % LANES + nodes[position - length]]
            place = scores + at * score_stride
            weighed = weigh(place, start - begin, hidden - begin, shown - begin, stop - begin, cap)
            floats(tops + at * stat_stride, 1)[0] = weighed[0]
            floats(totals + at * stat_stride, 1)[0] = weighed[1]
    for column in range(0, dim, LANES):
        place, source = sums + column * 4, values + column * 4
        weights = scores + (start - begin) * 4
        weighted_sums(count, pages, source, dim, start, stop, weights, score_stride, place, sum_stride)
        if branching:
            for row in range(last - first):
                shown = min(end, length + line(ancestors, first + row, nodes))
                weights = scores + row * groups * score_stride
                out = place + row * groups * sum_stride
                for position in range(max(start, length), shown):
                    slot = length + nodes[position - length]
                    value = pages[slot // PAGE] + source + slot % PAGE * dim * 4
                    sweep(groups, weights + (position - begin) * 4, score_stride, value, 0, 1, out, sum_stride, 0)


@compiled
def join(dim: int, tops: int, totals: int, sums: int, top: int, total: int, sum_: int) -> None:
    """Adds one chunk's result for one row and head, the last three, to that of the chunks before it."""
    new = floats(top, 1)[0]
    if new == MINUS_INFINITY:
        return
    old = floats(tops, 1)[0]
    most = max(old, new)
    kept, gained = power(old - most), power(new - most)
    result, added = floats(sums, dim), floats(sum_, dim)
    for i in range(dim):
        result[i] = result[i] * kept + added[i] * gained
    floats(totals, 1)[0] = floats(totals, 1)[0] * kept + floats(total, 1)[0] * gained
    floats(tops, 1)[0] = most


@compiled
def finish(dim: int, totals: int, sums: int, out: int) -> None:
    """One row and head's attention from its sums."""
    part = np.float32(1) / floats(totals, 1)[0]
    result, source = floats(out, dim), floats(sums, dim)
    for i in range(dim):
        result[i] = source[i] * part
