"""Products of rows with a matrix of 8-bit whole numbers: weights of a quarter of the size, multiplied as they are.

Weights are rounded once, rows before each product, both in groups of `GROUP` inputs with a scale of their own
(symmetric, to the nearest): an outlier costs its group precision and no other. A weight of shape (outputs, inputs)
lies as (panels, groups, GROUP_BYTES), outputs and inputs filled up with zeros; a row as its numbers, its groups'
scales and what each group's sum starts from.
"""

import numpy as np
from numpy.typing import NDArray

from agentspec.compiled import compiled
from agentspec.kernels.cpu.dots import (
    FOURS,
    GROUP,
    GROUP_BYTES,
    MOST,
    NUMBER_BYTES,
    SHIFT,
    STEP,
    accumulate_groups,
    round_group,
)
from agentspec.kernels.cpu.lanes import BYTES, LANES, MOST_ROWS
from agentspec.kernels.cpu.memory import floats, small_numbers
from agentspec.kernels.cpu.product import AHEAD, aligned

DEPTH = 8
"""Groups that a sweep runs over at most before the next rows take their turn."""


def pack_quantised(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """(outputs, inputs) to (panels, groups, GROUP_BYTES / 4): rounded, in the layout above, as raw memory."""
    outputs, inputs = weight.shape
    panels, groups = -(-outputs // LANES), -(-inputs // GROUP)
    packed = aligned((panels, groups, GROUP_BYTES // 4))
    raw = packed.view(np.uint8)
    for panel in range(panels):
        part = weight[panel * LANES : (panel + 1) * LANES]
        padded = np.zeros((LANES, groups, GROUP), np.float32)
        padded.reshape(LANES, -1)[: len(part), : groups * GROUP][:, :inputs] = part
        numbers, scales = rounded(padded)
        turned = numbers.reshape(LANES, groups, GROUP // STEP, STEP).transpose(1, 2, 0, 3)
        stored = (turned + (SHIFT if FOURS else 0)).astype(np.uint8 if FOURS else np.int8)
        raw[panel, :, : GROUP * LANES] = stored.reshape(groups, -1).view(np.uint8)
        packed[panel, :, GROUP * LANES // 4 :] = scales.T
    return packed


def rounded(values: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Whole numbers (..., groups, GROUP) and their scales (..., groups)."""
    top = np.abs(values).max(-1)
    factors = np.divide(np.float32(MOST), top, out=np.zeros_like(top), where=top > 0)
    return np.rint(values * factors[..., None]).astype(np.int32), top / np.float32(MOST)


@compiled
def groups_of(inputs: int) -> int:
    """Groups that hold so many inputs."""
    return (inputs + GROUP - 1) // GROUP


@compiled
def row_bytes(inputs: int) -> int:
    """Bytes of a row of whole numbers with its scales and starts."""
    return groups_of(inputs) * (GROUP * NUMBER_BYTES + 8)


@compiled
def quantise(rows: int, x: int, x_stride: int, inputs: int, out: int) -> None:
    """Rounds rows of floats, zeros up to the next multiple of `LANES` behind them."""
    groups, stride = groups_of(inputs), row_bytes(inputs)
    for row in range(rows):
        source, numbers = x + row * x_stride, out + row * stride
        scales = numbers + groups * GROUP * NUMBER_BYTES
        for group in range(groups):
            vectors = min(GROUP, inputs - group * GROUP + LANES - 1) // LANES
            place = numbers + group * GROUP * NUMBER_BYTES
            scale = scales + group * 4
            round_group(source + group * GROUP * 4, vectors, place, scale, scale + groups * 4)


@compiled
def sweep_quantised(rows: int, x: int, inputs: int, panel: int, sums: int, sums_stride: int, fresh: int) -> None:
    """Products of any number of rows from `quantise` with one panel, added to `sums` or, if `fresh`, put there."""
    if fresh != 0:
        for row in range(rows):
            floats(sums + row * sums_stride, LANES)[:] = np.float32(0)
    groups, stride = groups_of(inputs), row_bytes(inputs)
    scales = x + groups * GROUP * NUMBER_BYTES
    turns = (rows + MOST_ROWS - 1) // MOST_ROWS
    blocks = 1 if turns == 1 else (groups + DEPTH - 1) // DEPTH
    for block in range(blocks):
        first, last = groups * block // blocks, groups * (block + 1) // blocks
        ahead = AHEAD if turns == 1 else (last - first) * GROUP_BYTES
        for turn in range(turns):
            row, stop = rows * turn // turns, rows * (turn + 1) // turns
            here, at = row * stride, first * 4
            accumulate_groups(
                stop - row,
                x + here + first * GROUP * NUMBER_BYTES,
                scales + here + at,
                scales + groups * 4 + here + at,
                stride,
                panel + first * GROUP_BYTES,
                last - first,
                sums + row * sums_stride,
                sums_stride,
                ahead,
            )


@compiled
def panel_bytes(inputs: int, quantised: int) -> int:
    """Bytes of a packed panel."""
    return groups_of(inputs) * GROUP_BYTES if quantised != 0 else inputs * BYTES


@compiled
def unpack_row(packed: int, output: int, inputs: int, out: int) -> None:
    """The weights of one output as floats."""
    panel, lane, groups = output // LANES, output % LANES, groups_of(inputs)
    result = floats(out, inputs)
    for group in range(groups):
        place = packed + (panel * groups + group) * GROUP_BYTES
        weights = small_numbers(place, GROUP * LANES)
        scale = floats(place + GROUP * LANES, LANES)[lane]
        for i in range(min(GROUP, inputs - group * GROUP)):
            number = np.int64(weights[(i // STEP * LANES + lane) * STEP + i % STEP])
            if FOURS:
                number = (number & 255) - SHIFT
            result[group * GROUP + i] = np.float32(number) * scale
