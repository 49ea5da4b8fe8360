"""Norms, and products of rows with a matrix, each thread a share of its panels."""

from typing import Any

import numpy as np

from agentspec.compiled import compiled
from agentspec.kernels.cpu.lanes import BYTES, LANES
from agentspec.kernels.cpu.memory import floats
from agentspec.kernels.cpu.product import sweep
from agentspec.kernels.cpu.quantised import panel_bytes, quantise, row_bytes, sweep_quantised
from agentspec.kernels.cpu.vectors import add, copy, gate_gelu, gate_silu, square_sum


@compiled
def normalise(x: int, weight: int, inverse: np.float32, epsilon: np.float32, size: int, width: int, out: int) -> None:
    """Root mean square normalisation of one row of `size` floats in memory for `width`."""
    mean = square_sum(x, width // LANES) * inverse
    factor = np.float32(1) / np.sqrt(mean + epsilon)
    source, weights, result = floats(x, size), floats(weight, size), floats(out, size)
    for i in range(size):
        result[i] = source[i] * factor * weights[i]


@compiled
def fill(rows: int, bias: int, out: int, stride: int) -> None:
    """One panel's biases in every row."""
    for row in range(rows):
        copy(bias, out + row * stride)


@compiled
def prepare(model: Any, rows: int, x: int, stride: int, inputs: int, room: int) -> tuple[int, int]:
    """Rows as the model's products take them, and their stride: as they are, or rounded, in `room`."""
    if model.quantised == 0:
        return x, stride
    quantise(rows, x, stride, inputs, room)
    return room, row_bytes(inputs)


@compiled
def multiply(
    quantised: int, rows: int, x: int, x_stride: int, panel: int, inputs: int, sums: int, stride: int, fresh: int
) -> None:
    """The product of prepared rows with one panel, put to `sums` or, unless `fresh`, added."""
    if quantised != 0:
        sweep_quantised(rows, x, inputs, panel, sums, stride, fresh)
    else:
        sweep(rows, x, x_stride, panel, BYTES, inputs, sums, stride, fresh)


@compiled
def project(
    thread: int,
    threads: int,
    quantised: int,
    rows: int,
    x: int,
    x_stride: int,
    weight: int,
    bias: int,
    inputs: int,
    panels: int,
    out: int,
    stride: int,
) -> None:
    """out = x * weight + bias, this thread's share of the panels."""
    size = panel_bytes(inputs, quantised)
    for panel in range(panels * thread // threads, panels * (thread + 1) // threads):
        place = out + panel * BYTES
        if bias != 0:
            fill(rows, bias + panel * BYTES, place, stride)
        multiply(quantised, rows, x, x_stride, weight + panel * size, inputs, place, stride, 1 if bias == 0 else 0)


@compiled
def project_onto(
    thread: int,
    threads: int,
    quantised: int,
    rows: int,
    x: int,
    x_stride: int,
    weight: int,
    bias: int,
    inputs: int,
    panels: int,
    out: int,
    stride: int,
    tile: int,
) -> None:
    """out += x * weight + bias, this thread's share of the panels; `tile` holds a panel of `rows` rows."""
    size = panel_bytes(inputs, quantised)
    for panel in range(panels * thread // threads, panels * (thread + 1) // threads):
        if bias != 0:
            fill(rows, bias + panel * BYTES, tile, BYTES)
        multiply(quantised, rows, x, x_stride, weight + panel * size, inputs, tile, BYTES, 1 if bias == 0 else 0)
        for row in range(rows):
            add(tile + row * BYTES, out + row * stride + panel * BYTES)


@compiled
def project_gated(
    thread: int,
    threads: int,
    quantised: int,
    rows: int,
    x: int,
    x_stride: int,
    weight: int,
    bias: int,
    inputs: int,
    panels: int,
    out: int,
    stride: int,
    tile: int,
    gelu: int,
) -> None:
    """out = silu(gate) * up, or gelu(gate) * up; gate and up are products whose panels lie in turns in `weight` and
    `bias`."""
    other = tile + rows * BYTES
    size = panel_bytes(inputs, quantised)
    for panel in range(panels * thread // threads, panels * (thread + 1) // threads):
        place = weight + 2 * panel * size
        if bias != 0:
            fill(rows, bias + 2 * panel * BYTES, tile, BYTES)
            fill(rows, bias + (2 * panel + 1) * BYTES, other, BYTES)
        fresh = 1 if bias == 0 else 0
        multiply(quantised, rows, x, x_stride, place, inputs, tile, BYTES, fresh)
        multiply(quantised, rows, x, x_stride, place + size, inputs, other, BYTES, fresh)
        for row in range(rows):
            gates, ups, result = tile + row * BYTES, other + row * BYTES, out + row * stride + panel * BYTES
            if gelu != 0:
                gate_gelu(gates, ups, result)
            else:
                gate_silu(gates, ups, result)
