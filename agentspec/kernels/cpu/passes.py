"""A whole pass of a decoder in compiled code: all threads run it together, layer by layer.

The block is that of the Llama family: root mean square norms before attention and before a gated MLP, rotary
positions in all layers or some, grouped-query attention, with biases, and norms of each head's queries and keys, where
the model has them.
"""

from typing import Any

import numpy as np

from agentspec.compiled import compiled
from agentspec.kernels.cpu.attend import CHUNK, PAGE, TOGETHER, attend_chunk, finish, join, key_block
from agentspec.kernels.cpu.lanes import BYTES, LANES, add, copy, fetch_add, gate, send_bytes, square_sum, wait_for_byte
from agentspec.kernels.cpu.memory import floats, integers
from agentspec.kernels.cpu.product import sweep
from agentspec.kernels.cpu.quantised import panel_bytes, quantise, row_bytes, sweep_quantised, unpack_row
from agentspec.kernels.cpu.team import meet


def record(**fields: str) -> np.dtype[Any]:
    """A record of named fields."""
    return np.dtype(list(fields.items()))


MODEL = record(
    hidden="i8",
    width="i8",
    heads="i8",
    kv_heads="i8",
    dim="i8",
    inner="i8",
    vocabulary="i8",
    layers="i8",
    embedding="i8",
    embedding_lanes="i8",
    quantised="i8",
    norm="i8",
    head="i8",
    cosine="i8",
    sine="i8",
    inverse_hidden="f4",
    epsilon="f4",
    inverse_dim="f4",
    scaling="f4",
)
"""A model's extents and the addresses of what all layers share. `width` is `hidden` filled up to whole vectors;
`quantised` is 1 where matrices are of 8-bit numbers."""

LAYER = record(
    norm="i8",
    qkv="i8",
    qkv_bias="i8",
    query_norm="i8",
    key_norm="i8",
    output="i8",
    output_bias="i8",
    mlp_norm="i8",
    gate_up="i8",
    gate_up_bias="i8",
    down="i8",
    down_bias="i8",
    window="i8",
    rotary="i8",
)
"""Addresses of a layer's weights, 0 for what it lacks, its attention's window, 0 for none, and 1 where positions turn
its queries and keys."""

CALL = record(
    rows="i8",
    kept="i8",
    segments="i8",
    tokens="i8",
    positions="i8",
    owners="i8",
    keep="i8",
    segment="i8",
    x="i8",
    qkv="i8",
    attended="i8",
    inner="i8",
    logits="i8",
    normed="i8",
    quantised="i8",
    quantised_bytes="i8",
    tiles="i8",
    scores="i8",
    score_stride="i8",
    paths="i8",
    path_bytes="i8",
    queries="i8",
    sums="i8",
    tops="i8",
    totals="i8",
    chunks="i8",
    own_sums="i8",
    own_sums_bytes="i8",
    claims="i8",
    sync="i8",
)
"""One pass: numbers of rows and the addresses of their input, of its result and of the memory it works in."""

FIRST, COUNT, LENGTH, PAGES, PARENTS = range(5)
"""Columns of a segment: its first row, its rows, its cached positions, the address of the list of its pages' addresses,
the address of its rows' parents (0 for a chain)."""

SEGMENT_FIELDS = 5


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
) -> None:
    """out = silu(gate) * up; gate and up are products whose panels lie in turns in `weight` and `bias`."""
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
            gate(tile + row * BYTES, other + row * BYTES, out + row * stride + panel * BYTES)


@compiled
def turn(head: int, dim: int, cosine: int, sine: int, scaling: np.float32) -> None:
    """Rotary position of one head's vector, in place, and its scaling."""
    half = dim // 2
    low, high = floats(head, half), floats(head + half * 4, half)
    cosines, sines = floats(cosine, half), floats(sine, half)
    for i in range(half):
        a, b = low[i], high[i]
        low[i] = (a * cosines[i] - b * sines[i]) * scaling
        high[i] = (b * cosines[i] + a * sines[i]) * scaling


