"""A whole pass of a decoder in compiled code: all threads run it together, layer by layer.

The block is that of the Llama family: root mean square norms before attention and before a gated MLP, rotary
positions in all layers or some, grouped-query attention, with biases, norms of each head's queries and keys, and soft
caps, where the model has them. The Gemma family's has norms behind attention and MLP too.
"""

from typing import Any

import numpy as np

from agentspec.compiled import compiled
from agentspec.kernels.cpu.heads import place_heads, scale
from agentspec.kernels.cpu.lanes import BYTES, LANES, send_bytes, wait_for_byte
from agentspec.kernels.cpu.memory import floats, integers
from agentspec.kernels.cpu.projections import normalise, prepare, project, project_gated, project_onto
from agentspec.kernels.cpu.quantised import unpack_row
from agentspec.kernels.cpu.shares import attend_all, join_all
from agentspec.kernels.cpu.team import meet
from agentspec.kernels.cpu.vectors import add, bend


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
        scale(call.x + row * model.width * 4, model.hidden, model.embedding_scale)


@compiled
def normalise_all(model: Any, call: Any, weight: int, out: int) -> None:
    """Every row, normalised over its hidden size."""
    stride = model.width * 4
    for row in range(call.rows):
        place, result = call.x + row * stride, out + row * stride
        normalise(place, weight, model.inverse_hidden, model.epsilon, model.hidden, model.width, result)


@compiled
def project_back(
    thread: int,
    threads: int,
    model: Any,
    call: Any,
    x: int,
    x_stride: int,
    weight: int,
    bias: int,
    norm: int,
    inputs: int,
    tile: int,
) -> None:
    """Adds x * weight + bias to the rows, normalised before where there is a norm for it."""
    rows, stride, panels = call.rows, model.width * 4, model.width // LANES
    if norm == 0:
        project_onto(
            thread, threads, model.quantised, rows, x, x_stride, weight, bias, inputs, panels, call.x, stride, tile
        )
        return
    project(thread, threads, model.quantised, rows, x, x_stride, weight, bias, inputs, panels, call.products, stride)
    meet(call.sync, threads)
    for row in range(rows * thread // threads, rows * (thread + 1) // threads):
        place = call.products + row * stride
        normalise(place, norm, model.inverse_hidden, model.epsilon, model.hidden, model.width, place)
        for panel in range(panels):
            add(place + panel * BYTES, call.x + row * stride + panel * BYTES)


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
    project_back(
        thread, threads, model, call, x, x_stride, layer.output, layer.output_bias, layer.output_norm, out_width, tile
    )
    meet(call.sync, threads)
    normalise_all(model, call, layer.mlp_norm, normed)
    x, x_stride = prepare(model, rows, normed, stride, hidden, room)
    project_gated(
        thread, threads, quantised, rows, x, x_stride, layer.gate_up, layer.gate_up_bias, hidden,
        inner_stride // BYTES, call.inner, inner_stride, tile, model.gelu,
    )  # fmt: skip
    meet(call.sync, threads)
    x, x_stride = prepare(model, rows, call.inner, inner_stride, model.inner, room)
    project_back(
        thread, threads, model, call, x, x_stride, layer.down, layer.down_bias, layer.down_norm, model.inner, tile
    )
    meet(call.sync, threads)


@compiled
def find_logits(thread: int, threads: int, model: Any, call: Any) -> None:
    """This thread's share of the kept rows' logits."""
    stride, panels = model.width * 4, (model.vocabulary + LANES - 1) // LANES
    normed = call.normed + thread * call.rows * stride
    keep = integers(call.keep, call.kept)
    for i in range(call.kept):
        place, result = call.x + keep[i] * stride, normed + i * stride
        normalise(place, model.norm, model.inverse_hidden, model.epsilon, model.hidden, model.width, result)
    room = call.quantised + thread * call.quantised_bytes
    x, x_stride = prepare(model, call.kept, normed, stride, model.hidden, room)
    project(
        thread, threads, model.quantised, call.kept, x, x_stride, model.head, 0, model.hidden, panels,
        call.logits, panels * BYTES,
    )  # fmt: skip
    if model.logit_cap > np.float32(0):
        first, last = panels * thread // threads, panels * (thread + 1) // threads
        for i in range(call.kept):
            bend(call.logits + (i * panels + first) * BYTES, last - first, model.logit_cap)


@compiled
def run_pass(thread: int, threads: int, models: Any, layers: Any, calls: Any) -> None:
    """One thread's part of a pass."""
    model, call = models[0], calls[0]
    embed(thread, threads, model, call)
    meet(call.sync, threads)
    for index in range(model.layers):
        run_layer(thread, threads, model, layers[index], index, call)
    if call.kept > 0:
        find_logits(thread, threads, model, call)
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
