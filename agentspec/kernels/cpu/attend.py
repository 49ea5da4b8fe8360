"""Attention of a sequence's rows over its cached keys and values and over the ancestors of each row.

Keys lie in blocks of `LANES` positions, (blocks, dim, LANES); values as (positions, dim). The rows of a pass have
theirs behind the cached ones, in the order of the rows. A row's scores are moved to their positions first, so that sums
over them run in the order of positions whatever tree the row is part of.
"""

import numpy as np
from numpy.typing import NDArray

from agentspec.compiled import compiled
from agentspec.kernels.cpu.lanes import BYTES, LANES, exponentiate, largest
from agentspec.kernels.cpu.memory import floats, integers
from agentspec.kernels.cpu.product import accumulate, sweep

TOGETHER = 24
"""Rows of one sequence and head that are attended together."""

MINUS_INFINITY = np.float32(-np.inf)
ONE = np.float32(1)


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
def attend(
    queries: int,
    query_stride: int,
    keys: int,
    values: int,
    dim: int,
    length: int,
    first: int,
    last: int,
    rows: int,
    parents: int,
    window: int,
    scores: int,
    score_stride: int,
    path: int,
    out: int,
    out_stride: int,
) -> None:
    """One head of rows `first` to `last` (at most `TOGETHER`) of a sequence with `length` cached positions.

    `queries` and `out` are the addresses of the first row's part; queries are scaled already. `parents` is 0 for a
    chain.
    """
    count = last - first
    chain = parents == 0
    ancestors = integers(parents, rows)
    nodes = integers(path, rows)
    seen = length + (last if chain else rows)
    start = 0
    if window > 0:
        start = max(0, length + (first if chain else 0) + 1 - window) // LANES * LANES
    for block in range(start // LANES, (seen + LANES - 1) // LANES):
        here = scores + block * BYTES
        sweep(count, queries, query_stride, keys + block * dim * BYTES, BYTES, dim, here, score_stride, 1)
    width = (seen + LANES - 1) // LANES * LANES
    shared = seen if chain else length
    for row in range(count):
        line_of_scores = floats(scores + row * score_stride, width)
        visible = length + first + row + 1
        if not chain:
            depth = line(ancestors, first + row, nodes)
            visible = length + depth
            for i in range(depth):
                line_of_scores[length + i] = line_of_scores[length + nodes[i]]
        line_of_scores[visible:width] = MINUS_INFINITY
        if window > 0:
            line_of_scores[start : max(start, visible - window)] = MINUS_INFINITY
        begin = scores + row * score_stride + start * 4
        vectors = (visible - start + LANES - 1) // LANES
        total = exponentiate(begin, vectors, largest(begin, vectors))
        part = ONE / total
        line_of_scores[start + vectors * LANES : width] = np.float32(0)
        floats(path + rows * 8, TOGETHER)[row] = part
    for column in range(0, dim, LANES):
        place = out + column * 4
        begin = values + column * 4
        if shared > start:
            sweep(
                count,
                scores + start * 4,
                score_stride,
                begin + start * dim * 4,
                dim * 4,
                shared - start,
                place,
                out_stride,
                1,
            )
        else:
            for row in range(count):
                floats(place + row * out_stride, LANES)[:] = np.float32(0)
        if not chain:
            for row in range(count):
                depth = line(ancestors, first + row, nodes)
                for i in range(max(0, start - length), depth):
                    accumulate(
                        1,
                        scores + row * score_stride + (length + i) * 4,
                        0,
                        begin + (length + nodes[i]) * dim * 4,
                        0,
                        1,
                        place + row * out_stride,
                        0,
                        0,
                        begin,
                        0,
                    )
    parts = floats(path + rows * 8, TOGETHER)
    for row in range(count):
        result = floats(out + row * out_stride, dim)
        for i in range(dim):
            result[i] *= parts[row]
