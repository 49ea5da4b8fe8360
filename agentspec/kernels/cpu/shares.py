"""Attention of all rows of a pass, shared out among its threads."""

from typing import Any

from agentspec.compiled import compiled
from agentspec.kernels.cpu.attend import CHUNK, TOGETHER, attend_chunk, finish, join
from agentspec.kernels.cpu.heads import keys_in_page, query_number, values_in_page
from agentspec.kernels.cpu.lanes import fetch_add
from agentspec.kernels.cpu.memory import integers
from agentspec.kernels.cpu.records import COUNT, FIRST, LENGTH, PAGES, PARENTS, SEGMENT_FIELDS


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
        model.score_cap,
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
