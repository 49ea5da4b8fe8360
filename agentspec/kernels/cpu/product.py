"""Products of rows with a matrix whose columns are packed in panels of `LANES`, the unit that a thread works on.

A weight of shape (outputs, inputs) lies as (panels, inputs, LANES), outputs filled up with zeros. Several rows share
one sweep over a panel; while they are multiplied, the next part of the weights is fetched, so that a few rows cost
little more than the time that the weights take from memory.
"""

import numpy as np
from numpy.typing import NDArray

from agentspec.compiled import compiled
from agentspec.kernels.cpu.lanes import BYTES, LANES, MOST_ROWS, accumulate

DEPTH = 320
"""Inputs that a sweep runs over at most before the next rows take their turn: that part of a panel stays in the
nearest cache."""

AHEAD = 16384
"""Bytes by which a sweep of one group of rows fetches ahead."""


def pack(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """(outputs, inputs) to (panels, inputs, LANES)."""
    outputs, inputs = weight.shape
    panels = -(-outputs // LANES)
    packed = aligned((panels, inputs, LANES))
    whole = outputs // LANES
    packed[:whole] = weight[: whole * LANES].reshape(whole, LANES, inputs).transpose(0, 2, 1)
    if whole < panels:
        packed[whole, :, : outputs - whole * LANES] = weight[whole * LANES :].T
    return packed


def aligned(shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Zeros that begin at a multiple of a vector's size."""
    size = int(np.prod(shape)) * 4
    room = np.zeros(size + BYTES, np.uint8)
    start = -room.ctypes.data % BYTES
    return room[start : start + size].view(np.float32).reshape(shape)


@compiled
def sweep(
    rows: int,
    x: int,
    x_stride: int,
    panel: int,
    panel_stride: int,
    count: int,
    sums: int,
    sums_stride: int,
    fresh: int,
) -> None:
    """Products of any number of rows with one panel: `accumulate`, in groups of at most `MOST_ROWS` rows."""
    groups = (rows + MOST_ROWS - 1) // MOST_ROWS
    if groups == 1:
        accumulate(rows, x, x_stride, panel, panel_stride, count, sums, sums_stride, fresh, panel + AHEAD, panel_stride)
        return
    blocks = (count + DEPTH - 1) // DEPTH
    for block in range(blocks):
        first = count * block // blocks
        depth = count * (block + 1) // blocks - first
        here = panel + first * panel_stride
        following = here + depth * panel_stride
        for group in range(groups):
            row = rows * group // groups
            accumulate(
                rows * (group + 1) // groups - row,
                x + row * x_stride + first * 4,
                x_stride,
                here,
                panel_stride,
                depth,
                sums + row * sums_stride,
                sums_stride,
                fresh if block == 0 else 0,
                following + group * depth // groups * panel_stride,
                panel_stride // groups,
            )
