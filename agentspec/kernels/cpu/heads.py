"""Where queries, keys and values go once they are computed: normalised, turned by their positions, into the pages."""

from typing import Any

import numpy as np

from agentspec.compiled import compiled
from agentspec.kernels.cpu.attend import PAGE, key_block
from agentspec.kernels.cpu.lanes import LANES
from agentspec.kernels.cpu.memory import floats, integers
from agentspec.kernels.cpu.projections import normalise
from agentspec.kernels.cpu.records import FIRST, LENGTH, PAGES, SEGMENT_FIELDS


@compiled
def turn(head: int, dim: int, cosine: int, sine: int, scaling: np.float32) -> None:
    """Rotary position of the first `dim` floats of one head's vector, in place, and their scaling."""
    half = dim // 2
    low, high = floats(head, half), floats(head + half * 4, half)
    cosines, sines = floats(cosine, half), floats(sine, half)
    for i in range(half):
        a, b = low[i], high[i]
        low[i] = (a * cosines[i] - b * sines[i]) * scaling
        high[i] = (b * cosines[i] + a * sines[i]) * scaling


@compiled
def scale(at: int, size: int, factor: np.float32) -> None:
    """Multiplies floats in place."""
    values = floats(at, size)
    for i in range(size):
        values[i] = values[i] * factor


@compiled
def keys_in_page(model: Any, index: int, kv_head: int) -> int:
    """Where in a page the keys of a layer and head are."""
    return int((index * model.kv_heads + kv_head) * PAGE * model.dim * 4)


@compiled
def values_in_page(model: Any, index: int, kv_head: int) -> int:
    """Where in a page the values of a layer and head are: behind the keys of all layers."""
    return keys_in_page(model, model.layers + index, kv_head)


@compiled
def query_number(model: Any, call: Any, row: int, kv_head: int) -> int:
    """Where the first query of a row is among all; the heads that share keys lie together, row by row."""
    return int((kv_head * call.rows + row) * (model.heads // model.kv_heads))


@compiled
def head_number(model: Any, place: int) -> int:
    """Number of a head among queries, keys and values, in an order where each key follows its queries.

    A thread that takes some of them, for all rows, writes to no line of memory that others write to.
    """
    groups = model.heads // model.kv_heads
    kv_head, part = place // (groups + 2), place % (groups + 2)
    if part < groups:
        return int(kv_head * groups + part)
    return int(model.heads + (part - groups) * model.kv_heads + kv_head)


@compiled
def place_heads(thread: int, threads: int, model: Any, layer: Any, index: int, call: Any) -> None:
    """Turns queries and keys by their positions and writes keys and values behind the cached ones."""
    heads = model.heads + 2 * model.kv_heads
    dim, turned = model.dim, model.heads + model.kv_heads
    positions, owners = integers(call.positions, call.rows), integers(call.owners, call.rows)
    segments = integers(call.segment, call.segments * SEGMENT_FIELDS)
    stride = heads * dim * 4
    units = call.rows * heads
    for unit in range(units * thread // threads, units * (thread + 1) // threads):
        row, head = unit % call.rows, head_number(model, unit // call.rows)
        place = call.qkv + row * stride + head * dim * 4
        if head < model.heads:
            groups = model.heads // model.kv_heads
            moved = call.queries + (query_number(model, call, row, head // groups) + head % groups) * dim * 4
            floats(moved, dim)[:] = floats(place, dim)
            place = moved
        if head < turned:
            query = head < model.heads
            weights = layer.query_norm if query else layer.key_norm
            if weights != 0:
                normalise(place, weights, model.inverse_dim, model.epsilon, dim, dim, place)
            scaling = model.scaling if query else np.float32(1)
            moving = model.rotary if layer.cosine != 0 else 0
            if moving != 0:
                angles = positions[row] * (moving // 2) * 4
                turn(place, moving, layer.cosine + angles, layer.sine + angles, scaling)
            scale(place + moving * 4, dim - moving, scaling)
        if head >= model.heads:
            at = owners[row] * SEGMENT_FIELDS
            slot = segments[at + LENGTH] + row - segments[at + FIRST]
            source = floats(place, dim)
            pages = integers(segments[at + PAGES], slot // PAGE + 1)
            if head < turned:
                block = key_block(pages, keys_in_page(model, index, head - model.heads), slot // LANES, dim)
                keys = floats(block, dim * LANES)
                for i in range(dim):
                    keys[i * LANES + slot % LANES] = source[i]
            else:
                spot = pages[slot // PAGE] + values_in_page(model, index, head - turned) + slot % PAGE * dim * 4
                floats(spot, dim)[:] = source