@compiled
def scale(head: int, dim: int, scaling: np.float32) -> None:
    """Scaling of one head's vector, in place."""
    values = floats(head, dim)
    for i in range(dim):
        values[i] = values[i] * scaling


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
            if layer.rotary != 0:
                angles = positions[row] * (dim // 2) * 4
                turn(place, dim, model.cosine + angles, model.sine + angles, scaling)
            else:
                scale(place, dim, scaling)
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


@compiled
def parts_of(model: Any, rows: int) -> int:
    """In how many parts the rows of a segment are attended. Where it is one, chunks of positions are shared out."""
    together = max(1, TOGETHER // (model.heads // model.kv_heads))
    return int((rows + together - 1) // together)


@compiled
def attend_all(thread: int, model: Any, layer: Any, index: int, call: Any) -> None:
    """Attention of every row; threads claim the heads of some rows that share keys, over one chunk or all, at a time.

    Where chunks are apart, `join_all` has still to follow.
    """
    segments = integers(call.segment, call.segments * SEGMENT_FIELDS)
    mine = fetch_add(call.claims + index * 8, 1)
    unit = 0
    for number in range(call.segments):
        at = number * SEGMENT_FIELDS
        rows = segments[at + COUNT]
        chunks = (segments[at + LENGTH] + rows + CHUNK - 1) // CHUNK
        parts = parts_of(model, rows)
        shares = chunks if parts == 1 else 1
        units = model.kv_heads * shares * parts
        while mine < unit + units:
            part, rest = (mine - unit) % parts, (mine - unit) // parts
            first, last = rows * part // parts, rows * (part + 1) // parts
            if parts == 1:
                attend_share(thread, model, layer, index, call, at, rest // shares, first, last, rest % shares)
            else:
                reached = chunks
                if segments[at + PARENTS] == 0:
                    reached = (segments[at + LENGTH] + last + CHUNK - 1) // CHUNK
                attend_whole(thread, model, layer, index, call, at, rest, first, last, reached)
            mine = fetch_add(call.claims + index * 8, 1)
        unit += units


@compiled
def attend_one(
    thread: int,
    model: Any,
    layer: Any,
    index: int,
    call: Any,
    at: int,
    kv_head: int,
    first: int,
    last: int,
    chunk: int,
    tops: int,
    totals: int,
    stat_stride: int,
    sums: int,
    sum_stride: int,
) -> None:
    """`attend_chunk` of rows `first` to `last` of the segment whose record begins at `at`."""
    segments = integers(call.segment, call.segments * SEGMENT_FIELDS)
    groups = model.heads // model.kv_heads
    attend_chunk(
        chunk * CHUNK,
        call.queries + query_number(model, call, segments[at + FIRST] + first, kv_head) * model.dim * 4,
        groups,
        segments[at + PAGES],
        keys_in_page(model, index, kv_head),
        values_in_page(model, index, kv_head),
        model.dim,
        segments[at + LENGTH],
        first,
        last,
        segments[at + COUNT],
        segments[at + PARENTS],
        layer.window,
        call.scores + thread * call.score_stride * max(TOGETHER, groups),
        call.score_stride,
        call.paths + thread * call.path_bytes,
        tops,
        totals,
        stat_stride,
        sums,
        sum_stride,
    )


@compiled
def attend_share(
    thread: int, model: Any, layer: Any, index: int, call: Any, at: int, kv_head: int, first: int, last: int, chunk: int
) -> None:
    """One chunk's result for some rows, kept for `join_all`."""
    segments = integers(call.segment, call.segments * SEGMENT_FIELDS)
    place = query_number(model, call, segments[at + FIRST] + first, kv_head) * call.chunks + chunk
    stride = call.chunks * 4
    attend_one(
        thread, model, layer, index, call, at, kv_head, first, last, chunk,
        call.tops + place * 4, call.totals + place * 4, stride, call.sums + place * model.dim * 4, stride * model.dim,
    )  # fmt: skip


@compiled
def attend_whole(
    thread: int,
    model: Any,
    layer: Any,
    index: int,
    call: Any,
    at: int,
    kv_head: int,
    first: int,
    last: int,
    chunks: int,
) -> None:
    """All chunks' result for some rows, joined as they come."""
    segments = integers(call.segment, call.segments * SEGMENT_FIELDS)
    groups = model.heads // model.kv_heads
    count, size = (last - first) * groups, model.dim * 4
    sums = call.own_sums + thread * call.own_sums_bytes
    new_sums = sums + count * size
    tops, totals = new_sums + count * size, new_sums + count * size + count * 4
    new_tops, new_totals = totals + count * 4, totals + count * 8
    attend_one(thread, model, layer, index, call, at, kv_head, first, last, 0, tops, totals, 4, sums, size)
    for chunk in range(1, chunks):
        attend_one(
            thread, model, layer, index, call, at, kv_head, first, last, chunk, new_tops, new_totals, 4, new_sums, size
        )
        for i in range(count):
            join(
                model.dim, tops + i * 4, totals + i * 4, sums + i * size,
                new_tops + i * 4, new_totals + i * 4, new_sums + i * size,
            )  # fmt: skip
    for i in range(count):
        row, head = segments[at + FIRST] + first + i // groups, kv_head * groups + i % groups
        finish(model.dim, totals + i * 4, sums + i * size, call.attended + (row * model.heads + head) * size)


@compiled
def join_all(thread: int, threads: int, model: Any, call: Any) -> None:
    """Joins the results of the chunks of every row and head that were attended apart."""
    segments, owners = integers(call.segment, call.segments * SEGMENT_FIELDS), integers(call.owners, call.rows)
    groups = model.heads // model.kv_heads
    units = call.rows * model.heads
    for unit in range(units * thread // threads, units * (thread + 1) // threads):
        kv_head, row, group = unit // groups // call.rows, unit // groups % call.rows, unit % groups
        at = owners[row] * SEGMENT_FIELDS
        rows = segments[at + COUNT]
        if parts_of(model, rows) > 1:
            continue
        chunks = (segments[at + LENGTH] + rows + CHUNK - 1) // CHUNK
        place = unit * call.chunks
        tops, totals, sums = call.tops + place * 4, call.totals + place * 4, call.sums + place * model.dim * 4
        for chunk in range(1, chunks):
            new_sums = sums + chunk * model.dim * 4
            join(model.dim, tops, totals, sums, tops + chunk * 4, totals + chunk * 4, new_sums)
        head = kv_head * groups + group
        finish(model.dim, totals, sums, call.attended + (row * model.heads + head) * model.dim * 4)


@compiled
def embed(thread: int, threads: int, model: Any, call: Any) -> None:
    """This thread's share of the rows' embeddings."""
    tokens = integers(call.tokens, call.rows)
    lanes = model.embedding_lanes
    for row in range(call.rows * thread // threads, call.rows * (thread + 1) // threads):
        out = floats(call.x + row * model.width * 4, model.width)
        out[model.hidden :] = np.float32(0)
        token = tokens[row]
        if model.quantised != 0:
            unpack_row(model.embedding, token, model.hidden, call.x + row * model.width * 4)
        else:
            place = model.embedding + (token // lanes * model.hidden * lanes + token % lanes) * 4
            source = floats(place, model.hidden * lanes)
            for i in range(model.hidden):
                out[i] = source[i * lanes]


@compiled
def normalise_all(model: Any, call: Any, weight: int, out: int) -> None:
    """Every row, normalised over its hidden size."""
    stride = model.width * 4
    for row in range(call.rows):
        place, result = call.x + row * stride, out + row * stride
        normalise(place, weight, model.inverse_hidden, model.epsilon, model.hidden, model.width, result)


@compiled
def run_layer(thread: int, threads: int, model: Any, layer: Any, index: int, call: Any) -> None:
    """One thread's part of one block, up to the point where all have done theirs."""
    rows, hidden, quantised = call.rows, model.hidden, model.quantised
    stride, out_width = model.width * 4, model.heads * model.dim
    inner_stride = (model.inner + LANES - 1) // LANES * BYTES
    qkv_width = out_width + 2 * model.kv_heads * model.dim
    normed = call.normed + thread * rows * stride
    room = call.quantised + thread * call.quantised_bytes
    tile = call.tiles + thread * 2 * rows * BYTES
    normalise_all(model, call, layer.norm, normed)
    x, x_stride = prepare(model, rows, normed, stride, hidden, room)
    project(
        thread, threads, quantised, rows, x, x_stride, layer.qkv, layer.qkv_bias, hidden, qkv_width // LANES,
        call.qkv, qkv_width * 4,
    )  # fmt: skip
    meet(call.sync, threads)
    place_heads(thread, threads, model, layer, index, call)
    meet(call.sync, threads)
    attend_all(thread, model, layer, index, call)
    meet(call.sync, threads)
    join_all(thread, threads, model, call)
    meet(call.sync, threads)
    x, x_stride = prepare(model, rows, call.attended, out_width * 4, out_width, room)
    project_onto(
        thread, threads, quantised, rows, x, x_stride, layer.output, layer.output_bias, out_width,
        model.width // LANES, call.x, stride, tile,
    )  # fmt: skip
    meet(call.sync, threads)
    normalise_all(model, call, layer.mlp_norm, normed)
    x, x_stride = prepare(model, rows, normed, stride, hidden, room)
    project_gated(
        thread, threads, quantised, rows, x, x_stride, layer.gate_up, layer.gate_up_bias, hidden,
        inner_stride // BYTES, call.inner, inner_stride, tile,
    )  # fmt: skip
    meet(call.sync, threads)
    x, x_stride = prepare(model, rows, call.inner, inner_stride, model.inner, room)
    project_onto(
        thread, threads, quantised, rows, x, x_stride, layer.down, layer.down_bias, model.inner,
        model.width // LANES, call.x, stride, tile,
    )  # fmt: skip
    meet(call.sync, threads)


@compiled
def run_pass(thread: int, threads: int, models: Any, layers: Any, calls: Any) -> None:
    """One thread's part of a pass."""
    model, call = models[0], calls[0]
    stride = model.width * 4
    normed = call.normed + thread * call.rows * stride
    embed(thread, threads, model, call)
    meet(call.sync, threads)
    for index in range(model.layers):
        run_layer(thread, threads, model, layers[index], index, call)
    keep = integers(call.keep, call.kept)
    for i in range(call.kept):
        place, result = call.x + keep[i] * stride, normed + i * stride
        normalise(place, model.norm, model.inverse_hidden, model.epsilon, model.hidden, model.width, result)
    if call.kept > 0:
        panels = (model.vocabulary + LANES - 1) // LANES
        room = call.quantised + thread * call.quantised_bytes
        x, x_stride = prepare(model, call.kept, normed, stride, model.hidden, room)
        project(
            thread, threads, model.quantised, call.kept, x, x_stride, model.head, 0, model.hidden, panels,
            call.logits, panels * BYTES,
        )  # fmt: skip
    meet(call.sync, threads)


@compiled
def lead(descriptor: int, buffer: int, threads: int, models: Any, layers: Any, calls: Any) -> None:
    """What the first thread does: wakes the others with a byte for each, and runs a pass with them.

    All of it is compiled, so that no signal can come between the two. `buffer` holds as many bytes as there are
    threads.
    """
    sent = 0
    while sent < threads - 1:
        sent += max(0, send_bytes(descriptor, buffer, threads - 1 - sent))
    run_pass(0, threads, models, layers, calls)


@compiled
def serve(descriptor: int, buffer: int, thread: int, threads: int, models: Any, layers: Any, calls: Any) -> None:
    """What all threads but the first do: a pass for every byte of their pipe, until it is closed.

    They share it: a thread that has taken its byte reads again only after the pass, in which all take part.
    """
    state = 1
    while state != 0:
        state = wait_for_byte(descriptor, buffer)
        if state == 1:
            run_pass(thread, threads, models, layers, calls)
