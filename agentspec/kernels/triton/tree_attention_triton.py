"""The kernels of tree attention.

A program attends for some rows of one sequence, with all query heads that share one head of keys, over one part of
the sequence's positions; parts begin at multiples of their size, whatever else is in the batch. A second kernel joins
the parts by their sums' logarithms (the online softmax of Milakov and Gimelshein 2018; parts as in Flash-Decoding).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentspec.kernels.triton.backend import interpreting
from agentspec.kernels.triton.batch import PagedCache, TreeBatch
from agentspec.kernels.triton.blocks import Blocks

LOG2E = tl.constexpr(1.4426950408889634)
TOGETHER = 16
"""Parts that are joined at a time."""


@triton.jit
def absorb(
    first, past, queries, best, total, mixed, position, row, live,
    keys, values, table, depth, ancestors, chunked, cached, stop, lowest, words, scale,
    k_page, k_slot,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    COLUMNS: tl.constexpr, FEATURES: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Take the positions from `first` on into the running maximum, sum and mixture of values, up to `past`."""
    feature = tl.arange(0, FEATURES)
    for begin in range(first, past, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        there = (column < stop) & (column >= lowest)
        page = tl.load(table + column // PAGE, mask=there, other=0).to(tl.int64)
        slot = page * k_page + (column % PAGE) * k_slot
        k = tl.load(keys + slot[None, :] + feature[:, None], mask=there[None, :] & (feature < DIM)[:, None], other=0.0)
        v = tl.load(
            values + slot[:, None] + feature[None, :], mask=there[:, None] & (feature < DIM)[None, :], other=0.0
        )
        if WIDE:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(queries, k, input_precision=PRECISION) * scale
        if SOFTCAP > 0:
            scores = SOFTCAP * (2 * tl.sigmoid(2 * scores / SOFTCAP) - 1)
        seen = live[:, None] & there[None, :]
        place = column
        if TREE:
            node = column - cached
            inside = there & (node >= 0)
            bits = tl.load(
                ancestors + row[:, None] * words + (node // 32)[None, :],
                mask=live[:, None] & inside[None, :] & (chunked == 0), other=0,
            )  # fmt: skip
            above = ((bits >> (node % 32)[None, :]) & 1) != 0
            before = (chunked != 0) & (node[None, :] <= row[:, None])
            seen = seen & ((node < 0)[None, :] | above | before)
            place = tl.where(inside, cached + tl.load(depth + node, mask=inside, other=0), column)
        if WINDOW > 0:
            seen = seen & (place[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores * LOG2E, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        # Rows that have seen nothing yet would otherwise take infinity from infinity.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - level[:, None])
        fade = tl.exp2(best - level)
        total = total * fade + tl.sum(weights, 1)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        best = higher
    return best, total, mixed


@triton.jit(do_not_specialize=["tiles", "words"])
def attend_part(
    q, keys, values, out, weight, start, length, table, chunk, depth, ancestors,
    scale, tiles, words, q_row, q_head, k_page, k_slot, k_head, table_row,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr, FEATURES: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One part of the positions, for one tile of rows.

    q: (rows, heads, dim); out: (rows, heads, dim) if there is one part, else (rows, heads, parts, dim) float32 beside
    weight: (rows, heads, parts) float32, the binary logarithm of the part's sum, minus infinity where nothing is seen.
    """
    TILE: tl.constexpr = ROWS // GROUP
    sequence = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles * TILE
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    first = tl.load(start + sequence)
    rows = tl.load(start + sequence + 1) - first
    if tile >= rows:
        return
    cached = tl.load(length + sequence)
    chunked = tl.load(chunk + sequence)
    lane = tl.arange(0, ROWS)
    row = tile + lane // GROUP
    live = (lane < TILE * GROUP) & (row < rows)
    head = kv_head * GROUP + lane % GROUP
    position = cached + tl.load(depth + first + row, mask=live, other=0)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(tl.min(tl.where(live, position, 2147483647)) - WINDOW + 1, 0)
    # No row sees a node behind its own: ancestors come first.
    stop = tl.minimum(cached + tl.minimum(tile + TILE, rows), (part + 1) * SPLIT)
    begin = tl.maximum(part * SPLIT, lowest // COLUMNS * COLUMNS)
    turn = tl.maximum(begin, tl.minimum(stop, cached) // COLUMNS * COLUMNS)

    feature = tl.arange(0, FEATURES)
    at = (first + row).to(tl.int64)
    q_place = at[:, None] * q_row + head[:, None] * q_head + feature[None, :]
    queries = tl.load(q + q_place, mask=live[:, None] & (feature < DIM)[None, :], other=0.0)
    if WIDE:
        queries = queries.to(tl.float32)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, FEATURES], tl.float32)
    keys += kv_head * k_head
    values += kv_head * k_head
    table += sequence.to(tl.int64) * table_row
    depth += first
    ancestors += first.to(tl.int64) * words
    best, total, mixed = absorb(
        begin, turn, queries, best, total, mixed, position, row, live,
        keys, values, table, depth, ancestors, chunked, cached, stop, lowest, words, scale, k_page, k_slot,
        WINDOW, SOFTCAP, DIM, PAGE, COLUMNS, FEATURES, PRECISION, WIDE, False,
    )  # fmt: skip
    best, total, mixed = absorb(
        turn, stop, queries, best, total, mixed, position, row, live,
        keys, values, table, depth, ancestors, chunked, cached, stop, lowest, words, scale, k_page, k_slot,
        WINDOW, SOFTCAP, DIM, PAGE, COLUMNS, FEATURES, PRECISION, WIDE, True,
    )  # fmt: skip

    something = total > 0
    mixed = mixed / tl.where(something, total, 1.0)[:, None]
    shown = (feature < DIM)[None, :]
    place = at * (tl.num_programs(1) * GROUP) + head
    if WHOLE:
        tl.store(
            out + place[:, None] * DIM + feature[None, :], mixed.to(out.dtype.element_ty), mask=live[:, None] & shown
        )
    else:
        place = place * tl.num_programs(2) + part
        logarithm = tl.where(something, best + tl.log2(tl.where(something, total, 1.0)), float("-inf"))
        tl.store(weight + place, logarithm, mask=live)
        tl.store(out + place[:, None] * DIM + feature[None, :], mixed, mask=(live & something)[:, None] & shown)


@triton.jit(do_not_specialize=["number_of_parts"])
def join_parts(
    parts, weight, out, owner, number_of_parts,
    DIM: tl.constexpr, FEATURES: tl.constexpr, PADDED: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """The parts of one row and head, weighted by their sums.

    parts: (rows, heads, parts, dim) float32; out: (rows, heads, dim).
    """
    row = tl.program_id(0)
    if tl.load(owner + row) < 0:
        return
    place = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    every = tl.arange(0, PADDED)
    weight += place * number_of_parts
    all_logarithms = tl.load(weight + every, mask=every < number_of_parts, other=float("-inf"))
    best = tl.max(all_logarithms, 0)
    total = tl.sum(tl.exp2(all_logarithms - best), 0)
    feature = tl.arange(0, FEATURES)
    mixed = tl.zeros([FEATURES], tl.float32)
    for begin in range(0, number_of_parts, TOGETHER):
        number = begin + tl.arange(0, TOGETHER)
        logarithms = tl.load(weight + number, mask=number < number_of_parts, other=float("-inf"))
        filled = (logarithms > float("-inf"))[:, None] & (feature < DIM)[None, :]
        source = parts + (place * number_of_parts + number)[:, None] * DIM + feature[None, :]
        tile = tl.load(source, mask=filled, other=0.0)
        mixed += tl.sum(tile * tl.exp2(logarithms - best)[:, None], 0)
    tl.store(out + place * DIM + feature, (mixed / total).to(out.dtype.element_ty), mask=feature < DIM)


def launch(
    q: Tensor,
    cache: PagedCache,
    layer: int,
    batch: TreeBatch,
    scaling: float,
    window: int,
    softcap: float,
    blocks: Blocks,
) -> Tensor:
    """`tree_attention.attend` with these blocks; 0 stands for no window and no cap."""
    heads, dim = q.shape[1], cache.dim
    group = heads // cache.heads
    tiles = triton.cdiv(batch.most_rows, blocks.rows // group)
    parts = triton.cdiv(batch.most_positions, blocks.split)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    weight = pieces = out
    if parts > 1:
        weight = torch.empty(batch.rows, heads, parts, device=q.device, dtype=torch.float32)
        pieces = torch.empty(batch.rows, heads, parts, dim, device=q.device, dtype=torch.float32)
    keys, values = cache.keys[layer], cache.values[layer]
    features = triton.next_power_of_2(dim)
    wide = q.dtype == torch.bfloat16 and interpreting()  # which multiplies no bfloat16
    attend_part[batch.sequences * tiles, cache.heads, parts](
        q, keys, values, pieces, weight,
        batch.start, batch.length, batch.table, batch.chunk, batch.depth, batch.ancestors,
        scaling, tiles, batch.ancestors.shape[1], q.stride(0), q.stride(1), *keys.stride()[:3], batch.table.stride(0),
        WINDOW=window, SOFTCAP=softcap, GROUP=group, DIM=dim, PAGE=cache.page, ROWS=blocks.rows, COLUMNS=blocks.columns,
        SPLIT=blocks.split, FEATURES=features, WHOLE=parts == 1, PRECISION="ieee", WIDE=wide,
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    if parts > 1:
        join_parts[batch.rows, heads](
            pieces, weight, out, batch.owner, parts, DIM=dim, FEATURES=features,
            PADDED=triton.next_power_of_2(parts), TOGETHER=TOGETHER,
        )  # fmt: skip
    return out
